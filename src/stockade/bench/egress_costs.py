"""Measure what network rules cost: at the start of a sandbox, per connection, per byte, and in memory.

The server is a process on the host's loopback, which an address rule names; so no name is looked up, and the
clients inside and outside speak to the same server.
"""

from __future__ import annotations

import compileall
import contextlib
import inspect
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from stockade.bench.competitors import OURS, SANDLOCK, Contender, with_rules
from stockade.bench.contender import BenchJob
from stockade.bench.measure import (
    JOB_PYTHON,
    RUNS_PER_TURN,
    Figure,
    Peer,
    Section,
    TimingSample,
    compiling_environ,
    interleaved,
    peers,
    ratio,
    run_times,
    timing,
)
from stockade.egress import records
from stockade.inside import network_jobs

SERVER, DIRECT = "server", "direct"
SPAWN, BARE = "posix_spawn", "bare python -c pass"
RULED = " with rules"
#: Connections in a turn; bytes of a stream; connections that are open at the same time.
EACH, STREAM, HELD = 50, 128 << 20, 1000
COMMAND = "from stockade.cli import command; command()"


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Run the server, and yield the port of 127.0.0.1 that it listens on."""
    with peers({SERVER: [*JOB_PYTHON, inspect.getsource(network_jobs), "serve"]}) as found:
        yield found[SERVER].receive()


def starts(ours: Contender, port: str, rounds: int, others: Sequence[Contender] = ()) -> Section:
    """Compare a start with rules to one without; the template is warm, as from the second run on."""
    compared = (ours, *others)
    jobs = {}
    for one in compared:
        jobs[one.name] = BenchJob(one, "times")
        jobs[one.name + RULED] = BenchJob(with_rules(one, port), "times")
    with peers({name: job.argv() for name, job in jobs.items()}) as found:
        turns = {name: run_times(peer) for name, peer in found.items()}
        times = interleaved({**turns, BARE: lambda: [_spawned(sys.executable, "-c", "pass")]}, rounds)
    medians = {name: list(map(statistics.median, each)) for name, each in times.items()}
    figures: list[Figure] = []
    for one in compared:
        figures += _added("start", one.name, medians[one.name], medians[one.name + RULED], medians[BARE])
    return Section(
        tuple(figures), {f"start: {name}": timing(list(chain(*each))) for name, each in times.items()}
    )


def _added(what: str, name: str, before: list[float], after: list[float], unit: list[float]) -> list[Figure]:
    """Return how much more time the second series took than the first, by a unit; ours also as a time."""
    more = [second - first for first, second in zip(before, after, strict=True)]
    if name != OURS:
        return [Figure(f"egress/{what}, {name}", ratio(more, unit))]
    return [
        Figure(f"egress/{what}", ratio(more, unit)),
        Figure(f"egress/added {what}", statistics.median(more)),
    ]


def cold_starts(directory: str, rounds: int) -> Section:
    """Compare `stockade run` with a rule to one without, from a cold command line."""
    # As an install does: a template compiles its modules and keeps nothing of that.
    compileall.compile_dir(os.path.dirname(os.path.abspath(records.__file__)), quiet=2)
    line = [sys.executable, "-c", COMMAND, "run", "-q"]
    lines = {OURS: [*line, "--", "true"], OURS + RULED: [*line, "--net", "127.0.0.1:9", "--", "true"]}
    environ = compiling_environ(directory)

    def turn(argv: list[str]) -> Callable[[], float]:
        def once() -> float:
            began = time.perf_counter()
            subprocess.run(argv, cwd=directory, env=environ, stdin=subprocess.DEVNULL, check=True)
            return (time.perf_counter() - began) * 1000

        return once

    turns = {name: turn(argv) for name, argv in lines.items()}
    interleaved(turns, 2)
    times = interleaved(turns, rounds)
    plain, ruled = times.values()
    figures = _added("cold", OURS, plain, ruled, plain)
    return Section(tuple(figures), {f"cold: {name}": timing(taken) for name, taken in times.items()})


def traffic(port: str, rounds: int, contenders: Sequence[Contender]) -> Section:
    """Compare connections and streams from inside with the same from outside, and hold many at once."""
    client = (*JOB_PYTHON, inspect.getsource(network_jobs), "127.0.0.1", port)
    commands = {DIRECT: list(client)}
    commands |= {one.name: BenchJob(one, "pass", command=client).argv() for one in contenders}
    figures: list[Figure] = []
    timings: dict[str, TimingSample] = {}
    with peers(commands) as found:
        turns = _jobs(found, f"connect {EACH}")
        times = interleaved({**turns, SPAWN: lambda: _spawned("/bin/true")}, rounds)
        for one in contenders:
            figures += _added("connect", one.name, times[DIRECT], times[one.name], times[SPAWN])
        timings |= {f"connect: {name}": timing(taken) for name, taken in times.items()}
        for way in ("download", "upload"):
            times = interleaved(_jobs(found, f"{way} {STREAM}"), rounds)
            for one in contenders:
                ending = "" if one.name == OURS else f", {one.name}"
                figures.append(Figure(f"egress/{way}{ending}", ratio(times[DIRECT], times[one.name])))
            timings |= {f"{way}: {name}": timing(taken) for name, taken in times.items()}
        figures.append(Figure("egress/held", int(found[OURS].ask(f"hold {HELD}"))))
    return Section(tuple(figures), timings)


def _jobs(found: dict[str, Peer], job: str) -> dict[str, Callable[[], float]]:
    """Return a turn for each peer, in milliseconds."""

    def turn(peer: Peer) -> Callable[[], float]:
        return lambda: float(peer.ask(job)) * 1000

    return {name: turn(peer) for name, peer in found.items()}


def _spawned(*argv: str) -> float:
    """Return the milliseconds of a bare posix_spawn: the median of some."""
    times = []
    for _ in range(RUNS_PER_TURN):
        began = time.perf_counter()
        os.waitpid(os.posix_spawn(argv[0], argv, os.environ), 0)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)


def rivals(contenders: dict[str, Contender]) -> list[Contender]:
    """Return the rivals that have rules of their own."""
    return [contenders[SANDLOCK]] if SANDLOCK in contenders else []
