"""Decisions as they are made, while a program runs: each is read from the records, and told.

The egress process nudges the supervisor when there is something new. A program decides how often that is, so
the supervisor looks only so often.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable

from stockade.egress.records import RawRecord
from stockade.result import Decision
from stockade.runs.io.eventloop import Events

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.egress_handle import EgressHandle

#: Between two looks at the records: seconds at least, and times as long as the last look took.
LOOK_SECONDS, LOOK_SHARE = 0.05, 10


class DecisionFollower:
    """Looks at each decision as it is recorded: finds its process, and tells of it.

    It tells of a decision once when it is made, and again if it is revised.
    """

    def __init__(
        self,
        handle: EgressHandle,
        tell: Callable[[Decision], object] | None,
        events: Events,
        cursors: dict[int, int],
    ) -> None:
        #: Readable when there is something new.
        self.descriptor = handle.nudge
        self._handle, self._tell, self._events = handle, tell, events
        #: For each egress process, how far its records were read.
        self._cursors = cursors
        self._told: dict[tuple[int, int], tuple[str, str]] = {}
        #: When to look again; until then a nudge has to wait. A program, or an egress process that one has
        #: taken over, could keep the supervisor busy otherwise.
        self._due: float | None = None
        events.watch(self.descriptor)

    def move(self) -> None:
        """Look at what is new, because the descriptor is readable."""
        if self._due is None:
            self._forget()
            began = time.monotonic()
            self.read()
            now = time.monotonic()
            self._due = now + max(LOOK_SECONDS, LOOK_SHARE * (now - began))

    def patience(self) -> float | None:
        """Return how many seconds to wait at most before the next call of `look`."""
        if self._due is None or self._handle.is_closing:
            return None
        return max(0.0, self._due - time.monotonic())

    def look(self) -> None:
        """Wait for the descriptor again, once it is time."""
        if self._due is not None and time.monotonic() >= self._due and not self._handle.is_closing:
            self._due = None
            self._events.watch(self.descriptor)

    def read(self) -> None:
        """Look at what is new."""
        if not self._handle.is_closing:
            _take_nudge(self.descriptor)
        fresh: list[tuple[int, RawRecord]] = []
        for number, generation in enumerate(self._handle.generations):
            for cursor, one in generation.changed_since(self._cursors.get(number, 0)):
                self._cursors[number] = cursor
                fresh.append((number, one))
        self._handle.names.look_up(fresh)
        if self._tell is not None:
            self._tell_of(fresh, self._tell)

    def _tell_of(self, fresh: list[tuple[int, RawRecord]], tell: Callable[[Decision], object]) -> None:
        for number, one in fresh:
            said, key = (one.verdict, one.reason), (number, one.slot)
            if self._told.get(key) != said and not (key in self._told and one.verdict == "allowed"):
                self._told[key] = said
                tell(self._handle.decisions([(number, one)])[0])

    def close(self) -> None:
        """Look no more, and tell no more."""
        if self._due is None:
            self._forget()
            self._due = math.inf
        self._tell = None

    def _forget(self) -> None:
        # Another thread that closes the sandbox may have closed it.
        with contextlib.suppress(OSError):
            self._events.forget(self.descriptor)


def _take_nudge(descriptor: int) -> None:
    """Empty an eventfd without waiting: the egress process shares it, and could have made it blocking."""
    try:
        with contextlib.suppress(BlockingIOError):
            os.preadv(descriptor, [bytearray(8)], -1, os.RWF_NOWAIT)
    except (AttributeError, OSError):  # a C library without the call, or a kernel before 5.8
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(descriptor)
