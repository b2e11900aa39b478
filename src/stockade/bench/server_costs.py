"""Measure the server: sandboxes and isolated sessions over HTTP, as a client in another process sees them.

The client keeps one connection open and has no library. A sandbox's create ends when it can run commands, a
session's when its shell has run something.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec

from stockade.bench import server_client
from stockade.bench.measure import (
    Figure,
    Peer,
    Section,
    TimingSample,
    compiling_environ,
    interleaved,
    peers,
    timing,
)
from stockade.errors import StockadeError

COMMAND = "from stockade.cli import command; command()"
CLIENT = "client"
SPAWN, BARE = "posix_spawn", "bare python -c pass"
#: The unit of each job: what the machine needs for something of that size without a server.
UNITS = {"session": BARE, "run": SPAWN, "command": SPAWN, "sandbox": BARE}
#: What has an aim as a time too, and is measured again beside many sessions.
TIMED = ("session", "run", "sandbox")
#: Times of each job in a turn.
EACH = 3
#: Cycles before those that count: the first ones load modules and fill caches.
WARM_UP = 50
#: Parts of many cycles that are compared: the first and the last.
PART = 0.1

Rounds = dict[str, list[float]]


@contextlib.contextmanager
def server(directory: Path) -> Iterator[tuple[str, str, int]]:
    """Run a server whose files are in a directory; yield its port, a key, and its process."""
    key = secrets.token_urlsafe(32)
    home = directory / "server state"
    environ = compiling_environ(str(directory)) | {"STOCKADE_HOME": str(home), "STOCKADE_API_KEY": key}
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", "--listen", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environ,
        text=True,
    )
    assert process.stdout is not None
    try:
        said = next((line for line in process.stdout if line.startswith("serving on ")), "")
        if not said:
            raise StockadeError("the server did not start", hint="`stockade serve` says why")
        port = said.strip().rpartition(":")[2]
        try:
            yield port, key, process.pid
        finally:
            # Sandboxes outlive the server.
            server_client.end_all(int(port), key)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def measure(
    directory: Path, rounds: int, living: int, cycles: int, weigh: Callable[[int], tuple[int, int]]
) -> Section:
    """Measure each job alone, many cycles of a session, and each job beside so many sessions that live.

    `weigh` returns the memory of a process and its descendants.
    """
    if find_spec("litestar") is None:
        return Section(notes=("the server is not measured: pip install 'stockade[server]'",))
    with server(directory) as (port, key, pid):
        line = [sys.executable, "-I", "-S", "-c", inspect.getsource(server_client), port, key]
        with peers({CLIENT: line}) as found:
            client = found[CLIENT]
            client.receive()
            alone = _measured(client, rounds)
            client.ask(f"cycle {WARM_UP}")
            before = weigh(pid)[0]
            cycle = _asked(client, f"cycle {cycles}")
            grown = weigh(pid)[0] - before
            client.ask(f"hold {living}")
            beside = _measured(client, rounds)
    part = max(1, round(cycles * PART))
    figures = [
        *(Figure(f"server/{job}", _by_unit(alone, job)) for job in UNITS),
        *(Figure(f"server/{job} time", statistics.median(alone[job])) for job in TIMED),
        *(Figure(f"server/{job} beside many", _by_unit(beside, job) / _by_unit(alone, job)) for job in TIMED),
        Figure("server/cycles", statistics.median(cycle[-part:]) / statistics.median(cycle[:part])),
        Figure("server/cycles memory", grown / cycles),
    ]
    timings: dict[str, TimingSample] = {name: timing(taken) for name, taken in alone.items()}
    timings |= {f"{name}, {living} sessions live": timing(taken) for name, taken in beside.items()}
    timings["a session made and ended"] = timing(cycle)
    return Section(tuple(figures), timings)


def _measured(client: Peer, rounds: int) -> Rounds:
    """Return the milliseconds of every job and unit, round by round."""

    def turn(job: str) -> Callable[[], float]:
        return lambda: statistics.median(_asked(client, f"{job} {EACH}"))

    turns = {job: turn(job) for job in UNITS}
    turns |= {SPAWN: lambda: _spawned("/bin/true"), BARE: lambda: _spawned(sys.executable, "-c", "pass")}
    interleaved(turns, 2)
    return interleaved(turns, rounds)


def _asked(client: Peer, job: str) -> list[float]:
    return msgspec.json.decode(client.ask(job), type=list[float])


def _by_unit(times: Rounds, job: str) -> float:
    """Return how long a job takes, by its unit, both in the same rounds."""
    return statistics.median(taken / unit for taken, unit in zip(times[job], times[UNITS[job]], strict=True))


def _spawned(*argv: str) -> float:
    """Return the milliseconds of a bare posix_spawn: the median of some."""
    times = []
    for _ in range(EACH):
        began = time.perf_counter()
        os.waitpid(os.posix_spawn(argv[0], argv, os.environ), 0)
        times.append((time.perf_counter() - began) * 1000)
    return statistics.median(times)
