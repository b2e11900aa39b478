"""Compare the backends that work here: a start, one more command, memory, and work inside.

All have the same policy, except for the controls that a backend needs accepted
as weaker. The work happens in a directory that is granted for real, because
not every backend has a private /tmp; the same work outside uses another
directory on the same disk. Nothing is judged: the numbers show what a choice
of backend costs.
"""

from __future__ import annotations

import inspect
import shutil
from itertools import chain
from pathlib import Path
from typing import Literal

from stockade.bench.competitors import OURS, Contender
from stockade.bench.contender import BenchJob
from stockade.bench.measure import (
    JOB_PYTHON,
    Figure,
    Section,
    TimingSample,
    interleaved,
    job_time,
    middle,
    peers,
    ratio,
    run_times,
    timing,
)
from stockade.bench.sections import IDLE, BenchFixture, weight
from stockade.errors import StockadeError
from stockade.inside import bench_jobs as jobs

OUTSIDE = "outside"
QUICK_JOBS = ("compile",)


def usable() -> dict[str, Contender]:
    """Return the backends that can run something on this machine, best first."""
    import stockade
    from stockade import backends
    from stockade.backends.selection import select
    from stockade.errors import UnsupportedError

    machine = stockade.Host.current()
    found = {}
    for name in backends.BACKENDS:
        offers = backends.load(name).offers(machine)
        weaker = [
            control.value for control, offer in offers.items() if not offer.available and offer.waivable
        ]
        one = Contender(OURS, backend=name, accept=tuple(weaker))
        try:
            needed = select(one.policy(), machine).weaker
        except UnsupportedError:
            continue
        found[name] = Contender(OURS, backend=name, accept=tuple(control.value for control in needed))
    return found


def measure(ground: BenchFixture) -> Section:
    """Measure every usable backend."""
    found = usable()
    if not found:
        raise StockadeError("no backend works on this machine", hint="`stockade doctor` shows why")
    parts = [_starts(ground, found), _memory(found), _inside(ground, found)]
    timings = {name: sample for part in parts for name, sample in part.timings.items()}
    figures = tuple(figure for part in parts for figure in part.figures)
    return Section(figures, timings, tuple(note for part in parts for note in part.notes))


def _starts(ground: BenchFixture, found: dict[str, Contender]) -> Section:
    """Time a whole sandbox for one command, and one more command in a living one."""
    figures: list[Figure] = []
    timings: dict[str, TimingSample] = {}
    best = next(iter(found))
    ways: dict[str, Literal["times", "again"]] = {"start": "times", "exec": "again"}
    for what, do in ways.items():
        commands = {name: BenchJob(one, do).argv() for name, one in found.items()}
        with peers(commands) as running:
            times = interleaved(
                {name: run_times(peer) for name, peer in running.items()}, ground.rounds(3, 60)
            )
        first = list(map(middle, times[best]))
        for name, rounds in times.items():
            timings[f"{what}: {name}"] = timing(list(chain(*rounds)))
            if name != best:
                figures.append(Figure(f"{what}, {name} by {best}", ratio(list(map(middle, rounds)), first)))
    return Section(tuple(figures), timings)


def _memory(found: dict[str, Contender]) -> Section:
    """Measure the memory of one idle sandbox."""
    timings: dict[str, TimingSample] = {}
    notes: list[str] = []
    for name, one in found.items():
        with peers({name: BenchJob(one, "hold").argv()}) as running:
            running[name].ask("0")
            before, _ = weight(running[name].process.pid)
            running[name].ask(str(IDLE))
            after, estimated = weight(running[name].process.pid)
        timings[f"memory: {name}"] = timing([(after - before) / IDLE / 1024], "KiB")
        if estimated:
            notes.append(f"memory of {name} is an upper bound: it uses the resident size of its gates")
    return Section((), timings, tuple(notes))


def _inside(ground: BenchFixture, found: dict[str, Contender]) -> Section:
    """Time jobs behind each backend's walls and outside. A note names the jobs that a backend cannot do."""
    script = inspect.getsource(jobs)
    commands: dict[str, list[str]] = {}
    places = {name: ground.disk / f"inside-{name}" for name in (OUTSIDE, *found)}
    for name, place in places.items():
        place.mkdir()
        if ground.quick:
            (place / "tree").mkdir()  # the quick jobs search nothing
        else:
            jobs.prepare(str(place))
        command = (*JOB_PYTHON, script, str(place))
        commands[name] = list(command)
        if name != OUTSIDE:
            one = Contender(OURS, writable=(str(place),), backend=name, accept=found[name].accept)
            commands[name] = BenchJob(one, "pass", command=command).argv()
    chosen = QUICK_JOBS if ground.quick else tuple(jobs.JOBS)
    able = {
        job: [name for name, place in places.items() if _works(commands[name], job, place)] for job in chosen
    }
    figures: list[Figure] = []
    timings: dict[str, TimingSample] = {}
    with peers(commands) as running:
        for job, who in able.items():
            times = interleaved({name: job_time(running[name], job) for name in who}, ground.rounds(2, 25))
            timings |= {f"{job}: {name}": timing(rounds) for name, rounds in times.items()}
            figures += [
                Figure(f"{job}, {name} by the same outside", ratio(times[name], times[OUTSIDE]))
                for name in who
                if name != OUTSIDE
            ]
    notes = [f"{job} does not work in {name}" for job in chosen for name in places if name not in able[job]]
    return Section(tuple(figures), timings, tuple(notes))


def _works(command: list[str], job: str, place: Path) -> bool:
    with peers({job: command}, quiet=True) as found:
        try:
            found[job].ask(job)
            return True
        except StockadeError:
            shutil.rmtree(place / "scratch", ignore_errors=True)
            return False
