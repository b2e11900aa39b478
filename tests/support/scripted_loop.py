"""A loop that does what a test says, with the values of a real one, and the screen that shows it."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from stockade.loop import events
from stockade.loop.items.item import WorkItem
from stockade.loop.record import ItemRecord, LoopRecord, Store
from stockade.loop.settings import LoopSettings
from stockade.loop.tui.app import LoopApp

MECHANISMS = {"files": "mount namespace", "network.rules": "egress", "syscalls": "seccomp filter"}


class ScriptedLoop:
    """`run` tells the events that the test puts in, until it is paused, ended, or told to fail."""

    def __init__(self, directory: Path, items: list[WorkItem]) -> None:
        self.project = str(directory)
        settings = LoopSettings(agent=("./agent",), verify="make test")
        self.record = LoopRecord(
            id="0a1b2c", project=self.project, created=0.0, settings=settings, policy={},
            items=[ItemRecord(item=item) for item in items],
        )  # fmt: skip
        self.store = Store(self.project)
        self.calls: list[tuple[Any, ...]] = []
        self.listener: Callable[[events.LoopEvent], object] = lambda event: None
        self._steps: queue.Queue[events.LoopEvent | BaseException] = queue.Queue()

    def put(self, *steps: events.LoopEvent | BaseException) -> None:
        """Let the running loop tell these, or raise."""
        for step in steps:
            self._steps.put(step)

    def listen(self, listener: Callable[[events.LoopEvent], object] | None) -> None:
        assert listener is not None
        self.listener = listener

    def run(self) -> events.LoopEnd:
        self.calls.append(("run",))
        while True:
            step = self._steps.get()
            if isinstance(step, BaseException):
                raise step
            self.listener(step)
            if isinstance(step, events.LoopEnd):
                return step

    def start_event(self) -> events.LoopStart:
        return events.LoopStart(
            time=time.time(), loop=self.record.id, project=self.project, agent="claude-code", version="2.1",
            program="claude", backend="native", mechanisms=MECHANISMS, items=self.record.summaries(),
            resumed=False,
        )  # fmt: skip

    def end_event(self, outcome: events.LoopOutcome) -> events.LoopEnd:
        return events.LoopEnd(
            time=time.time(), loop=self.record.id, outcome=outcome, reason="", exit_code=0,
            items=self.record.summaries(), spending=events.Spending(), diff=events.DiffStat(),
        )  # fmt: skip

    def pause(self) -> None:
        self.calls.append(("pause",))
        self.put(events.PauseRequest(time=time.time()))

    def kill(self) -> None:
        self.calls.append(("kill",))
        self.put(self.end_event("paused"))

    def retry(self, id: str) -> None:
        self.calls.append(("retry", id))

    def skip(self, id: str) -> None:
        self.calls.append(("skip", id))

    def release(self, id: str) -> None:
        self.calls.append(("release", id))

    def edit(self, id: str, **changes: Any) -> WorkItem:
        self.calls.append(("edit", id, changes))
        found = self.record.find(id)
        found.item = msgspec.structs.replace(found.item, **changes)
        return found.item


def screen_text(app: LoopApp) -> str:
    """Return what is on the terminal now, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)
