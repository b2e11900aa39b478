"""Copies between the user's terminal and the program's, with little in between."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from stockade.runs.io.eventloop import READABLE, WRITABLE, Events
from stockade.runs.io.streams import CHUNK

#: How many bytes of output are buffered for a stalled terminal; then the program waits.
MOST = 1 << 16
#: How many keys are buffered for a program that reads none. Further keys are lost: we keep reading, so that
#: the way out always works.
MOST_KEYS = 4 << 20


class Flow:
    """Copies from one descriptor to another that may be slow, and buffers little in between."""

    def __init__(
        self,
        events: Events,
        source: int,
        sink: int,
        seen: Callable[[bytes], None],
        *,
        lossy: bool = False,
    ) -> None:
        self.pending = bytearray()
        self._lossy = lossy
        self._events, self._source, self._sink, self._seen = events, source, sink, seen
        self._watched: set[int] = set()
        self._reading = self._dropping = False

    def read(self, wanted: bool) -> None:
        """Start or stop reading the source."""
        self._reading = wanted
        self._aim()

    def move(self, end: int) -> bool:
        """Read or write; return False when the source has ended."""
        going = True
        if end == self._source and end in self._watched:
            going = self._pull() is not None
        self.push()
        self._aim()
        return going

    def drain(self, most: int, *, hold: bool = False) -> None:
        """Copy what is there, at most `most` bytes; with `hold`, buffer all that the sink does not take."""
        source = select.poll()
        source.register(self._source, select.POLLIN)
        while most > 0 and (hold or len(self.pending) < MOST):
            # After `su` the user's terminal cannot be opened anew, and reading it blocks.
            if not source.poll(0) or not (got := self._pull()):
                return
            most -= got
            self.push()

    def push(self) -> None:
        """Write what the sink takes."""
        try:
            while self.pending:
                del self.pending[: os.write(self._sink, self.pending[:CHUNK])]
        except BlockingIOError:
            pass

    def drop(self) -> None:
        """Discard everything from now on."""
        self._dropping = True
        self.pending.clear()
        self._aim()

    def close(self) -> None:
        """Copy nothing more."""
        self._reading = False
        self.pending.clear()
        self._aim()

    def _pull(self) -> int | None:
        """Read once and return the number of bytes; None at the end, which is EIO on a terminal."""
        try:
            data = os.read(self._source, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        if not data:
            return None
        if not self._dropping:
            self._seen(data)
            if not self._lossy or len(self.pending) < MOST_KEYS:
                self.pending += data
        return len(data)

    def _aim(self) -> None:
        room = self._lossy or len(self.pending) < MOST
        wanted = {self._source: READABLE} if self._reading and room else {}
        if self.pending:
            wanted[self._sink] = WRITABLE
        for end in self._watched - wanted.keys():
            self._events.forget(end)
        for end in wanted.keys() - self._watched:
            self._events.watch(end, wanted[end])
        self._watched = set(wanted)
