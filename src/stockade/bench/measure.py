"""Interleaved measurement: contenders take turns, so that a drifting machine favours none of them."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import msgspec

from stockade.bench.bars import BARS
from stockade.errors import StockadeError

T = TypeVar("T")
PATIENCE = 10
#: The interpreter that does jobs inside and outside: the system's, and nothing of ours.
JOB_PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")
RUNS_PER_TURN = 5


class TimingSample(msgspec.Struct, frozen=True):
    """A summary of one contender's samples: milliseconds, or runs per second."""

    median: float
    p99: float
    samples: int
    unit: str = "ms"


class Figure(msgspec.Struct, frozen=True):
    """One measured value. `missed` holds earlier attempts that missed the bar."""

    name: str
    value: float
    missed: tuple[float, ...] = ()

    def holds(self, slack: float = 1.0) -> bool:
        bar = BARS.get(self.name)
        return bar is None or bar.aim or bar.holds(self.value, slack)


class Section(msgspec.Struct, frozen=True):
    """The results of one part of the bench. `walls` has a row per attack: contender to outcome."""

    figures: tuple[Figure, ...] = ()
    timings: Mapping[str, TimingSample] = {}
    notes: tuple[str, ...] = ()
    walls: Mapping[str, Mapping[str, str]] = {}
    #: How to repeat by hand what was measured beside ours, where it is not one of the contenders.
    ran: Mapping[str, str] = {}


class Peer:
    """A process that acts on each line it receives, and answers with a line."""

    def __init__(self, name: str, command: Sequence[str], *, quiet: bool = False) -> None:
        self.name = name
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if quiet else None,
            text=True,
        )

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._gone() from None

    def receive(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise self._gone()
        return line.strip()

    def ask(self, line: str) -> str:
        self.send(line)
        return self.receive()

    def close(self) -> None:
        """End the process and wait for it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def _gone(self) -> StockadeError:
        return StockadeError(
            f"{self.name} ended during its measurement",
            hint="its output is above; `stockade doctor` shows what this machine can do",
        )


@contextlib.contextmanager
def peers(commands: Mapping[str, Sequence[str]], *, quiet: bool = False) -> Iterator[dict[str, Peer]]:
    """Start a peer for each command, and close them at the end; `quiet` hides their stderr."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, command in commands.items():
            found[name] = Peer(name, command, quiet=quiet)
            stack.callback(found[name].close)
        yield found


def interleaved(turns: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Run every contender once per round, in random order, so that none always follows the same one."""
    found: dict[str, list[T]] = {name: [] for name in turns}
    order = list(turns)
    dice = random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            found[name].append(turns[name]())
    return found


def run_times(peer: Peer) -> Callable[[], list[float]]:
    """Return a turn of some runs, each in milliseconds."""
    return lambda: msgspec.json.decode(peer.ask(str(RUNS_PER_TURN)), type=list[float])


def job_time(peer: Peer, job: str) -> Callable[[], float]:
    """Return a turn that does the job once, in milliseconds."""
    return lambda: job_times(peer, job)[0]


def job_times(peer: Peer, job: str) -> tuple[float, float]:
    """Do the job once, and return the milliseconds that it took, and those of a processor."""
    elapsed, used = map(float, peer.ask(job).split())
    return elapsed * 1000, used * 1000


def middle(values: Sequence[float]) -> float:
    """Return the median, without ever taking a mean."""
    return sorted(values)[len(values) // 2]


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the rounds' ratios: what slows a whole round down cancels out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def timing(samples: Sequence[float], unit: str = "ms") -> TimingSample:
    """Return the median and the 99th percentile of the samples (for rates the first: the slow end)."""
    ordered = sorted(samples, reverse=unit != "ms")
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return TimingSample(statistics.median(ordered), p99, len(ordered), unit)


def compiling_environ(directory: str) -> dict[str, str]:
    """Return this environment, but one in which modules are compiled, as in an install, into a directory."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**environ, "PYTHONPYCACHEPREFIX": os.path.join(directory, "compiled")}


def burst(team: list[Peer], seconds: float) -> Callable[[], float]:
    """Return a turn in which several peers work at once; it returns their total per second."""

    def turn() -> float:
        began = time.monotonic()
        for peer in team:
            peer.send(str(seconds))
        count = sum(int(peer.receive()) for peer in team)
        return count / (time.monotonic() - began)

    return turn
