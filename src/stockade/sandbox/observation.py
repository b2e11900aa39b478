"""What a living sandbox uses at this moment, seen from outside: nothing runs inside for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from stockade.linux.proctree import all_of, number_of
from stockade.sandbox.sandbox import SandboxBase

PAGE = os.sysconf("SC_PAGE_SIZE")


class SandboxLoad(NamedTuple):
    """The processors and the memory of a sandbox: what it may have, and what it uses."""

    #: Processors: the limit, or all of the machine.
    processors: float
    #: Seconds of processor time so far, and when that was read.
    processor_seconds: float
    at: float
    memory_limit: int
    memory_used: int


def first_process(sandbox: SandboxBase) -> int:
    """Return the pid of the process that all processes of a sandbox are below; -1 if it has ended."""
    return -1 if sandbox.gate is None else number_of(sandbox.gate)


def load_of(sandbox: SandboxBase, first: Iterable[int]) -> SandboxLoad:
    """Read what a sandbox uses: from its cgroup, or without one from its processes.

    `first` are its first process, and those of sandboxes that count too, whose cgroups lie within its own.
    This reads all of /proc, so an event loop lets a thread do it.
    """
    box, prepared = sandbox._require_open()
    limits = prepared.resolved.limits
    processors, memory = float(os.cpu_count() or 1), _machine_memory()
    limit = min(int(limits.memory), memory) if limits.memory else memory
    used = None if box.group is None else box.group.memory_used()
    times = None if box.group is None else box.group.cpu_times()
    if used is None or times is None:
        processes = all_of(first)
        if used is None:
            used = sum(_own_memory(process.pid) for process in processes)
        if times is None:
            times = sum(each.user for each in processes), sum(each.system for each in processes)
    return SandboxLoad(
        processors=min(processors, float(limits.cpu)) if limits.cpu else processors,
        processor_seconds=sum(times),
        at=time.monotonic(),
        memory_limit=limit,
        memory_used=min(used, limit),
    )


def environ_of(sandbox: SandboxBase) -> Mapping[str, str]:
    """Return the variables that every program of a living sandbox starts with."""
    return sandbox._require_open()[1].environ


def _machine_memory() -> int:
    """Return the machine's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * PAGE


def _own_memory(pid: int) -> int:
    """Return the bytes of memory that a process shares with no file; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):  # it has ended, and its file may be empty then
        return 0
    return max(0, resident - shared) * PAGE
