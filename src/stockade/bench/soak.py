"""Many sandboxes: nothing grows, nothing slows down, nothing is left.

Sandboxes in a row, in turns with plain processes: what slows both down is the
machine, not Stockade. Then many at once, and then deaths at random moments.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from stockade.bench import faults

TRUE = "/bin/true"
PAGE = os.sysconf("SC_PAGE_SIZE")
#: Before anything is compared: what is imported, cached and allocated once.
WARM = 50
ATTEMPTS = 3
#: How long a gate with nothing to do may take to make the next sandbox ahead.
AHEAD = 2.0


class Size(msgspec.Struct, frozen=True):
    """How much is done, and how many of the first and of the last are compared."""

    row: int = 5000
    window: int = 500
    at_once: int = 200
    faults: int = 300
    #: How much worse the last may be than the first, as a factor.
    slack: float = 1.1


QUICK = Size(row=300, window=100, at_once=40, faults=30, slack=1.3)


class Finding(msgspec.Struct, frozen=True):
    """One line of the table: what was at the beginning, what at the end, and whether that is good."""

    name: str
    first: float
    last: float
    good: bool
    about: str = ""


class Soaked(msgspec.Struct, frozen=True):
    """Everything that was found."""

    size: Size
    findings: tuple[Finding, ...]
    #: What was left behind or went wrong, in words.
    wrong: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not self.wrong and all(finding.good for finding in self.findings)


def soak(size: Size, say: Callable[[str], object] = lambda _: None) -> Soaked:
    """Do it all, in a state directory of its own."""
    findings: list[Finding] = []
    wrong: list[str] = []
    with _ground() as (home, workspace), faults.reaping():
        _warm_up(workspace)
        inventory = faults.Inventory(home, faults.own_gates)
        before = _counts()
        say(f"{size.row} sandboxes in a row")
        findings += _in_a_row(size)
        wrong += inventory.left()
        say(f"{size.at_once} sandboxes at once")
        findings.append(asyncio.run(_at_once(size.at_once)))
        wrong += inventory.left()
        after = _counts()
        findings += [_same(name, before[name], after[name]) for name in before]
    with _ground() as (home, workspace):
        say(f"{size.faults} deaths at random moments")
        rounds = faults.rounds(size.faults, home, workspace)
        bad = [round for round in rounds if round.wrong]
        missed = sum(round.after is None for round in rounds)
        about = f"rounds that left something or broke the next run; in {missed} the work was over before"
        findings.append(Finding("faults/wrong", 0, len(bad), not bad, about))
        wrong += [
            f"round {round.number}, {round.victim} of {round.work}: {one}"
            for round in bad
            for one in round.wrong
        ]
    return Soaked(size, tuple(findings), tuple(wrong))


@contextlib.contextmanager
def _ground() -> Iterator[tuple[Path, Path]]:
    """A state directory and a workspace for this alone, and as many descriptors as may be had."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    kept = os.environ.get("STOCKADE_HOME")
    with tempfile.TemporaryDirectory(prefix="stockade-soak-") as place:
        home, workspace = Path(place, "state"), Path(place, "workspace")
        workspace.mkdir()
        os.environ["STOCKADE_HOME"] = str(home)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
        try:
            yield home, workspace
        finally:
            from stockade.sandbox import register

            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            register.shutdown()
            if kept is None:
                del os.environ["STOCKADE_HOME"]
            else:
                os.environ["STOCKADE_HOME"] = kept


def _warm_up(workspace: Path) -> None:
    import stockade
    from stockade import Policy

    for _ in range(WARM):
        stockade.run([TRUE])
    stockade.run([TRUE], Policy(workspace=str(workspace)))
    asyncio.run(_at_once(2))
    # What a gate makes ahead is there before and after, where it makes something.
    end = time.monotonic() + AHEAD
    while faults.own_gates() == _residents() and time.monotonic() < end:
        time.sleep(0.01)


def _residents() -> set[int]:
    from stockade.gate import client

    return client.resident_pids()


def _in_a_row(size: Size) -> list[Finding]:
    """Latency and memory. What really slows down does so again; a busy machine has another chance."""
    missed: list[str] = []
    while True:
        found = _row(size, missed)
        if found[0].good or len(missed) == ATTEMPTS - 1:
            return found
        missed.append(f"{found[0].last / found[0].first:.2f}")


def _row(size: Size, missed: list[str]) -> list[Finding]:
    import stockade

    ours, plain = [], []
    memory = []
    for number in range(size.row):
        ours.append(_timed(lambda: stockade.run([TRUE]).check()))
        plain.append(_timed(_spawn))
        if number in (size.window, size.row - 1):
            memory.append(_memory())
    first, last = slice(size.window), slice(-size.window, None)
    moments = [statistics.median(part) for part in (ours[first], ours[last], plain[first], plain[last])]
    machine = moments[3] / moments[2]
    about = f"median ms of the first and last {size.window}; plain processes meanwhile × {machine:.2f}"
    about += f"; missed before: {', '.join(missed)}" if missed else ""
    flat = moments[1] / moments[0] <= size.slack * max(1.0, machine)
    return [
        Finding("row/latency", moments[0], moments[1], flat, about),
        *(
            Finding(f"row/{name}", memory[0][name], memory[1][name], _flat(memory, name, size.slack), "bytes")
            for name in memory[0]
        ),
    ]


def _flat(memory: list[dict[str, float]], name: str, slack: float) -> bool:
    return memory[1][name] <= memory[0][name] * slack


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return (time.perf_counter() - began) * 1000


def _spawn() -> None:
    os.waitpid(os.posix_spawn(TRUE, [TRUE], {}), 0)


def _memory() -> dict[str, float]:
    """What is resident of this process and of its gates."""
    found = {"supervisor memory": _resident_size(os.getpid())}
    return found | {"gate memory": sum(map(_resident_size, _residents()))}


def _resident_size(pid: int) -> float:
    return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


async def _at_once(count: int) -> Finding:
    """That many living sandboxes, each with a command in it, all at the same time."""
    from stockade import AsyncSandbox

    everyone = asyncio.Event()
    there = 0

    async def one() -> bool:
        nonlocal there
        async with AsyncSandbox() as box:
            process = await box.start(["sleep", "600"])
            there += 1
            if there == count:
                everyone.set()
            await everyone.wait()
            done = await box.run([TRUE], timeout=300)
            process.kill(0)
            await process.wait()
            await process.close()
            return done.ok

    began = time.monotonic()
    worked = sum(await asyncio.gather(*(one() for _ in range(count))))
    about = (
        f"living at the same time, each with two commands; all of it took {time.monotonic() - began:.1f} s"
    )
    return Finding("at once/sandboxes", count, worked, worked == count, about)


def _counts() -> dict[str, int]:
    """What must be as before, here and in the gates where they may be looked at."""
    found = {"descriptors": len(os.listdir("/proc/self/fd")), "mounts": _lines("/proc/self/mountinfo")}
    for pid in _residents():
        with contextlib.suppress(PermissionError):
            found["descriptors of the gate"] = len(os.listdir(f"/proc/{pid}/fd"))
            found["mounts of the gate"] = _lines(f"/proc/{pid}/mountinfo")
            found["namespaces below"] = len(_namespaces(faults.descendants(os.getpid())))
    found["processes below"] = len(faults.descendants(os.getpid()))
    return found


def _lines(path: str) -> int:
    return len(Path(path).read_text(errors="replace").splitlines())


def _namespaces(pids: list[int]) -> set[str]:
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/ns"):
                if not name.endswith("_for_children"):
                    found.add(os.readlink(f"/proc/{pid}/ns/{name}"))
    return found


def _same(name: str, before: int, after: int) -> Finding:
    return Finding(f"after/{name}", before, after, after <= before, "count before and after")
