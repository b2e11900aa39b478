"""`LoopControl`: what the screen needs of a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from stockade.loop.events import LoopEnd, LoopEvent
from stockade.loop.items.item import WorkItem
from stockade.loop.record import LoopRecord, Store


class LoopControl(Protocol):
    """A loop, as the screen drives it; every call can come from any thread."""

    @property
    def store(self) -> Store:
        """The directory with the loop's state and logs."""

    @property
    def record(self) -> LoopRecord:
        """The loop's state, to read."""

    def listen(self, listener: Callable[[LoopEvent], object] | None) -> None:
        """Call this function with every event from now on."""

    def run(self) -> LoopEnd:
        """Work until nothing is left to do, or until it is paused or ended."""

    def pause(self) -> None:
        """Stop when the attempts that run now are over."""

    def kill(self) -> None:
        """Stop now, with every process of every attempt."""

    def retry(self, id: str) -> None:
        """Give an item its attempts again."""

    def skip(self, id: str) -> None:
        """Leave an item out."""

    def release(self, id: str) -> None:
        """Let what depends on an item go on, if a person has committed what it held back."""

    def edit(self, id: str, **changes: Any) -> WorkItem:
        """Change an item from its next attempt on."""
