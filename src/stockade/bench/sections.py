"""The measurements, one function each."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path

import msgspec

from stockade import gate
from stockade.bench import (
    egress_costs,
    growth_costs,
    judged_costs,
    observe_costs,
    pipeline_costs,
    receipt_costs,
    server_costs,
    workspace_costs,
)
from stockade.bench import warm_costs as warmth
from stockade.bench.bars import BARS
from stockade.bench.competitors import (
    BWRAP,
    FIVE,
    OURS,
    SANDLOCK,
    SPAWN,
    STAGED,
    SUBPROCESS,
    Contender,
    contenders,
    with_rules,
)
from stockade.bench.contender import BenchJob
from stockade.bench.measure import (
    JOB_PYTHON,
    Figure,
    Peer,
    Section,
    TimingSample,
    burst,
    compiling_environ,
    interleaved,
    job_time,
    middle,
    peers,
    ratio,
    run_times,
    timing,
)
from stockade.bench.report_table import regressed
from stockade.inside import attack_probe
from stockade.inside import bench_jobs as jobs

SHARED_MEMORY = "/dev/shm"
HEAP = 10**9
IDLE, SHELLS = 20, 200
MANY, QUITE_MANY = 100_000, 20_000


class BenchFixture(msgspec.Struct, frozen=True):
    """What the measurements share: their own directories, and the contenders."""

    disk: Path
    memory: Path
    contenders: dict[str, Contender]
    quick: bool
    #: Also measure what is not judged.
    tells: bool

    def rounds(self, quick: int, full: int) -> int:
        return quick if self.quick else full


@contextlib.contextmanager
def ground(*, quick: bool) -> Iterator[BenchFixture]:
    """Make directories for the bench, one on disk and one in memory, and remove them at the end."""
    prefix = f"stockade-bench-{os.getpid()}-"
    with (
        tempfile.TemporaryDirectory(prefix=prefix) as disk,
        tempfile.TemporaryDirectory(prefix=prefix, dir=SHARED_MEMORY) as memory,
    ):
        stage = Path(disk, "stage")
        stage.mkdir()
        yield BenchFixture(Path(disk), Path(memory), contenders(stage, Path(memory)), quick, tells=not quick)


def cold(ground: BenchFixture) -> Section:
    """Time one run of /bin/true from Python."""
    commands = {name: BenchJob(one, "times").argv() for name, one in ground.contenders.items()}
    with peers(commands) as found:
        turns = {name: run_times(peer) for name, peer in found.items()}
        times = interleaved(turns, ground.rounds(30, 100))
    rivals = [name for name in (BWRAP, STAGED, FIVE, SANDLOCK, SPAWN) if name in times]
    figures = [_compared("cold", times, name) for name in rivals]
    timings = {name: timing(list(chain(*turns))) for name, turns in times.items()}
    if BWRAP in timings:
        figures.append(Figure("cold/p99", timings[OURS].p99 / timings[BWRAP].p99))
    return Section(tuple(figures), timings)


def _compared(section: str, times: dict[str, list[list[float]]], rival: str) -> Figure:
    ours, theirs = (list(map(middle, times[name])) for name in (OURS, rival))
    return Figure(f"{section}/{rival}", ratio(ours, theirs))


def rate(ground: BenchFixture) -> Section:
    """Count sandboxes per second with two workers: two threads or two processes, whichever is better."""
    seconds = 0.3 if ground.quick else 1.0
    chosen = [one for name, one in ground.contenders.items() if name not in (SPAWN, STAGED, FIVE)]
    commands = {}
    for one in chosen:
        commands[f"{one.name}, two threads"] = BenchJob(one, "rate", threads=2).argv()
        for number in (1, 2):
            commands[f"{one.name}, two processes {number}"] = BenchJob(one, "rate").argv()
    with peers(commands) as found:
        teams: dict[str, list[Peer]] = {}
        for name, peer in found.items():
            teams.setdefault(name.rstrip(" 12"), []).append(peer)
        turns = {name: burst(team, seconds) for name, team in teams.items()}
        rates = interleaved(turns, ground.rounds(4, 10))
    best = {
        one.name: max((found for name, found in rates.items() if name.startswith(one.name)), key=middle)
        for one in chosen
    }
    rivals = [name for name in (BWRAP, SANDLOCK) if name in best]
    figures = [Figure(f"rate/{name}", ratio(best[OURS], best[name])) for name in rivals]
    return Section(tuple(figures), {name: timing(found, "/s") for name, found in rates.items()})


def inside(ground: BenchFixture) -> Section:
    """Time everyday jobs behind the walls and outside, each in a file system in memory."""
    script = inspect.getsource(jobs)
    here, overlay, plain = (ground.memory / "plain", ground.disk / "overlay", ground.disk / "plain")
    shared = ground.memory / "sandlock"
    for directory in (here, overlay, plain, shared):
        directory.mkdir(exist_ok=True)
    command = (*JOB_PYTHON, script)
    commands = {
        "outside": [*command, str(here)],
        OURS: BenchJob(ground.contenders[OURS], "pass", command=(*command, "/tmp")).argv(),
    }
    if ground.tells:
        jobs.prepare(str(overlay))
        ours = Contender(OURS, workspace=str(overlay))
        commands["outside, on disk"] = [*command, str(plain)]
        commands["stockade, overlay"] = BenchJob(ours, "pass", command=(*command, str(overlay))).argv()
        for rival, base in ((BWRAP, "/tmp"), (SANDLOCK, str(shared))):
            if rival in ground.contenders:
                commands[rival] = BenchJob(ground.contenders[rival], "pass", command=(*command, base)).argv()
    figures, timings = [], {}
    with peers(commands) as found:
        for job in jobs.JOBS:
            if f"inside/{job}" not in BARS and not ground.tells:
                continue
            turns = {name: job_time(peer, job) for name, peer in found.items()}
            interleaved(turns, 1)
            times = interleaved(turns, ground.rounds(10, 25))
            figures.append(Figure(f"inside/{job}", ratio(times[OURS], times["outside"])))
            for name in times:
                timings[f"{job}: {name}"] = timing(times[name])
                if name not in (OURS, "outside", "outside, on disk"):
                    base = "outside, on disk" if "overlay" in name else "outside"
                    about = f"inside/{job}, {name.removeprefix('stockade, ')}"
                    figures.append(Figure(about, ratio(times[name], times[base])))
    shutil.rmtree(here)
    return Section(tuple(figures), timings)


def workspace(ground: BenchFixture) -> Section:
    """Compare an overlay of very many files with an empty one, and work in one with other overlays."""
    count = QUITE_MANY if ground.quick else MANY
    with tempfile.TemporaryDirectory(prefix="tree-", dir=ground.disk) as place:
        opening = workspace_costs.opening(
            Path(place), ground.memory, count, ground.rounds(12, 40), copies=ground.tells
        )
    writing = workspace_costs.writing(
        ground.disk, ground.memory, ground.contenders, ground.rounds(4, 15), on_disk=ground.tells
    )
    return Section(opening.figures + writing.figures, {**opening.timings, **writing.timings}, ran=writing.ran)


def memory(ground: BenchFixture) -> Section:
    """Measure the user-space memory of idle sandboxes, and the size of the gate's executable."""
    figure, notes = _memory_of_each("memory/sandbox", BenchJob(ground.contenders[OURS], "hold"), IDLE)
    return Section((figure, Figure("memory/gate", os.stat(gate.executable()).st_size)), notes=notes)


def _memory_of_each(name: str, job: BenchJob, count: int) -> tuple[Figure, tuple[str, ...]]:
    """Return what each of `count` sandboxes adds to the memory of a process tree, and notes."""
    with peers({name: job.argv()}) as found:
        peer = found[name]
        peer.ask("0")
        before, _ = weight(peer.process.pid)
        peer.ask(str(count))
        after, estimated = weight(peer.process.pid)
    notes = () if not estimated else (
        f"{name} is an upper bound: it uses the resident size of {estimated} gates "
        "(only root can read their share of shared memory)",
    )  # fmt: skip
    return Figure(name, (after - before) / count), notes


def weight(pid: int) -> tuple[int, int]:
    """Return the proportional memory of a process and its descendants, and how many were estimated."""
    total = estimated = 0
    for member in _family(pid):
        try:
            total += _field(f"/proc/{member}/smaps_rollup", "Pss:")
        except PermissionError:
            total += _field(f"/proc/{member}/status", "VmRSS:")
            estimated += 1
    return total, estimated


def _field(path: str, name: str) -> int:
    with open(path, encoding="ascii", errors="replace") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def _family(pid: int) -> list[int]:
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{entry}/stat").read_text(errors="replace")
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found = [pid]
    for member in found:
        found += [child for child, parent in parents.items() if parent == member]
    return found


def heap(ground: BenchFixture) -> Section:
    """Compare a start from a process with much memory to one from a small process."""
    figures: list[Figure] = []
    timings: dict[str, TimingSample] = {}
    for name in (OURS, SUBPROCESS, BWRAP, SANDLOCK) if ground.tells else (OURS,):
        if name not in ground.contenders:
            continue
        sizes = {"small": 0, "1 GB": HEAP}
        one = ground.contenders[name]
        commands = {size: BenchJob(one, "times", heap=heap).argv() for size, heap in sizes.items()}
        with peers(commands) as found:
            times = interleaved(
                {size: run_times(peer) for size, peer in found.items()}, ground.rounds(10, 40)
            )
        value = ratio(*(list(map(middle, times[size])) for size in ("1 GB", "small")))
        figures.append(Figure("heap/1GB" if name == OURS else f"heap/1GB, {name}", value))
        timings |= {f"{name}, {size}": timing(list(chain(*times[size]))) for size in sizes}
    return Section(tuple(figures), timings)


def growth(ground: BenchFixture) -> Section:
    """Compare a start beside a thousand living sandboxes with one beside ten."""
    # An ordinary user cannot have as many: each takes one of 200 keys (sysctl kernel.keys.maxkeys).
    many = ground.rounds(100, 1000 if os.geteuid() == 0 else 150)
    return growth_costs.measure(many, ground.rounds(60, 300))


def receipt(ground: BenchFixture) -> Section:
    """Measure what receipts cost."""
    return receipt_costs.measure(ground.disk, ground.rounds(10, 40))


def warm(ground: BenchFixture) -> Section:
    """Compare warm Python with a new interpreter, and a living sandbox with a plain spawn."""
    code = warmth.measure(ground.rounds(12, 60), 0.5 if ground.quick else 1.0)
    ways = {
        "living, /bin/true": BenchJob(ground.contenders[OURS], "again"),
        "bare, /bin/true": BenchJob(ground.contenders[SPAWN], "times"),
    }
    with peers({name: job.argv() for name, job in ways.items()}) as found:
        turns = {name: run_times(peer) for name, peer in found.items()}
        times = interleaved(turns, ground.rounds(12, 60))
    value = ratio(*(list(map(middle, times[name])) for name in ways))
    timings = {name: timing(list(chain(*turns))) for name, turns in times.items()}
    return Section((*code.figures, Figure("warm/run", value)), {**code.timings, **timings}, code.notes)


def observe(ground: BenchFixture) -> Section:
    """Measure what an observer adds to a call."""
    return observe_costs.measure(ground.rounds(8, 30))


def shell(ground: BenchFixture) -> Section:
    """Measure a run in a living shell, with all that the library does around it, and the shell's memory."""
    with peers({OURS: BenchJob(ground.contenders[OURS], "shell", command=("true",)).argv()}) as found:
        turns = interleaved({OURS: run_times(found[OURS])}, ground.rounds(12, 60))[OURS]
    taken = timing(list(chain(*turns)))
    # An ordinary user cannot have many more: each takes one of 200 keys (sysctl kernel.keys.maxkeys).
    count = ground.rounds(IDLE, SHELLS if os.geteuid() == 0 else IDLE)
    figure, notes = _memory_of_each("shell/memory", BenchJob(ground.contenders[OURS], "shells"), count)
    return Section((Figure("shell/run", taken.median), figure), {"a run of `true`": taken}, notes)


def egress(ground: BenchFixture) -> Section:
    """Compare sandboxes with network rules to sandboxes without, and their traffic to direct traffic."""
    ours = ground.contenders[OURS]
    others = egress_costs.rivals(ground.contenders) if ground.tells else []
    with egress_costs.server() as port:
        ruled = [with_rules(one, port) for one in (ours, *others)]
        parts = [
            egress_costs.starts(ours, port, ground.rounds(10, 40), others),
            egress_costs.cold_starts(str(ground.disk), ground.rounds(8, 30)),
            egress_costs.traffic(port, ground.rounds(8, 25), ruled),
        ]
        plain, notes = _memory_of_each("egress/memory", BenchJob(ours, "hold"), IDLE)
        more, _ = _memory_of_each("egress/memory", BenchJob(ruled[0], "hold"), IDLE)
    figures = tuple(chain(*(part.figures for part in parts)))
    timings = {name: taken for part in parts for name, taken in part.timings.items()}
    figures = (*figures, Figure("egress/memory", more.value - plain.value))
    ran = {one.name + egress_costs.RULED: one.describe() for one in ruled}
    return Section(figures, timings, notes, ran=ran)


def judged(ground: BenchFixture) -> Section:
    """Compare requests that rules judge with direct ones, and with mitmproxy."""
    return judged_costs.measure(ground.disk, ground.rounds(8, 30))


def server(ground: BenchFixture) -> Section:
    """Measure sandboxes and isolated sessions over HTTP, alone and beside many sessions."""
    # An ordinary user cannot have many more shells, see above.
    living = ground.rounds(IDLE, SHELLS if os.geteuid() == 0 else IDLE)
    return server_costs.measure(ground.disk, ground.rounds(8, 30), living, ground.rounds(80, 1000), weight)


def start(ground: BenchFixture) -> Section:
    """Compare the `stockade` command, and the import, with an interpreter that does nothing."""
    lines = {
        "empty": ("pass",),
        "import": ("import stockade",),
        "run": ("from stockade.cli import command; command()", "run", "-q", "--", "true"),
    }
    environ = compiling_environ(str(ground.disk))

    def turn(line: tuple[str, ...]) -> Callable[[], float]:
        def once() -> float:
            began = time.perf_counter()
            subprocess.run(
                [sys.executable, "-c", *line],
                cwd=ground.disk,
                env=environ,
                stdin=subprocess.DEVNULL,
                check=True,
            )
            return (time.perf_counter() - began) * 1000

        return once

    turns = {name: turn(line) for name, line in lines.items()}
    interleaved(turns, 2)
    times = interleaved(turns, ground.rounds(15, 60))
    figures = tuple(Figure(f"start/{name}", ratio(times[name], times["empty"])) for name in ("import", "run"))
    timings = {f"python, {name}": timing(taken) for name, taken in times.items()}
    ran = {f"python, {name}": shlex.join([sys.executable, "-c", *line]) for name, line in lines.items()}
    return Section(figures, timings, ran=ran)


def walls(ground: BenchFixture) -> Section:
    """Try the same attacks on every contender: a comparison of speed means little without it."""
    secret = ground.disk / "home" / ".ssh" / "id_ed25519"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.touch(0o600)
    secret.write_text("not for you\n")
    abstract = f"stockade-bench-{os.getpid()}"
    rows: dict[str, dict[str, str]] = {}
    with socket.socket(socket.AF_INET) as server, socket.socket(socket.AF_UNIX) as named:
        server.bind(("127.0.0.1", 0))
        server.listen()
        named.bind("\0" + abstract)
        named.listen()
        arguments = (str(secret), str(os.getpid()), str(server.getsockname()[1]), abstract)
        command = (*JOB_PYTHON, inspect.getsource(attack_probe), *arguments)
        for name in (SUBPROCESS, OURS, BWRAP, SANDLOCK):
            if name in ground.contenders:
                # In a separate process: sandlock's supervision stays in there.
                with peers(
                    {name: BenchJob(ground.contenders[name], "pass", command=command).argv()}
                ) as found:
                    answer = json.loads(found[name].receive())
                for attack, outcome in answer.items():
                    rows.setdefault(attack, {})["no sandbox" if name == SUBPROCESS else name] = outcome
    count = sum(row[OURS] == "OPEN" for row in rows.values())
    return Section((Figure("walls/open", count),), walls=rows)


def pipeline(ground: BenchFixture) -> Section:
    """Time data through three stages, and the start of three stages."""
    rival = ground.contenders.get(SANDLOCK)
    options = None if rival is None else rival.sandlock_options()
    return pipeline_costs.measure(ground.rounds(3, 15), 10**9 // (2 if ground.quick else 1), options)


SECTIONS: dict[str, Callable[[BenchFixture], Section]] = {
    "cold": cold,
    "rate": rate,
    "inside": inside,
    "memory": memory,
    "heap": heap,
    "growth": growth,
    "workspace": workspace,
    "receipt": receipt,
    "warm": warm,
    "shell": shell,
    "egress": egress,
    "judged": judged,
    "observe": observe,
    "server": server,
    "pipeline": pipeline,
    "start": start,
    "walls": walls,
}
ATTEMPTS = 3


def measure(
    name: str, ground: BenchFixture, *, slack: float = 1.0, baseline: Mapping[str, float] = {}
) -> Section:
    """Measure one section; repeat up to twice what misses its bar or is much worse than the baseline.

    The result records that. Sync the disk first: earlier writes would otherwise slow down the contender
    that writes next.
    """

    def good(figure: Figure) -> bool:
        return figure.holds(slack) and not regressed(figure.name, figure.value, baseline)

    os.sync()
    section = SECTIONS[name](ground)
    for _ in range(ATTEMPTS - 1):
        if all(map(good, section.figures)):
            break
        os.sync()
        again = SECTIONS[name](msgspec.structs.replace(ground, tells=False))
        fresh = {figure.name: figure for figure in again.figures}
        figures = [
            old if good(old) else Figure(old.name, fresh[old.name].value, (*old.missed, old.value))
            for old in section.figures
        ]
        timings = {**section.timings, **again.timings}
        section = Section(tuple(figures), timings, again.notes, again.walls, section.ran)
    return section
