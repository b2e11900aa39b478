"""Holding everything in a living sandbox still, for as long as somebody looks at its workspace.

The gate stops what runs inside, and that is believed only once the kernel
says so of every thread: one that is in the middle of a write goes on until
that is done. A process that waits in vfork for a stopped child cannot be
stopped, so after a moment all are let go and stopped again.

What is stopped can be woken: by a timer of its own that sends SIGCONT, by
somebody on the host. It may be stopped again when it is next looked at, but
not without having left the processor once more, which the kernel counts. So
whoever has copied something asks whether nobody moved before it counts.

Threads are looked at in the sandbox's own /proc, where nothing else comes and
goes: a process that is listed and gone when it is read has been running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import msgspec

from stockade.errors import SetupError
from stockade.sandbox.launch import Box

STOPPED, DEAD = frozenset("Tt"), frozenset("ZXx")
#: How often everything is stopped anew, and how long one attempt may take.
ATTEMPTS = 20
PATIENCE = 0.25
#: How much longer everything is let go on after each attempt.
PACE = 0.005
#: What a signal that is on its way is given to arrive.
SETTLED = 0.02
#: How often processes may come and go while they are listed: the gate reaps what has ended.
LISTINGS = 10
#: The gate inside.
FIRST = 1


class Task(msgspec.Struct, frozen=True):
    """A process as /proc shows it."""

    state: str
    parent: int
    session: int


class Look(msgspec.Struct):
    """What the threads inside were doing: those that live, and the processes that were not stopped."""

    #: How often each has left the processor.
    threads: dict[tuple[int, str], int] = {}
    moving: list[int] = []


@contextlib.contextmanager
def held_still(box: Box, *, stays: bool = False) -> Iterator[Callable[[], None]]:
    """Nothing inside runs meanwhile, and nothing is started.

    The result raises if somebody was awake since: what was copied is worth nothing then. It is asked at
    the end if nobody has. What was stopped before stays so, and with `stays` everything does.
    """
    with box.connection.starting, _inner_proc(box) as proc:
        before = _stopped(box)
        if before:
            time.sleep(SETTLED)  # one that was just told to go on has gone on by then
            before &= _stopped(box)
        asked = False

        def sure() -> None:
            nonlocal asked
            asked = True
            _compare(seen, _look(proc))

        try:
            seen = _stop(box, proc)
            yield sure
            if not asked:
                sure()
        finally:
            if not stays:
                # Not through the gate: whoever asks next must find them as they are to be.
                for pid in _inside(_tasks("/proc"), box.number()).keys() - before:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _inner_proc(box: Box) -> Iterator[str]:
    """The sandbox's own /proc, which only the gate can show."""
    roots = box.roots()
    try:
        proc = os.open("proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=roots[0])
    finally:
        for root in roots:
            os.close(root)
    try:
        yield f"/proc/self/fd/{proc}"
    finally:
        os.close(proc)


def _stop(box: Box, proc: str) -> Look:
    """Stop everything; the result is how it was when nothing moved any more."""
    seen = Look()
    for attempt in range(ATTEMPTS):
        box.connection.signal(signal.SIGSTOP, everything=True)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            # Twice the same: a thread that counts as stopped may still be on its way off the processor.
            earlier, seen = seen, _look(proc)
            if not seen.moving and (not seen.threads or seen == earlier):
                return seen
            time.sleep(0.002)
        # Also those that were stopped before: one may be a child that its parent waits for in vfork.
        box.connection.signal(signal.SIGCONT, everything=True)
        while time.monotonic() < until + PATIENCE and _stopped(box):
            time.sleep(0.002)
        time.sleep(attempt * PACE)  # on a busy machine it has not come far yet
    raise SetupError(
        f"process {_first(seen, Look())} in the sandbox does not stop",
        stage="workspace",
        hint="it waits for a disk or a network file system, or is woken again and again: end it",
    )


def _compare(seen: Look, now: Look) -> None:
    if now.moving or now.threads != seen.threads:
        raise SetupError(
            f"process {_first(now, seen)} in the sandbox went on while it was held still",
            stage="workspace",
            hint="a timer of its own woke it, its time was over, or somebody let it go on: "
            "end it, or try again",
        )


def _first(now: Look, seen: Look) -> int:
    """A process that is not as it was."""
    differs = {pid for pid, _ in dict(now.threads.items() ^ seen.threads.items())}
    return min(now.moving or differs, default=0)


def _look(proc: str) -> Look:
    for _ in range(LISTINGS):
        tasks = _tasks(proc)
        gone = [pid for pid, task in tasks.items() if task is None]
        found = Look()
        for pid in _inside(tasks, FIRST):
            try:
                for thread in os.listdir(f"{proc}/{pid}/task"):
                    _add(found, proc, pid, thread)
            except (FileNotFoundError, ProcessLookupError):
                gone.append(pid)
        if not gone:
            return found
    return Look({}, sorted(gone))


def _add(found: Look, proc: str, pid: int, thread: str) -> None:
    with open(f"{proc}/{pid}/task/{thread}/status", "rb") as file:
        lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    state = lines[b"State"].split()[0].decode()
    if state in DEAD:
        return
    if state not in STOPPED and pid not in found.moving:
        found.moving.append(pid)
    switches = (lines[name] for name in (b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches"))
    found.threads[pid, thread] = sum(map(int, switches))


def _stopped(box: Box) -> set[int]:
    return {pid for pid, task in _inside(_tasks("/proc"), box.number()).items() if task.state == "T"}


def _inside(tasks: dict[int, Task | None], gate: int) -> dict[int, Task]:
    """Every program below a gate.

    The gate's own children are keepers, which attend to them, and what programs left behind. Keepers are
    of the gate's own session: a program begins one of its own, and nobody can go back to another's.
    """
    children: dict[int, list[int]] = {}
    for pid, task in tasks.items():
        if task is not None:
            children.setdefault(task.parent, []).append(pid)
    found: dict[int, Task] = {}
    pending = [gate]
    while pending:
        parent = pending.pop()
        for pid in children.get(parent, ()):
            task = tasks[pid]
            if task is None or pid in found:  # a list that was not read at once might hold a circle
                continue
            if parent != gate or task.session != gate:
                found[pid] = task
            pending.append(pid)
    return found


def _tasks(proc: str) -> dict[int, Task | None]:
    """Every process that is listed; None for one that was gone when it was read."""
    return {int(name): _task(f"{proc}/{name}") for name in os.listdir(proc) if name.isdigit()}


def _task(directory: str) -> Task | None:
    try:
        with open(f"{directory}/stat", "rb") as file:
            state, parent, _, session = file.read().rpartition(b")")[2].split()[:4]
        return Task(state.decode(), int(parent), int(session))
    except (FileNotFoundError, ProcessLookupError):
        return None
