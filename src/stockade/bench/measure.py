"""Taking turns: contenders are measured interleaved, so that a drifting machine is unjust to nobody."""

from __future__ import annotations

import contextlib
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


class Timing(msgspec.Struct, frozen=True):
    """One contender's samples, summed up. Milliseconds, or runs per second."""

    median: float
    p99: float
    samples: int
    unit: str = "ms"


class Figure(msgspec.Struct, frozen=True):
    """One measure: what is judged. `missed` holds earlier attempts that were not good enough."""

    name: str
    value: float
    missed: tuple[float, ...] = ()

    def holds(self, slack: float = 1.0) -> bool:
        bar = BARS.get(self.name)
        return bar is None or bar.aim or bar.holds(self.value, slack)


class Section(msgspec.Struct, frozen=True):
    """What one part of the bench found. `walls` has a row per attack: contender to how it went."""

    figures: tuple[Figure, ...] = ()
    timings: Mapping[str, Timing] = {}
    notes: tuple[str, ...] = ()
    walls: Mapping[str, Mapping[str, str]] = {}


class Peer:
    """A process that does something for each line it is sent, and answers with a line."""

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
        """End it and wait until it is gone."""
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
            f"{self.name} ended while it was measured",
            hint="what it said stands above; `stockade doctor` shows what this machine can do",
        )


@contextlib.contextmanager
def peers(commands: Mapping[str, Sequence[str]], *, quiet: bool = False) -> Iterator[dict[str, Peer]]:
    """A peer for each command; a `quiet` one's complaints are not shown."""
    with contextlib.ExitStack() as stack:
        found = {}
        for name, command in commands.items():
            found[name] = Peer(name, command, quiet=quiet)
            stack.callback(found[name].close)
        yield found


def interleaved(turns: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Every contender once per round, in an order that changes: nobody always follows the same one."""
    found: dict[str, list[T]] = {name: [] for name in turns}
    order = list(turns)
    dice = random.Random(0)
    for _ in range(rounds):
        dice.shuffle(order)
        for name in order:
            found[name].append(turns[name]())
    return found


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median of the rounds' ratios: what slows a whole round down cancels out."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def timing(samples: Sequence[float], unit: str = "ms") -> Timing:
    """Median and 99th percentile of what was measured (of rates the first: the slow end)."""
    ordered = sorted(samples, reverse=unit != "ms")
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return Timing(statistics.median(ordered), p99, len(ordered), unit)


def burst(team: list[Peer], seconds: float) -> Callable[[], float]:
    """A turn of several at once: how many of them together are done in a second."""

    def turn() -> float:
        began = time.monotonic()
        for peer in team:
            peer.send(str(seconds))
        count = sum(int(peer.receive()) for peer in team)
        return count / (time.monotonic() - began)

    return turn
