"""Every backend that works here, beside the others: a start, one more command, memory, and work inside.

All have the same policy, but for the controls that each needs accepted. Work is
done in a directory that is granted for real, because not every backend has a
private /tmp; the same work outside is done in another one of the same disk.
Nothing of this is judged: it says what a choice costs.
"""

from __future__ import annotations

import inspect
import shutil
from itertools import chain
from pathlib import Path
from typing import Literal

from stockade.bench import inside as jobs
from stockade.bench.measure import Figure, Section, Timing, interleaved, peers, ratio, timing
from stockade.bench.rivals import OURS, Contender
from stockade.bench.sections import IDLE, PYTHON, Ground, job_time, middle, run_times, weight
from stockade.bench.worker import Job
from stockade.errors import StockadeError

OUTSIDE = "outside"
QUICK_JOBS = ("compile",)


def usable() -> dict[str, Contender]:
    """The backends that can run something on this machine, best first."""
    import stockade
    from stockade import backends
    from stockade.backends.select import select
    from stockade.errors import UnsupportedError

    machine = stockade.host()
    found = {}
    for name in backends.BACKENDS:
        offers = backends.load(name).offers(machine)
        weaker = [
            control.value for control, offer in offers.items() if not offer.available and offer.waivable
        ]
        one = Contender(OURS, backend=name, accept=tuple(weaker))
        try:
            asked = select(one.policy(), machine).weaker
        except UnsupportedError:
            continue
        found[name] = Contender(OURS, backend=name, accept=tuple(control.value for control in asked))
    return found


def measure(ground: Ground) -> Section:
    """Everything, for every backend that is usable."""
    found = usable()
    if not found:
        raise StockadeError("no backend works on this machine", hint="`stockade doctor` says why")
    parts = [_starts(ground, found), _memory(found), _inside(ground, found)]
    timings = {name: told for part in parts for name, told in part.timings.items()}
    figures = tuple(figure for part in parts for figure in part.figures)
    return Section(figures, timings, tuple(note for part in parts for note in part.notes))


def _starts(ground: Ground, found: dict[str, Contender]) -> Section:
    """A whole sandbox for one command, and one more command in a living one."""
    figures: list[Figure] = []
    timings: dict[str, Timing] = {}
    best = next(iter(found))
    ways: dict[str, Literal["times", "again"]] = {"start": "times", "exec": "again"}
    for what, do in ways.items():
        commands = {name: Job(one, do).argv() for name, one in found.items()}
        with peers(commands) as running:
            taken = interleaved(
                {name: run_times(peer) for name, peer in running.items()}, ground.rounds(3, 60)
            )
        first = list(map(middle, taken[best]))
        for name, rounds in taken.items():
            timings[f"{what}: {name}"] = timing(list(chain(*rounds)))
            if name != best:
                figures.append(Figure(f"{what}, {name} by {best}", ratio(list(map(middle, rounds)), first)))
    return Section(tuple(figures), timings)


def _memory(found: dict[str, Contender]) -> Section:
    """What idle sandboxes weigh, each."""
    timings: dict[str, Timing] = {}
    notes: list[str] = []
    for name, one in found.items():
        with peers({name: Job(one, "hold").argv()}) as running:
            running[name].ask("0")
            before, _ = weight(running[name].process.pid)
            running[name].ask(str(IDLE))
            after, estimated = weight(running[name].process.pid)
        timings[f"memory: {name}"] = timing([(after - before) / IDLE / 1024], "KiB")
        if estimated:
            notes.append(f"memory of {name} is an upper bound: its gates are counted by their resident size")
    return Section((), timings, tuple(notes))


def _inside(ground: Ground, found: dict[str, Contender]) -> Section:
    """Jobs behind each backend's walls and outside. Who cannot do one is told."""
    script = inspect.getsource(jobs)
    commands: dict[str, list[str]] = {}
    places = {name: ground.disk / f"inside-{name}" for name in (OUTSIDE, *found)}
    for name, place in places.items():
        place.mkdir()
        if ground.quick:
            (place / "tree").mkdir()  # nothing is searched then
        else:
            jobs.prepare(str(place))
        command = (*PYTHON, script, str(place))
        commands[name] = list(command)
        if name != OUTSIDE:
            one = Contender(OURS, writable=(str(place),), backend=name, accept=found[name].accept)
            commands[name] = Job(one, "pass", command=command).argv()
    chosen = QUICK_JOBS if ground.quick else tuple(jobs.JOBS)
    able = {
        job: [name for name, place in places.items() if _works(commands[name], job, place)] for job in chosen
    }
    figures: list[Figure] = []
    timings: dict[str, Timing] = {}
    with peers(commands) as running:
        for job, who in able.items():
            taken = interleaved({name: job_time(running[name], job) for name in who}, ground.rounds(2, 25))
            timings |= {f"{job}: {name}": timing(rounds) for name, rounds in taken.items()}
            figures += [
                Figure(f"{job}, {name} by the same outside", ratio(taken[name], taken[OUTSIDE]))
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
