"""Measure an overlay workspace: its start over very many files, and making files in it.

Making files is judged by a bare overlay of the kernel on the same file systems,
which is what the kernel charges for copy-on-write, and by bwrap's overlay. What
overlayfs itself costs shows against a plain directory; that is only reported.
In memory nobody waits for a device, so processor time is compared, which other
work of the machine hardly changes; on a disk, the time that passed.
"""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from itertools import chain
from pathlib import Path

import msgspec

from stockade.bench.competitors import BWRAP, OURS, Contender
from stockade.bench.contender import BenchJob
from stockade.bench.measure import (
    JOB_PYTHON,
    Figure,
    Section,
    TimingSample,
    interleaved,
    job_times,
    middle,
    peers,
    ratio,
    run_times,
    timing,
)
from stockade.inside import bench_jobs as jobs

BARE, PLAIN, BWRAPS = "a bare overlay", "a plain directory", "bwrap --overlay"
#: How much of the changes an overlay in memory keeps, and the options of the tmpfs that this makes.
KEPT, PAGE = 1 << 30, 4096
MEMORY = f"mode=0755,size={KEPT},nr_inodes={KEPT // PAGE}"
ON_DISK = " on disk"


def opening(place: Path, memory: Path, count: int, rounds: int, *, copies: bool) -> Section:
    """Time a start over a tree of `count` files, by one over none; with `copies`, also copies of the tree.

    These go to memory, which favours them, and are not judged.
    """
    empty, many = place / "empty", place / "many"
    empty.mkdir()
    _plant(many, count)
    names = {f"{count:,} files": many, "no file": empty}
    starts = {name: BenchJob(Contender(OURS, workspace=str(path)), "times") for name, path in names.items()}
    with peers({name: job.argv() for name, job in starts.items()}) as found:
        times = interleaved({name: run_times(peer) for name, peer in found.items()}, rounds)
    ours = list(map(middle, times[f"{count:,} files"]))
    figures = [Figure("workspace/open", ratio(ours, list(map(middle, times["no file"]))))]
    timings = {f"open, {name}": timing(list(chain(*turns))) for name, turns in times.items()}
    if copies:
        for name, taken in _copies(many, memory / "copy").items():
            timings[f"{name}, {count:,} files"] = timing([taken])
            figures.append(Figure(f"workspace/{name}, by opening", taken / middle(ours)))
    return Section(tuple(figures), timings)


def _plant(top: Path, count: int) -> None:
    """Make a tree of `count` small files, a hundred in a directory; they are hard links, to be quick."""
    for folder in range(count // 100):
        path = top / f"part{folder % 20}" / f"folder{folder}"
        path.mkdir(parents=True)
        (path / "file0").write_text(f"{folder}\n" * 100)
        for number in range(1, 100):
            os.link(path / "file0", path / f"file{number}")


def _copies(tree: Path, copy: Path) -> dict[str, float]:
    """Return how many milliseconds the usual ways to copy a tree take."""
    git = ("git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@example.com")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "all")):
        subprocess.run([*git, *command], check=True)
    ways = {
        "cp -r": ("cp", "-r", str(tree), str(copy)),
        "git worktree add": (*git, "worktree", "add", "-q", "-f", str(copy)),
    }
    found = {}
    for name, way in ways.items():
        began = time.perf_counter()
        subprocess.run(way, check=True, stderr=subprocess.DEVNULL)
        found[name] = (time.perf_counter() - began) * 1000
        shutil.rmtree(copy)
    return found


def writing(
    disk: Path, memory: Path, contenders: Mapping[str, Contender], rounds: int, *, on_disk: bool
) -> Section:
    """Time jobs that make files in memory on every side, where no disk hides what an overlay and walls cost.

    With `on_disk`, also where everybody writes to one disk, as in most projects; that is not judged.
    """
    figures: list[Figure] = []
    timings: dict[str, TimingSample] = {}
    with (
        # Their clean-up also removes the directories without rights that the kernel makes in a layer.
        tempfile.TemporaryDirectory(prefix="made-", dir=disk) as on,
        tempfile.TemporaryDirectory(prefix="made-", dir=memory) as off,
    ):
        ways = _ways(Path(on), Path(off), contenders)
        if on_disk:
            ways |= {name + ON_DISK: one for name, one in _ways(Path(on), None, contenders).items()}
        # A state on that disk, so that ours keeps its changes on the same file system.
        state = ["env", f"STOCKADE_HOME={on}/state"]
        commands = {name: [*state, *job.argv()] for name, job in ways.items()}
        with peers(commands) as found:
            for job in jobs.MAKES:
                turns = {name: partial(job_times, peer, job) for name, peer in found.items()}
                interleaved(turns, 1)
                both = interleaved(turns, rounds)
                times = {name: [one[ON_DISK not in name] for one in taken] for name, taken in both.items()}
                figures += _compared(job, times)
                timings |= {f"{job}: {name}": timing(taken) for name, taken in times.items()}
    ran = {name: job.contender.describe() for name, job in ways.items() if not name.startswith(OURS)}
    return Section(tuple(figures), timings, ran=ran)


def _ways(disk: Path, memory: Path | None, contenders: Mapping[str, Contender]) -> dict[str, BenchJob]:
    """Return who does the jobs, and where: over a tree on the disk, with changes in memory or on the disk."""
    where = memory or disk
    tree, plain = disk / "tree", where / "plain"
    for directory in (tree, plain):
        directory.mkdir(exist_ok=True)
        jobs.archive(str(directory))
    layers = {name: where / name for name in ("bare", "bwrap")}
    for layer in layers.values():
        layer.mkdir()
    kept = str(KEPT) if memory else ""
    bare = (sys.executable, "-m", "stockade.bench.bare_overlay", str(tree), str(layers["bare"]))
    found = {
        PLAIN: (Contender(PLAIN), plain),
        OURS: (Contender(OURS, workspace=str(tree), disk=kept), tree),
        BARE: (Contender(BARE, flags=(*bare, MEMORY if memory else "")), tree),
    }
    if BWRAP in contenders:
        parts = [str(layers["bwrap"] / name) for name in ("upper", "work")]
        for part in parts:
            os.mkdir(part)
        # As deep in its private /tmp: it makes no directories behind its link from /var/tmp.
        inside = Path("/tmp", *tree.parts[2:])
        overlay = ("--overlay-src", str(tree), "--overlay", *parts, str(inside))
        flags = (*contenders[BWRAP].flags[:-1], *overlay, "--")
        found[BWRAPS] = (msgspec.structs.replace(contenders[BWRAP], flags=flags), inside)
    command = (*JOB_PYTHON, inspect.getsource(jobs))
    return {name: BenchJob(one, "pass", command=(*command, str(base))) for name, (one, base) in found.items()}


def _compared(job: str, times: Mapping[str, list[float]]) -> list[Figure]:
    """Return our time by that of each other way, in memory and on the disk."""
    figures = []
    for where in ("", ON_DISK):
        for name, words in ((BARE, ""), (BWRAPS, " by bwrap"), (PLAIN, f" by {PLAIN}")):
            if name + where in times:
                value = ratio(times[OURS + where], times[name + where])
                figures.append(Figure(f"workspace/{job}{words}{where}", value))
    return figures
