"""Drive several steps in one thread, or in one event loop, as if they were one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from stockade.runs.io.eventloop import Events, Steps

T = TypeVar("T")


class Track(Generic[T]):
    """One of several steps that are driven together; it waits for its own events."""

    def __init__(self, make: Callable[[Events], Steps[T]]) -> None:
        self.events = Events()
        self.done = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self._make = make
        self._steps: Steps[T] | None = None
        self._until: float | None = None

    def advance(self, error: BaseException | None = None) -> None:
        """Resume the steps, with an exception if there is one."""
        try:
            if self._steps is None:
                self._steps = self._make(self.events)
            patience = next(self._steps) if error is None else self._steps.throw(error)
        except StopIteration as ended:
            self.done, self.value = True, ended.value
        except BaseException as failure:
            self.done, self.error = True, failure
        else:
            self._until = None if patience is None else time.monotonic() + patience

    def is_due(self, ready: Sequence[int], now: float) -> bool:
        """Whether what the steps wait for is there, or their time is over."""
        late = self._until is not None and now >= self._until
        return late or self.events.busy or self.events.fileno() in ready

    def patience(self, now: float) -> float | None:
        """Return how many seconds the steps are willing to wait."""
        if self.events.busy:
            return 0
        return None if self._until is None else max(0.0, self._until - now)


def together(
    makers: Sequence[Callable[[Events], Steps[T]]],
    events: Events,
    give_up: Callable[[BaseException], BaseException],
    spread: Callable[[T], BaseException | None] = lambda _: None,
) -> Steps[list[T]]:
    """Drive all steps at the same time and return their values in order.

    If one raises, `give_up` makes the exception that ends the others, and the first exception is raised once
    all have ended. An exception that arrives while they wait is raised in each of them. A signal's arrives
    wherever the program is, so one of the steps may catch it alone: `spread` then makes it of that one's
    value, for the others.
    """
    tracks: list[Track[T]] = []
    failure: BaseException | None = None

    def advance(track: Track[T], error: BaseException | None = None) -> None:
        nonlocal failure
        track.advance(error)
        if not track.done:
            return
        events.forget(track.events.fileno())
        end: BaseException | None = None
        if track.error is None:
            end = spread(track.value)  # type: ignore[arg-type]
        elif failure is None:
            failure = track.error
            end = give_up(failure)
        for other in tuple(tracks) if end is not None else ():
            if not other.done:
                advance(other, end)

    try:
        for make in makers:
            if failure is not None:
                break
            track = Track(make)
            tracks.append(track)
            events.watch(track.events.fileno())
            advance(track)
        while living := [track for track in tracks if not track.done]:
            now = time.monotonic()
            waits = [wait for track in living if (wait := track.patience(now)) is not None]
            try:
                yield min(waits, default=None)
            except BaseException as error:
                for track in living:
                    if not track.done:
                        advance(track, error)
                continue
            now = time.monotonic()
            for track in living:
                if not track.done and track.is_due(events.ready, now):
                    track.events.wait(0)
                    advance(track)
        if failure is not None:
            raise failure
        return [track.value for track in tracks]  # type: ignore[misc]
    finally:
        for track in tracks:
            track.events.close()
