"""What an observer costs: the time that it adds to a call of a program."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from stockade.bench.measure import Figure, Section, TimingSample, interleaved, ratio, timing
from stockade.sandbox.sandbox import Sandbox

PYTHON = ("/usr/bin/python3", "-I", "-S", "-c")
#: Prints how many microseconds each job takes: the median of several series.
JOBS = """
import os, statistics, time
def opened(): os.close(os.open("/usr/bin/env", os.O_RDONLY))
def refused():
    try: os.open("/usr/bin/env", os.O_WRONLY)
    except OSError: pass
for job in opened, refused:
    taken = []
    for series in range(40):
        begin = time.perf_counter()
        for call in range(25): job()
        taken.append((time.perf_counter() - begin) / 25 * 1e6)
    print(statistics.median(taken))
"""
KINDS = ("open", "refusal")
TRIPS = 500


def measure(rounds: int) -> Section:
    """Compare calls in an observed sandbox with the same in an ordinary one, side by side."""
    with Sandbox() as ordinary, Sandbox(explain=True) as observed:
        turns: dict[str, Callable[[], list[float]]] = {
            "ordinary": lambda: _jobs(ordinary),
            "observed": lambda: _jobs(observed),
            "a byte there and back": lambda: [_there_and_back()] * len(KINDS),
        }
        times = interleaved(turns, rounds)
    figures: list[Figure] = []
    timings: dict[str, TimingSample] = {}
    for place, kind in enumerate(KINDS):
        before, after, unit = ([each[place] for each in times[name]] for name in turns)
        more = [second - first for first, second in zip(before, after, strict=True)]
        figures += [
            Figure(f"observe/{kind}", ratio(more, unit)),
            Figure(f"observe/added {kind}", statistics.median(more)),
        ]
        timings |= {f"{kind}: {name}": timing([each[place] / 1000 for each in times[name]]) for name in turns}
    return Section(tuple(figures), timings)


def _jobs(sandbox: Sandbox) -> list[float]:
    return [float(line) for line in sandbox.run([*PYTHON, JOBS]).check().text.split()]


def _there_and_back() -> float:
    """Return how many microseconds a byte takes to another process and back, through two pipes."""
    (read, there), (back, write) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(there)
        while os.read(read, 1):
            os.write(write, b"x")
        os._exit(0)
    try:
        begin = time.perf_counter()
        for _ in range(TRIPS):
            os.write(there, b"x")
            os.read(back, 1)
        return (time.perf_counter() - begin) / TRIPS * 1e6
    finally:
        for end in (read, there, back, write):
            os.close(end)
        os.waitpid(child, 0)
