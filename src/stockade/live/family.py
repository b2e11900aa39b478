"""The processes below one that is inside, seen and signalled from outside.

A signal is sent at once, and not through the gate, so that whoever goes on
afterwards knows that it has arrived. Each process is held by a pidfd and then
looked at again: a number that was given to somebody else meanwhile is not
signalled.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import msgspec

TICKS = os.sysconf("SC_CLK_TCK")


class Moment(msgspec.Struct, frozen=True):
    """A moment, to tell who was born later: the kernel's clock is coarse, its numbers rise meanwhile."""

    tick: int
    last: int

    @classmethod
    def now(cls) -> Moment:
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS)
        with open("/proc/loadavg", "rb", buffering=0) as file:
            return cls(tick, int(file.read().split()[4]))

    def before(self, process: Process) -> bool:
        """Whether the process was born afterwards."""
        return process.born > self.tick or (process.born == self.tick and process.pid > self.last)


class Process(msgspec.Struct, frozen=True):
    """One process, as the kernel shows it; times in seconds, of it and of those it has waited for."""

    pid: int
    parent: int
    user: float
    system: float
    born: int


def look(pid: int) -> Process | None:
    """What the kernel says of a process; None if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            words = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    user, system, waited_user, waited_system = map(int, words[11:15])
    return Process(
        pid, int(words[1]), (user + waited_user) / TICKS, (system + waited_system) / TICKS, int(words[19])
    )


def is_below(process: Process | None, ancestor: int) -> bool:
    """Whether it descends from that one."""
    while process is not None and process.parent > 1:
        if process.parent == ancestor:
            return True
        process = look(process.parent)
    return False


def number_of(pidfd: int) -> int:
    """The process that a pidfd stands for; one that has ended is -1."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def hold(process: Process | None) -> int:
    """A pidfd of a process that was looked at, if it is still the same one; otherwise -1."""
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
    """Whether the number of a process that is held by a pidfd is still its own."""
    try:
        signal.pidfd_send_signal(descriptor, 0)
    except ProcessLookupError:
        return False
    return True


def signal_below(pid: int, held: int, number: int, since: Moment) -> None:
    """Signal what a process has started since then, and everything below that; `held` is its pidfd."""
    children: dict[int, list[Process]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        if (process := look(int(name))) is not None:
            children.setdefault(process.parent, []).append(process)
    if not lives(held):
        return  # those may be the children of somebody on the host who was given its number
    pending = [child for child in children.get(pid, ()) if since.before(child)]
    while pending:
        process = pending.pop()
        pending += children.pop(process.pid, ())
        if (descriptor := hold(process)) >= 0:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(descriptor, number)
            os.close(descriptor)
