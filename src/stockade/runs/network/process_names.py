"""Which program inside made a connection that the egress has recorded.

The egress process records both ends of a connection as the program has them. The supervisor asks the kernel,
in the sandbox's network namespace, which socket has these ends, and then looks which process of the sandbox
holds it. That happens after the connection has come about and never delays it, so the answer is known only if
the connection was still open by then.

Programs decide how often the supervisor looks and how much there is to see, so both are bounded. A program
chooses its own name, and can hand a socket to another program: a name here helps the reader and proves
nothing.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable

from stockade.egress.records import RawRecord

#: How many connections are looked up at once, and during one run.
MOST_AT_ONCE, MOST_IN_RUN = 50, 1000
#: How many processes, threads and descriptors are looked at for the connections that are looked up at once.
MOST_STEPS = 2048


class ProcessNames:
    """The processes that made the connections of one sandbox, as far as they were seen."""

    def __init__(self, questions: int, pid: int) -> None:
        """Take over the socket for questions; `pid` is the sandbox's first process."""
        self._questions, self._pid = questions, pid
        self._lock = threading.Lock()
        #: By the number of an egress process and a slot of its records: when the connection began that was
        #: looked up last, and the process that was found.
        self._known: dict[tuple[int, int], tuple[float, str | None]] = {}
        self._left = MOST_IN_RUN
        self._number = 0

    def renew(self) -> None:
        """Allow the lookups of one more run."""
        self._left = MOST_IN_RUN

    def look_up(self, records: Iterable[tuple[int, RawRecord]]) -> None:
        """Find the processes of those connections that are open and were not looked up yet.

        Each record has the number of the egress process that wrote it before it.
        """
        fresh = [(number, one) for number, one in records if one.open and one.inside is not None]
        if not fresh:
            return
        # Many runs make no connection, and a launch waits for what is loaded at the top.
        from stockade.linux.sock_diag import find_inode
        from stockade.linux.socket_holders import StepBudget, find_holders

        with self._lock:
            asked: dict[int, tuple[tuple[int, int], float]] = {}
            for number, one in fresh:
                if self._questions < 0 or self._left <= 0 or len(asked) >= MOST_AT_ONCE:
                    break
                key = number, one.slot
                if one.inside is None or self._known.get(key, (None,))[0] == one.time:
                    continue
                self._left -= 1
                self._number = (self._number + 1) % 2**32
                address, port, other = one.inside
                inode = find_inode(self._questions, (address, port, other, one.port), self._number)
                self._known[key] = one.time, None
                if inode:
                    asked[inode] = key, one.time
            if asked:
                holders = find_holders(self._pid, asked, StepBudget(MOST_STEPS))
                for inode, process in holders.items():
                    key, began = asked[inode]
                    self._known[key] = began, process

    def find(self, ends: tuple[str, int, str, int]) -> str | None:
        """Return the process that holds a connection with these ends, its own first; None if not found."""
        from stockade.linux.sock_diag import find_inode
        from stockade.linux.socket_holders import StepBudget, find_holders

        with self._lock:
            if self._questions < 0:
                return None
            self._number = (self._number + 1) % 2**32
            inode = find_inode(self._questions, ends, self._number)
            found = find_holders(self._pid, (inode,), StepBudget(MOST_STEPS)) if inode else {}
            return found.get(inode)

    def of(self, number: int, record: RawRecord) -> str | None:
        """Return the process that made a connection, if it is known; see `look_up`."""
        began, process = self._known.get((number, record.slot), (None, None))
        return process if began == record.time else None

    def close(self) -> None:
        """Look up no more, and close the socket."""
        # A fork may have copied the lock while another thread held it; a lookup takes milliseconds.
        locked = self._lock.acquire(timeout=1.0)
        questions, self._questions = self._questions, -1
        if questions >= 0:
            os.close(questions)
        if locked:
            self._lock.release()
