"""What a supervisor counts of its sandbox, and reports to the server when that asks.

A supervisor's process has one sandbox, so it has one tally. Whatever ends a run notes it there; that costs
a bisection and two additions.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.workspace.usage import disk_usage

if TYPE_CHECKING:
    from stockade.result import Result

#: The upper edges of the histogram's buckets, in milliseconds; what is longer goes into one more.
EDGES = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 60_000, 600_000)
#: Seconds for which a measurement of the layers counts, and that a report waits for a new one.
RECENT, PATIENCE = 2.0, 0.3

RunKind = Literal["command", "isolated"]
CreateOutcome = Literal["created", "refused", "failed"]


class RunHistogram(msgspec.Struct):
    """How long runs took."""

    counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(EDGES) + 1))
    milliseconds: float = 0.0
    #: The shortest and the longest, once there is one.
    shortest: float | None = None
    longest: float = 0.0

    def __post_init__(self) -> None:
        """Refuse the counts of another version, whose edges may be others."""
        if len(self.counts) != len(EDGES) + 1:
            raise ValueError("these counts have other edges")

    def note(self, milliseconds: float) -> None:
        """Count a run."""
        self.counts[bisect_left(EDGES, milliseconds)] += 1
        self.milliseconds += milliseconds
        self._stretch(milliseconds, milliseconds)

    def add(self, other: RunHistogram) -> None:
        """Count the runs of another one too."""
        self.counts = [one + more for one, more in zip(self.counts, other.counts, strict=True)]
        self.milliseconds += other.milliseconds
        if other.shortest is not None:
            self._stretch(other.shortest, other.longest)

    def _stretch(self, shortest: float, longest: float) -> None:
        self.shortest = shortest if self.shortest is None else min(self.shortest, shortest)
        self.longest = max(self.longest, longest)


class SandboxTally(msgspec.Struct):
    """What has happened in one sandbox, or in several together: numbers that only grow."""

    runs: dict[RunKind, RunHistogram] = {}
    denials: int = 0
    sessions: dict[CreateOutcome, int] = {}

    def note_run(self, kind: RunKind, milliseconds: float, result: Result | None) -> None:
        """Count a run that has ended; without a result it was interrupted, or did not start."""
        self.runs.setdefault(kind, RunHistogram()).note(milliseconds)
        if result is not None:
            self.denials += len(result.denials)

    def note_session(self, outcome: CreateOutcome) -> None:
        """Count an attempt to make an isolated session."""
        self.sessions[outcome] = self.sessions.get(outcome, 0) + 1

    def add(self, other: SandboxTally) -> None:
        """Count what has happened in another sandbox too."""
        for kind, histogram in other.runs.items():
            self.runs.setdefault(kind, RunHistogram()).add(histogram)
        self.denials += other.denials
        for outcome, count in other.sessions.items():
            self.sessions[outcome] = self.sessions.get(outcome, 0) + count


class TallyReport(msgspec.Struct, frozen=True):
    """What a supervisor tells the server."""

    tally: SandboxTally
    living_sessions: int = 0
    #: What the layers of the sessions take of the disk.
    upper_bytes: int = 0


class LayerMeter:
    """Measures what layers take of the disk, without making anyone wait for a large one."""

    def __init__(self) -> None:
        self.bytes = 0
        self._at = float("-inf")
        self._task: asyncio.Task[int] | None = None

    async def measure(self, layers: Iterable[str]) -> int:
        """Return the bytes of these directories, or what they were if that is recent or takes long."""
        if self._task is None and time.monotonic() - self._at > RECENT:
            self._task = asyncio.create_task(asyncio.to_thread(_total, tuple(layers)))
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=PATIENCE)
            if done:
                self.bytes, self._at, self._task = self._task.result(), time.monotonic(), None
        return self.bytes


def _total(layers: tuple[str, ...]) -> int:
    return sum(disk_usage(layer).bytes for layer in layers)


def create_outcome(status: int) -> CreateOutcome:
    """Return what an error's status says about a create: the client's fault, or not."""
    return "refused" if status < 500 else "failed"


#: The tally of this process' sandbox.
TALLY = SandboxTally()
