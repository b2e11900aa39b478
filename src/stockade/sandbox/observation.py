"""What a living sandbox uses at this moment, seen from outside: nothing runs inside for it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import NamedTuple

from stockade.sandbox.sandbox import SandboxBase


class SandboxLoad(NamedTuple):
    """The processors and the memory of a sandbox: what it may have, and what it uses."""

    #: Processors: the limit, or all of the machine.
    processors: float
    #: Seconds of processor time so far, and when that was read.
    processor_seconds: float
    at: float
    memory_limit: int
    memory_used: int


def load_of(sandbox: SandboxBase) -> SandboxLoad:
    """Read what a sandbox uses: from its cgroup, or without one from the machine's own counters."""
    box, prepared = sandbox._require_open()
    limits = prepared.resolved.limits
    processors = float(os.cpu_count() or 1)
    memory, free = _machine_memory()
    limit = min(int(limits.memory), memory) if limits.memory else memory
    used, seconds = memory - free, _machine_seconds()
    if box.group is not None:
        if (now := box.group.memory_used()) is not None:
            used = now
        if (times := box.group.cpu_times()) is not None:
            seconds = sum(times)
    return SandboxLoad(
        processors=min(processors, float(limits.cpu)) if limits.cpu else processors,
        processor_seconds=seconds,
        at=time.monotonic(),
        memory_limit=limit,
        memory_used=min(used, limit),
    )


def environ_of(sandbox: SandboxBase) -> Mapping[str, str]:
    """Return the variables that every program of a living sandbox starts with."""
    return sandbox._require_open()[1].environ


def _machine_memory() -> tuple[int, int]:
    """Return the machine's memory and what of it is available, in bytes."""
    found = {"MemTotal": 0, "MemAvailable": 0}
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            if name in found:
                found[name] = int(rest.split()[0]) << 10
    return found["MemTotal"], found["MemAvailable"]


def _machine_seconds() -> float:
    """Return how long the machine's processors have been busy."""
    with open("/proc/stat", encoding="ascii") as lines:
        user, nice, system = map(int, lines.readline().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")
