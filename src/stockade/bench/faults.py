"""Kill the supervisor, each kind of gate process and the program at random moments.

A round starts a supervisor, lets it work, and kills one of the processes with
SIGKILL at a random moment of the work, the launch included. Afterwards only
what the next start sweeps may be left, and the next run must work.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Literal

import msgspec

Victim = Literal["supervisor", "resident", "gate", "keeper", "program"]
VICTIMS: tuple[Victim, ...] = ("supervisor", "resident", "gate", "keeper", "program")
#: A run in a sandbox of its own, commands in a living one, and such runs over a workspace.
WORKS = ("once", "living", "layered")
#: How many seconds the teardown may take.
SETTLED = 5.0
CGROUPS = Path("/sys/fs/cgroup")
_PR_SET_CHILD_SUBREAPER = 36


class Round(msgspec.Struct, frozen=True):
    """What happened in one round, and what was wrong afterwards."""

    number: int
    work: str
    victim: Victim
    #: Seconds from the beginning of the work to the kill; None if the work was over before.
    after: float | None
    wrong: tuple[str, ...] = ()


class Inventory:
    """The processes, mounts, cgroups, descriptors and files that exist now, to find leftovers later.

    It reaps the caller's descendants.
    """

    def __init__(self, home: Path, spared: Callable[[], set[int]] = set) -> None:
        self._home = home
        self._mark = mark()
        self._spared = spared
        _remove_idle_groups()
        self._before = set(self._lasting())

    def left(self) -> list[str]:
        """Return what has been added since, after the kernel had time to remove it."""
        _remove_idle_groups()
        end = time.monotonic() + SETTLED
        while (found := self._now()) and time.monotonic() < end:
            time.sleep(0.01)
        return found

    def _now(self) -> list[str]:
        return [*self._processes(), *sorted(set(self._lasting()) - self._before), *self._files()]

    def _processes(self) -> Iterator[str]:
        for pid in descendants(os.getpid()):
            with contextlib.suppress(ChildProcessError):
                if pid not in self._spared() and os.waitpid(pid, os.WNOHANG) != (0, 0):
                    continue
            if pid not in self._spared():
                yield f"process {pid} ({name_of(pid)})"

    def _lasting(self) -> Iterator[str]:
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            yield f"mount {line.split()[4]}"
        yield from (
            f"cgroup {group}" for group, _, _ in os.walk(CGROUPS) if f"/stockade-run-{self._mark}" in group
        )
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/self/fd/{number}")
                if not target.startswith("/proc/"):  # not the descriptor of this listing
                    yield f"descriptor {number}: {target}"

    def _files(self) -> Iterator[str]:
        from stockade.runs.register import register

        own = register.own_names()
        for directory in ("run", "workspaces", "output"):
            with contextlib.suppress(FileNotFoundError):
                yield from (
                    f"{directory}/{name}" for name in os.listdir(self._home / directory) if name not in own
                )


def _remove_idle_groups() -> None:
    """Remove the cgroups that this process keeps for its next sandbox."""
    from stockade.runs import idle_cgroups

    idle_cgroups.shutdown()


def mark(of: int | None = None) -> str:
    """Give the ids of this process's sandboxes a prefix and return it; supervisors to kill get the same.

    It tells our cgroups from those of other processes on the machine.
    """
    from stockade.runs.register import register

    word = f"{of or os.getpid():08x}"
    register.new_id = lambda: word + os.urandom(6).hex()
    return word


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process, parents first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def own_gates() -> set[int]:
    """Return this process's resident gates and their spares."""
    from stockade.gate import client

    gates = client.resident_pids()
    ahead = {child for gate in gates for child in children(gate) if name_of(child) == "stockade-spare"}
    return gates | ahead


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "gone"


@contextlib.contextmanager
def reaping() -> Iterator[None]:
    """Make this process a subreaper: what a killed supervisor leaves becomes its child."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def find(victim: Victim, supervisor: int) -> int | None:
    """Return a process of that kind below a supervisor, or None."""
    if victim == "supervisor":
        return supervisor
    residents = [pid for pid in children(supervisor) if name_of(pid) == "stockade-gate"]
    gates = [gate for pid in residents for gate in children(pid) if name_of(gate) != "stockade-spare"]
    below = [pid for gate in gates for pid in children(gate)]
    keepers = [pid for pid in below if name_of(pid) == "stockade-gate"]
    programs = [pid for pid in below if pid not in keepers] + [p for k in keepers for p in children(k)]
    kinds = {"resident": residents, "gate": gates, "keeper": keepers, "program": programs}
    return next(iter(kinds[victim]), None)


def rounds(
    count: int,
    home: Path,
    workspace: Path,
    *,
    seed: int = 0,
    tell: Callable[[Round], object] = lambda _: None,
) -> list[Round]:
    """Kill in `count` rounds. `home` is their own state directory, which the environment names."""
    import stockade

    dice = random.Random(seed)
    found = []
    stockade.run(["true"])
    with reaping():
        # The shortest of three: on a busy machine one may take so long that most kills would come too late.
        lives = {work: min(_life(work, workspace) for _ in range(3)) for work in WORKS}
        for number in range(count):
            work, victim = dice.choice(WORKS), VICTIMS[number % len(VICTIMS)]
            if victim == "keeper":
                work = "living"
            inventory = Inventory(home, own_gates)
            after, wrong = _kill(work, victim, dice.uniform(0, lives[work]), workspace)
            wrong += _afterwards(home, inventory)
            found.append(Round(number, work, victim, after, tuple(wrong)))
            tell(found[-1])
    return found


def _afterwards(home: Path, inventory: Inventory) -> list[str]:
    import stockade
    from stockade.runs.register import register

    wrong = []
    register.sweep(str(home))
    wrong += inventory.left()
    result = stockade.run(["echo", "next"], timeout=30)
    if result.text != "next\n":
        wrong.append(f"the next run: {result.outcome} {result.reason}")
    return wrong


@contextlib.contextmanager
def _supervisor(work: str, workspace: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "stockade.bench.faults", work, str(workspace), str(os.getpid())]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _life(work: str, workspace: Path) -> float:
    """Return how many seconds the work takes if nothing is killed."""
    with _supervisor(work, workspace) as process:
        _hear(process)
        began = time.monotonic()
        _say(process)
        _hear(process)
        return time.monotonic() - began


def _kill(work: str, victim: Victim, delay: float, workspace: Path) -> tuple[float | None, list[str]]:
    with _supervisor(work, workspace) as process:
        assert process.stdout is not None and process.stderr is not None
        _hear(process)
        began = time.monotonic()
        _say(process)
        time.sleep(delay)
        after = None
        # Wait for a victim that has not started yet: the moment of its start is as good as any other.
        while after is None and not _ready(process.stdout):
            pid = find(victim, process.pid)
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    after = time.monotonic() - began
        if victim == "supervisor":
            process.kill()
            process.wait()
            return after, []
        words = [_hear(process)]
        _say(process)
        words.append(_hear(process))
        _say(process)
        process.wait(30)
        errors = process.stderr.read()
        good = words[0].startswith("done") and words[1] == "again again" and process.returncode == 0
        return after, [] if good and not errors else [f"{words} {process.returncode} {errors[-2000:]}"]


def _ready(stream: IO[str]) -> bool:
    return bool(select.select([stream], [], [], 0)[0])


def _hear(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _say(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write("go\n")
        process.stdin.flush()


def main(work: str, workspace: str, starter: str) -> None:
    """Be the supervisor: work on request, and print how it went."""
    import stockade

    mark(int(starter))

    def say(word: str) -> None:
        print(word, flush=True)
        sys.stdin.readline()

    say("ready")
    try:
        outcome = _work(work, workspace)
    except stockade.StockadeError as error:
        outcome = repr(error)
    say(f"done {outcome}".replace("\n", " "))
    say(f"again {stockade.run(['echo', 'again'], timeout=30).text}".strip())


def _work(work: str, workspace: str) -> str:
    import stockade
    from stockade import Policy, Sandbox

    policy = Policy(workspace=workspace) if work == "layered" else Policy()
    if work != "living":
        return stockade.run(
            ["sh", "-c", "setsid sleep 9 & sleep 0.03"], policy, timeout=30, grace=0.1
        ).outcome
    daemon = ["sh", "-c", "setsid sleep 9 & cat"]
    with Sandbox(policy) as box, box.start(daemon, stdin=subprocess.PIPE, grace=0.1) as process:
        outcome = box.run(["sleep", "0.03"], timeout=30, grace=0.1).outcome
        process.kill(0.1)
        return f"{outcome} {process.wait(30).outcome}"


if __name__ == "__main__":
    main(*sys.argv[1:])
