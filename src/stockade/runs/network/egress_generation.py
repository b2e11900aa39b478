"""One egress process of a sandbox as the supervisor keeps it: the process, and what it has recorded.

A sandbox has another one each time its rules get a port. What the egress process decides, it writes to memory
that the supervisor reads when it wants to.
"""

from __future__ import annotations

import os
import select
from typing import NamedTuple

from stockade.egress.records import NO_TOTALS, RawRecord, RecordReader, Totals
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.network.egress_process import EgressProcess


class GenerationMark(NamedTuple):
    """How much one egress process had recorded at some moment."""

    cursor: int
    totals: Totals
    #: How often each shared record had been used, by its slot.
    times: dict[int, int]


#: How an egress process ends that has handed over and has no connection left.
DONE = "with exit code 0"
NOTHING = GenerationMark(0, NO_TOTALS, {})


class EgressGeneration:
    """One egress process of a sandbox, and what it has recorded.

    A sandbox has another one each time its rules get a port. The last one accepts connections, and those
    before it relay what was under way when they handed over.
    """

    def __init__(self, process: EgressProcess, records: int) -> None:
        self.process = process
        self._descriptor = records
        self._reader = RecordReader(records)
        #: What the memory held last, once it is closed.
        self._last: tuple[list[tuple[int, RawRecord]], Totals] | None = None
        #: How many changes the last mark saw, and how often each record had been used then, by its slot.
        self._seen: tuple[int, dict[int, int]] = (0, {})
        self._crash: tuple[float, str] | None = None

    def crash(self) -> tuple[float, str] | None:
        """Return when and how it ended, if that was not after its last connection; None otherwise."""
        if self._crash is None and (found := self.process.ending()) is not None and found[1] != DONE:
            self._crash = found
        return self._crash

    def mark(self) -> GenerationMark:
        """Return how much is recorded now."""
        changes = self._reader.changes() if self._last is None else self._seen[0]
        if self._seen[0] != changes:
            self._seen = changes, {one.slot: one.times for _, one in self.changed_since(0)}
        return GenerationMark(changes, self.totals(), self._seen[1])

    def since(self, mark: GenerationMark) -> list[RawRecord]:
        """Return what was recorded since a mark."""
        return [_later(one, mark.times.get(one.slot, 0)) for _, one in self.changed_since(mark.cursor)]

    def changed_since(self, cursor: int) -> list[tuple[int, RawRecord]]:
        """Return the records that are new or changed since a cursor, each with that of its change."""
        if self._last is None:
            return self._reader.changed_since(cursor)
        return [one for one in self._last[0] if one[0] > cursor]

    def totals(self) -> Totals:
        """Return what it has counted."""
        return self._reader.totals() if self._last is None else self._last[1]

    def closed(self, events: Events) -> Steps[None]:
        """End the process, wait until it is gone, and keep what it has recorded."""
        if self._last is not None:
            return
        self.crash()
        try:
            try:
                yield from self.process.drained(events)
            finally:
                yield from self.process.closed(events)
        finally:
            self._last = self._reader.changed_since(0), self._reader.totals()
            os.close(self._descriptor)


class EndWatch:
    """A descriptor that becomes readable when nothing accepts connections any more.

    It stays the same when another egress process takes over.
    """

    def __init__(self) -> None:
        self._all = select.epoll()
        self._failed = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._all.register(self._failed, select.EPOLLIN)
        self.descriptor = self._all.fileno()

    def add(self, process: EgressProcess) -> None:
        """Count the end of a process."""
        self._all.register(process.pidfd, select.EPOLLIN)

    def remove(self, process: EgressProcess) -> None:
        """Count its end no more."""
        if not process.is_closed:
            self._all.unregister(process.pidfd)

    def fail(self) -> None:
        """Become readable."""
        os.eventfd_write(self._failed, 1)

    def close(self) -> None:
        """Close it."""
        self._all.close()
        os.close(self._failed)


def _later(one: RawRecord, before: int) -> RawRecord:
    """Return a record without what it had counted before; one connection counts in each run that it spans."""
    return one._replace(times=max(1, one.times - before))
