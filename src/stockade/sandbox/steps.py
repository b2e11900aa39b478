"""Waiting without knowing who waits: one core for the sync and the async face.

What a sandbox does is written as steps: a generator that yields how long it
is willing to wait (None: for ever) and is resumed when something it watches
is ready, or the time is over. `drive` waits in this thread, `aio.drive` in an
event loop. What the waiting raises (Ctrl-C, a cancelled task) is raised in
the steps, which may go on for a while to end things properly.
"""

from __future__ import annotations

import select
from collections.abc import Generator
from typing import TypeVar

from stockade.sandbox import scarce

T = TypeVar("T")
Steps = Generator[float | None, None, T]

READABLE, WRITABLE, URGENT = select.EPOLLIN, select.EPOLLOUT, select.EPOLLPRI


class Events:
    """Descriptors that are watched, and which of them were ready when somebody last waited."""

    def __init__(self) -> None:
        with scarce.refused():
            self._poll = select.epoll()
        #: Regular files are always ready, so the kernel refuses to watch them.
        self._always: set[int] = set()
        self.ready: list[int] = []

    def fileno(self) -> int:
        return self._poll.fileno()

    def watch(self, descriptor: int, what: int = READABLE) -> None:
        try:
            self._poll.register(descriptor, what)
        except PermissionError:
            self._always.add(descriptor)

    def forget(self, descriptor: int) -> None:
        """To be called before the descriptor is closed: a copy in a forked child would keep it watched."""
        if descriptor in self._always:
            self._always.remove(descriptor)
        else:
            self._poll.unregister(descriptor)

    def wait(self, seconds: float | None) -> None:
        """Wait in this thread."""
        found = self._poll.poll(0 if self._always else seconds)
        self.ready = [descriptor for descriptor, _ in found] + list(self._always)

    @property
    def busy(self) -> bool:
        """Whether something is ready that no event loop can wait for."""
        return bool(self._always)

    def close(self) -> None:
        self._poll.close()

    def __enter__(self) -> Events:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def drive(steps: Steps[T], events: Events) -> T:
    """Take every step, waiting in this thread."""
    try:
        patience = next(steps)
        while True:
            try:
                events.wait(patience)
            except BaseException as error:
                events.ready = []
                patience = steps.throw(error)
            else:
                patience = next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
