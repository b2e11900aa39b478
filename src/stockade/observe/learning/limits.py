"""Limits with headroom, from what a run used: readable numbers, and only those that this host can enforce."""

from __future__ import annotations

from collections.abc import Collection

from stockade.controls import Control
from stockade.observe.learning.lesson import LearnedEntry
from stockade.policy.model import limit_text
from stockade.policy.values import LONGEST, size_text
from stockade.result import Usage

#: How much more a program may use than it did: another machine is slower, another day there is more to do.
TIMES_LONGER, TIMES_LARGER = 4, 2
#: Times that people write, in seconds.
TIMES = (30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 4 * 3600, 8 * 3600, 24 * 3600)
LEAST_MEMORY = 128 << 20
LEAST_TASKS = 32
MIB = 1 << 20


def learn_limits(usage: Usage, enforceable: Collection[Control]) -> dict[str, LearnedEntry]:
    """Return the limits by name, each as a policy writes it and with what the run used."""
    found: dict[str, tuple[float, str]] = {}
    found["wall"] = (_time(usage.wall), f"it took {_seconds(usage.wall)}")
    if usage.source.get("cpu") == "cgroup":
        found["cpu_time"] = (_time(usage.cpu), f"it used {_seconds(usage.cpu)} of processor time")
    if usage.source.get("memory") == "cgroup" and usage.peak_memory:
        memory = max(LEAST_MEMORY, _power_of_two(usage.peak_memory * TIMES_LARGER))
        found["memory"] = (memory, f"it used {_mib(usage.peak_memory)} MiB")
    if usage.peak_tasks:
        tasks = max(LEAST_TASKS, _power_of_two(usage.peak_tasks * TIMES_LARGER))
        found["tasks"] = (min(tasks, 1 << 22), f"it had {usage.peak_tasks} at once")
    return {
        name: LearnedEntry(limit_text(name, value), reason)
        for name, (value, reason) in found.items()
        if Control(f"limits.{name}") in enforceable
    }


def disk_advice(usage: Usage) -> str:
    """Return a limit of disk space to think about; it is not granted, because it moves changes to memory."""
    if usage.bytes_written is None:
        return ""
    size = max(64 * MIB, _power_of_two(usage.bytes_written * TIMES_LARGER))
    return f'disk = "{size_text(size)}"'


def _time(used: float) -> float:
    wanted = min(used * TIMES_LONGER, LONGEST)
    hours = -(-wanted // 3600) * 3600
    return float(next((time for time in TIMES if time >= wanted), hours))


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _mib(size: int) -> int:
    return max(1, -(-size // MIB))
