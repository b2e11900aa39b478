"""The soak test: after many sandboxes nothing has grown, slowed down or been left behind.

First it runs sandboxes in a row, in turns with plain processes: what slows
both down is the machine, not Stockade. Then it runs many at once, and then it
kills processes at random moments.
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
#: How many runs come before the first comparison, for what is imported, cached and allocated once.
WARM = 50
ATTEMPTS = 3
#: How many seconds an idle gate may take to make its spare.
AHEAD = 2.0


class SoakSize(msgspec.Struct, frozen=True):
    """How much to do, and how many of the first and last runs to compare."""

    row: int = 10_000
    window: int = 500
    at_once: int = 200
    faults: int = 300
    #: How much worse the last may be than the first, as a factor.
    slack: float = 1.1


QUICK = SoakSize(row=300, window=100, at_once=40, faults=30, slack=1.3)


class Finding(msgspec.Struct, frozen=True):
    """One line of the table: the value at the beginning and at the end, and whether that is good."""

    name: str
    first: float
    last: float
    good: bool
    about: str = ""


class SoakReport(msgspec.Struct, frozen=True):
    """All results of a soak test."""

    size: SoakSize
    findings: tuple[Finding, ...]
    #: Descriptions of what was left behind or went wrong.
    wrong: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not self.wrong and all(finding.good for finding in self.findings)


def soak(size: SoakSize, say: Callable[[str], object] = lambda _: None) -> SoakReport:
    """Run the whole soak test in its own state directory."""
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
    return SoakReport(size, tuple(findings), tuple(wrong))


@contextlib.contextmanager
def _ground() -> Iterator[tuple[Path, Path]]:
    """Make a state directory and a workspace for this test alone, and raise the descriptor limit."""
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
            from stockade.runs import idle_cgroups
            from stockade.runs.register import register

            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            idle_cgroups.shutdown()
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
    # Wait for the spare, so that it exists before and after.
    end = time.monotonic() + AHEAD
    while faults.own_gates() == _residents() and time.monotonic() < end:
        time.sleep(0.01)


def _residents() -> set[int]:
    from stockade.gate import client

    return client.resident_pids()


def _in_a_row(size: SoakSize) -> list[Finding]:
    """Measure latency and memory, and retry on a miss: a real slowdown repeats, a chance one may not."""
    missed: list[str] = []
    while True:
        found = _row(size, missed)
        if found[0].good or len(missed) == ATTEMPTS - 1:
            return found
        missed.append(f"{found[0].last / found[0].first:.2f}")


def _row(size: SoakSize, missed: list[str]) -> list[Finding]:
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
    """Return the resident memory of this process and of its gates."""
    found = {"supervisor memory": _resident_size(os.getpid())}
    return found | {"gate memory": sum(map(_resident_size, _residents()))}


def _resident_size(pid: int) -> float:
    return float(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE


async def _at_once(count: int) -> Finding:
    """Run `count` living sandboxes at the same time, each with a command in it."""
    from stockade import AsyncSandbox

    all_started = asyncio.Event()
    started = 0

    async def one() -> bool:
        nonlocal started
        async with AsyncSandbox() as box:
            process = await box.start(["sleep", "600"])
            started += 1
            if started == count:
                all_started.set()
            await all_started.wait()
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
    """Count what must be the same at the end, here and in the gates if we may look into them."""
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
