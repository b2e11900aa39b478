"""Holding everything in a living sandbox still, for as long as somebody looks at its workspace.

The gate stops what runs inside, and that is believed only once the kernel
says so of every thread: one that is in the middle of a write goes on until
that is done. A process that waits in vfork for a stopped child cannot be
stopped, so after a moment all are let go and stopped again.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from stockade.errors import SetupError
from stockade.sandbox.launch import Box

STOPPED = frozenset("TtZXx")
#: How often everything is stopped anew, and how long one attempt may take.
ATTEMPTS = 20
PATIENCE = 0.25
#: What a signal that is on its way is given to arrive.
SETTLED = 0.02


@contextlib.contextmanager
def held_still(box: Box, *, stays: bool = False) -> Iterator[None]:
    """Nothing inside runs meanwhile, and nothing is started.

    What was stopped before stays so, and with `stays` everything does.
    """
    with box.connection.starting:
        gate = _number(box.pidfd)
        before = _stopped(gate)
        if before:
            time.sleep(SETTLED)  # one that was just told to go on has gone on by then
            before &= _stopped(gate)
        _stop(box, gate, before)
        try:
            yield
            if moving := _moving(gate):
                raise SetupError(
                    f"process {moving[0]} went on while the sandbox was held still",
                    stage="workspace",
                    hint="its time was over, or somebody let it go on: try again",
                )
        finally:
            if not stays:
                # Not through the gate: whoever asks next must find them as they are to be.
                for pid in _inside(gate).keys() - before:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)


def _number(pidfd: int) -> int:
    """The process that a pidfd stands for; one that has ended is -1."""
    with open(f"/proc/self/fdinfo/{pidfd}", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))


def _stop(box: Box, gate: int, before: set[int]) -> None:
    moving: list[int] = []
    for _ in range(ATTEMPTS):
        box.connection.signal(signal.SIGSTOP, everything=True)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            if not (moving := _moving(gate)):
                return
            time.sleep(0.002)
        box.connection.signal(signal.SIGCONT, everything=True)
        while time.monotonic() < until + PATIENCE and _stopped(gate) - before:
            time.sleep(0.002)
    raise SetupError(
        f"process {moving[0]} in the sandbox does not stop",
        stage="workspace",
        hint="it waits for a disk or a network file system: try again later",
    )


def _stopped(gate: int) -> set[int]:
    return {pid for pid, state in _inside(gate).items() if state == "T"}


def _moving(gate: int) -> list[int]:
    """The processes inside of which a thread is not stopped."""
    found = []
    for pid in _inside(gate):
        try:
            threads = os.listdir(f"/proc/{pid}/task")
        except FileNotFoundError:
            continue
        if any(_state(f"/proc/{pid}/task/{thread}")[0] not in STOPPED for thread in threads):
            found.append(pid)
    return sorted(found)


def _inside(gate: int) -> dict[int, str]:
    """Every program inside with its state. The gate's own children are keepers, which attend to them."""
    states: dict[int, str] = {}
    children: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        states[pid], parent = _state(f"/proc/{pid}")
        children.setdefault(parent, []).append(pid)
    found: dict[int, str] = {}
    pending = list(children.get(gate, ()))
    while pending:
        for pid in children.get(pending.pop(), ()):
            if pid not in found:  # a list that was not read at once might hold a circle
                found[pid] = states[pid]
                pending.append(pid)
    return found


def _state(directory: str) -> tuple[str, int]:
    """The state and the parent of a process or a thread; one that has gone is dead."""
    try:
        with open(f"{directory}/stat", "rb") as file:
            words = file.read().rpartition(b")")[2].split()
        return words[0].decode(), int(words[1])
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
