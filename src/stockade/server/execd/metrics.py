"""What a sandbox uses, in the numbers of the contract."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection

import msgspec

from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.observation import SandboxLoad, first_process, load_of

MEBIBYTE = 1 << 20
#: Seconds between two lines of a watched sandbox, and over which a single answer measures.
INTERVAL, BRIEF = 1.0, 0.05
#: An earlier measurement counts as the beginning of the next one for this many seconds.
RECENT = 10.0


class SandboxMetrics(msgspec.Struct, frozen=True):
    """Processors and memory of a sandbox; the totals are its limits."""

    cpu_count: float
    cpu_used_pct: float
    mem_total_mib: float
    mem_used_mib: float
    #: Milliseconds since 1970.
    timestamp: int


def metrics_between(before: SandboxLoad, now: SandboxLoad) -> SandboxMetrics:
    """Return what was used between two moments, as shares of what the sandbox may have."""
    possible = max(now.at - before.at, 1e-9) * now.processors
    share = 100 * max(0.0, now.processor_seconds - before.processor_seconds) / possible
    return SandboxMetrics(
        cpu_count=now.processors,
        cpu_used_pct=round(min(share, 100.0), 2),
        mem_total_mib=round(now.memory_limit / MEBIBYTE, 2),
        mem_used_mib=round(min(now.memory_used, now.memory_limit) / MEBIBYTE, 2),
        timestamp=time.time_ns() // 1_000_000,
    )


class MetricsMeter:
    """Measures one sandbox."""

    def __init__(self, box: AsyncSandbox, boxes: Collection[AsyncSandbox]) -> None:
        """Measure a sandbox; `boxes` are it and those of its isolated sessions, as they come and go."""
        self._box, self._boxes = box, boxes
        self._last: SandboxLoad | None = None

    async def measure(self) -> SandboxMetrics:
        """Return the use since the last call, or over a moment if that was long ago."""
        now = await self._load()
        before = self._last
        if before is None or not BRIEF <= now.at - before.at <= RECENT:
            before = now
            await asyncio.sleep(BRIEF)
            now = await self._load()
        self._last = now
        return metrics_between(before, now)

    async def _load(self) -> SandboxLoad:
        first = [first_process(box) for box in self._boxes]
        return await asyncio.to_thread(load_of, self._box, first)

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield a line of JSON each second."""
        before = await self._load()
        while True:
            await asyncio.sleep(INTERVAL)
            now = await self._load()
            yield msgspec.json.encode(metrics_between(before, now)) + b"\n"
            before = now
