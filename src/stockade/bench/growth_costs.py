"""Measure whether a start costs more where many sandboxes live."""

from __future__ import annotations

import contextlib
import resource
import time

from stockade import Sandbox, run
from stockade.bench.measure import Figure, Section, TimingSample, timing

FEW = 10
COMMAND = ["/bin/true"]


def measure(many: int, runs: int) -> Section:
    """Time starts beside ten living sandboxes of this process, and beside many."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed[1], allowed[1]))  # a sandbox holds a few descriptors
    found: dict[int, TimingSample] = {}
    try:
        with contextlib.ExitStack() as living:
            for before, count in ((0, FEW), (FEW, many)):
                for _ in range(count - before):
                    living.enter_context(Sandbox())
                found[count] = timing([_start() for _ in range(runs)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, allowed)
    figure = Figure("growth/start", found[many].median / found[FEW].median)
    return Section((figure,), {f"beside {count:,} sandboxes": taken for count, taken in found.items()})


def _start() -> float:
    began = time.perf_counter()
    run(COMMAND)
    return (time.perf_counter() - began) * 1000
