"""Measure what warm Python saves against starting an interpreter, and its sandboxes per second."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.util import find_spec

from stockade.bench.measure import Figure, Section, TimingSample, burst, interleaved, peers, ratio, timing
from stockade.functions import WarmPython

PRINT, NUMPY = "print(1)", "import numpy; print(numpy.arange(3).sum())"
#: What a bare interpreter runs in comparison.
BARE = {"print": "pass", "numpy": "import numpy"}
SERVE = "from stockade.bench.warm_costs import serve; serve({threads})"
WITHOUT = "warm/numpy was not measured: numpy is not installed"


def measure(rounds: int, seconds: float) -> Section:
    """Time sandboxes and bare interpreters in turns, then count sandboxes per second."""
    figures, timings = _latency(rounds)
    rates = _rates(max(3, rounds // 5), seconds)
    best = max(rates.values(), key=lambda found: found.median)
    figures.append(Figure("warm/rate", best.median))
    notes = () if find_spec("numpy") else (WITHOUT,)
    return Section(tuple(figures), timings | rates, notes)


def _latency(rounds: int) -> tuple[list[Figure], dict[str, TimingSample]]:
    with ExitStack() as stack:
        turns: dict[str, Callable[[], object]] = {}
        ready, unready = (stack.enter_context(WarmPython(size=size)) for size in (2, 0))
        turns["bare, print"] = lambda: _bare(BARE["print"])
        turns["warm, print"] = lambda: ready.run(PRINT).check()
        turns["warm, print, none ready"] = lambda: unready.run(PRINT).check()
        if find_spec("numpy"):
            numpy = stack.enter_context(WarmPython(preload=["numpy"]))
            turns["bare, numpy"] = lambda: _bare(BARE["numpy"])
            turns["warm, numpy"] = lambda: numpy.run(NUMPY).check()
        timed = {name: _timed(turn) for name, turn in turns.items()}
        interleaved(timed, 3)
        times = interleaved(timed, rounds)
    figures = [
        Figure(f"warm/{name.removeprefix('warm, ')}", ratio(taken, times[f"bare, {name.split(', ')[1]}"]))
        for name, taken in times.items()
        if name.startswith("warm")
    ]
    return figures, {name: timing(taken) for name, taken in times.items()}


def _bare(code: str) -> None:
    nowhere = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1)]
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ, file_actions=nowhere)
    _, status = os.waitpid(pid, 0)
    assert status == 0, f"{sys.executable} -c {code!r} failed"


def _timed(turn: Callable[[], object]) -> Callable[[], float]:
    def milliseconds() -> float:
        began = time.perf_counter()
        turn()
        return (time.perf_counter() - began) * 1000

    return milliseconds


def _rates(rounds: int, seconds: float) -> dict[str, TimingSample]:
    two, one = ([sys.executable, "-c", SERVE.format(threads=threads)] for threads in (2, 1))
    with peers({"threads": two, "process": one, "another": one}) as found:
        teams = {
            "two threads": [found["threads"]],
            "two processes": [found["process"], found["another"]],
        }
        rates = interleaved({name: burst(team, seconds) for name, team in teams.items()}, rounds)
    return {f"warm, {name}": timing(taken, "/s") for name, taken in rates.items()}


def serve(threads: int) -> None:
    """Serve as a peer: a line is a number of seconds; the answer is how many sandboxes ran in them."""
    with WarmPython(size=0) as python, ThreadPoolExecutor(threads) as pool:
        python.run(PRINT).check()

        def repeat(end: float) -> int:
            count = 0
            while time.monotonic() < end:
                python.run(PRINT).check()
                count += 1
            return count

        for line in sys.stdin:
            ends = [time.monotonic() + float(line)] * threads
            print(sum(pool.map(repeat, ends)), flush=True)
