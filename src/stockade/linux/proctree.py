"""The descendants of a process inside a sandbox, seen and signalled from outside.

The supervisor sends signals itself, not through the gate, so that it knows
that they have arrived when the call returns. It opens a pidfd of each process
and then looks again: a pid that was reused meanwhile is not signalled.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from contextlib import suppress

import msgspec

from stockade.linux.procstat import BORN, PARENT, STATE, TIMES, stat_fields

TICKS = os.sysconf("SC_CLK_TCK")


class Moment(msgspec.Struct, frozen=True):
    """A moment, to tell which processes started later: by the kernel's coarse clock, then by rising pids."""

    tick: int
    last: int

    @classmethod
    def now(cls) -> Moment:
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)
        with open("/proc/loadavg", "rb", buffering=0) as file:
            return cls(tick, int(file.read().split()[4]))

    def before(self, process: ProcessStat) -> bool:
        """Whether the process started after this moment."""
        return process.born > self.tick or (process.born == self.tick and process.pid > self.last)


class ProcessStat(msgspec.Struct, frozen=True):
    """One process as /proc shows it; processor times in seconds include the children it has waited for."""

    pid: int
    parent: int
    user: float
    system: float
    born: int


def look(pid: int) -> ProcessStat | None:
    """Read /proc/PID/stat of a process; None if there is no such process."""
    if not (fields := stat_fields(f"/proc/{pid}")):
        return None
    user, system, waited_user, waited_system = map(int, fields[TIMES])
    return ProcessStat(
        pid,
        int(fields[PARENT]),
        (user + waited_user) / TICKS,
        (system + waited_system) / TICKS,
        int(fields[BORN]),
    )


def is_below(process: ProcessStat | None, ancestor: int) -> bool:
    """Whether a process descends from `ancestor`."""
    while process is not None and process.parent > 1:
        if process.parent == ancestor:
            return True
        process = look(process.parent)
    return False


def number_of(pidfd: int) -> int:
    """Return the pid of the process that a pidfd refers to; -1 if it has ended."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def hold(process: ProcessStat | None) -> int:
    """Open a pidfd of a process that `look` found, if it is still the same process; otherwise -1."""
    if process is None:
        return -1
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return -1
    now = look(process.pid)
    if now is not None and (now.parent, now.born) == (process.parent, process.born):
        return descriptor
    os.close(descriptor)
    return -1


def lives(descriptor: int) -> bool:
    """Whether the process of a pidfd still exists, so that its pid has not been reused."""
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return False
    return True


def find_below(pid: int, held: int, since: Moment) -> list[ProcessStat]:
    """Return the children that a process started after `since`, and all below; `held` is its pidfd."""
    children = _children_by_parent()
    if not lives(held):
        return []  # its pid may be reused, and these be children of another process of the host
    found: list[ProcessStat] = []
    pending = [child for child in children.get(pid, ()) if since.before(child)]
    while pending:
        process = pending.pop()
        pending += children.pop(process.pid, ())
        found.append(process)
    return found


def all_of(pids: Iterable[int]) -> list[ProcessStat]:
    """Return processes, as far as they live, and all below them."""
    children = _children_by_parent()
    known = {process.pid: process for siblings in children.values() for process in siblings}
    pending = [known[pid] for pid in pids if pid in known]
    found: list[ProcessStat] = []
    while pending:
        process = pending.pop()
        pending += children.pop(process.pid, ())
        found.append(process)
    return found


def signal_each(processes: list[ProcessStat], number: int) -> None:
    """Signal those of the processes that still exist."""
    for process in processes:
        if (descriptor := hold(process)) >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
            os.close(descriptor)


def sleeps_alone(pid: int, since: Moment) -> bool:
    """Whether a process sleeps, and no child that it started after `since` lives."""
    fields = stat_fields(f"/proc/{pid}")
    if not fields or fields[STATE] != b"S":
        return False
    return not any(since.before(child) for child in _children_by_parent().get(pid, ()))


def _children_by_parent() -> dict[int, list[ProcessStat]]:
    children: dict[int, list[ProcessStat]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if (process := look(int(name))) is not None:
            children.setdefault(process.parent, []).append(process)
    return children
