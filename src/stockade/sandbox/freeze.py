"""Freeze everything in a living sandbox while the supervisor reads its workspace.

The gate stops every process inside, and the supervisor then waits until the
kernel reports every thread as stopped: a thread in the middle of a write stops
only when the write is done. A process that waits in vfork for a stopped child
cannot be stopped, so after a moment the gate lets all go on and stops them
again.

A stopped process can be woken: by its own timer that sends SIGCONT, or by a
process on the host. It may be stopped again at the next look, but then it has
left the processor once more, and the kernel counts that. So the supervisor
compares these counts before it relies on what it has copied.

The supervisor reads the sandbox's own /proc, where no foreign processes come
and go: a process that is listed there and gone when it is read was running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec

from stockade.errors import SetupError
from stockade.linux.procstat import PARENT, SESSION, STATE, stat_fields
from stockade.runs.launch import SETUP_SECONDS, LaunchedSandbox

STOPPED, DEAD = frozenset("Tt"), frozenset("ZXx")
#: How often to stop everything anew, and how many seconds one attempt may take.
ATTEMPTS = 20
PATIENCE = 0.25
#: How much longer everything may go on after each further attempt.
PACE = 0.005
#: Seconds for a signal in flight to arrive.
SETTLED = 0.02
#: How often to repeat a listing while processes come and go: init reaps those that have ended.
LISTINGS = 10
#: The pid of init.
FIRST = 1


class Task(msgspec.Struct, frozen=True):
    """A process as /proc shows it."""

    state: str
    parent: int
    session: int


class ThreadSurvey(msgspec.Struct):
    """The living threads inside, and the processes that were not stopped."""

    #: How often each thread has left the processor.
    threads: dict[tuple[int, str], int] = {}
    moving: list[int] = []


@contextlib.contextmanager
def frozen(box: LaunchedSandbox, *, stays: bool = False) -> Iterator[Callable[[], None]]:
    """Freeze the sandbox: nothing inside runs, and nothing is started, inside the `with` statement.

    Yields a check that raises if a process has run since, because a copy is then unreliable. If the caller
    does not call it, it is called at the end. Processes that were stopped before stay stopped, so do the runs
    in `box.paused`, whose keepers may not have carried that out yet, and with `stays` all do.
    """
    with box.connection.starting, _inner_proc(box) as proc:
        before = _stopped(box)
        if before:
            time.sleep(SETTLED)  # by then a process that was just sent SIGCONT has gone on
            before &= _stopped(box)
        asked = False

        def sure() -> None:
            nonlocal asked
            asked = True
            _compare(seen, _survey(proc))

        try:
            seen = _stop(box, proc)
            yield sure
            if not asked:
                sure()
        finally:
            if stays:
                box.connection.signal(signal.SIGSTOP, everything=True)
            else:
                _thaw(box, before)


def _thaw(box: LaunchedSandbox, before: set[int]) -> None:
    """Continue everything inside, except what was stopped before and the runs that their callers paused."""
    # A gate that answers has carried out every earlier request, and stops nothing of what continues here.
    for descriptor in box.connection.roots(SETUP_SECONDS):
        os.close(descriptor)
    with box.pausing:
        tasks = _tasks("/proc")
        programs = _programs_below(tasks, box.number())
        # Only programs inside: a keeper may have ended, and a process of the host may have its number now.
        paused = {pid for keeper in box.paused for pid in _programs_below(tasks, keeper) if pid in programs}
        # Directly and not through the gate, so that the next caller finds them already running.
        _send(paused, signal.SIGSTOP)
        _send(programs.keys() - before - paused, signal.SIGCONT)


def _send(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


@contextlib.contextmanager
def _inner_proc(box: LaunchedSandbox) -> Iterator[str]:
    """Yield a path to the sandbox's own /proc, which only the gate can open."""
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


def _stop(box: LaunchedSandbox, proc: str) -> ThreadSurvey:
    """Stop everything and return the survey of the moment when nothing moved any more."""
    seen = ThreadSurvey()
    for attempt in range(ATTEMPTS):
        box.connection.signal(signal.SIGSTOP, everything=True)
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until:
            # Two equal surveys: a thread that counts as stopped may still be leaving the processor.
            earlier, seen = seen, _survey(proc)
            if not seen.moving and (not seen.threads or seen == earlier):
                return seen
            time.sleep(0.002)
        # Continue also those that were stopped before: a parent may be waiting in vfork for one of them.
        box.connection.signal(signal.SIGCONT, everything=True)
        while time.monotonic() < until + PATIENCE and _stopped(box):
            time.sleep(0.002)
        time.sleep(attempt * PACE)  # on a busy machine the processes have not come far yet
    raise SetupError(
        f"process {_first(seen, ThreadSurvey())} in the sandbox does not stop",
        stage="workspace",
        hint="it waits for a disk or a network file system, or another process keeps waking it: end it",
    )


def _compare(seen: ThreadSurvey, now: ThreadSurvey) -> None:
    if now.moving or now.threads != seen.threads:
        raise SetupError(
            f"process {_first(now, seen)} in the sandbox ran while the sandbox was frozen",
            stage="workspace",
            hint="its own timer, its timeout or another process woke it: end it, or try again",
        )


def _first(now: ThreadSurvey, seen: ThreadSurvey) -> int:
    """Return the pid of a process that is moving or has changed."""
    differs = {pid for pid, _ in dict(now.threads.items() ^ seen.threads.items())}
    return min(now.moving or differs, default=0)


def _survey(proc: str) -> ThreadSurvey:
    for _ in range(LISTINGS):
        tasks = _tasks(proc)
        gone = [pid for pid, task in tasks.items() if task is None]
        found = ThreadSurvey()
        for pid in _programs_below(tasks, FIRST):
            try:
                for thread in os.listdir(f"{proc}/{pid}/task"):
                    _add(found, proc, pid, thread)
            except (FileNotFoundError, ProcessLookupError):
                gone.append(pid)
        if not gone:
            return found
    return ThreadSurvey({}, sorted(gone))


def _add(found: ThreadSurvey, proc: str, pid: int, thread: str) -> None:
    with open(f"{proc}/{pid}/task/{thread}/status", "rb") as file:
        lines = dict(line.split(b":", 1) for line in file.read().splitlines() if b":" in line)
    state = lines[b"State"].split()[0].decode()
    if state in DEAD:
        return
    if state not in STOPPED and pid not in found.moving:
        found.moving.append(pid)
    switches = (lines[name] for name in (b"voluntary_ctxt_switches", b"nonvoluntary_ctxt_switches"))
    found.threads[pid, thread] = sum(map(int, switches))


def _stopped(box: LaunchedSandbox) -> set[int]:
    return {pid for pid, task in _programs_below(_tasks("/proc"), box.number()).items() if task.state == "T"}


def _programs_below(tasks: dict[int, Task | None], gate: int) -> dict[int, Task]:
    """Return every process of a program below a gate.

    The gate's own children are keepers and orphans of programs. Keepers stay in the gate's session, while a
    program begins a session of its own, and no process can join another session.
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
            if task is None or pid in found:  # a listing that is not atomic might contain a cycle
                continue
            if parent != gate or task.session != gate:
                found[pid] = task
            pending.append(pid)
    return found


def _tasks(proc: str) -> dict[int, Task | None]:
    """Return every listed process; None for one that was gone when it was read."""
    return {int(name): _task(f"{proc}/{name}") for name in os.listdir(proc) if name.isdigit()}


def _task(directory: str) -> Task | None:
    if not (fields := stat_fields(directory)):
        return None
    return Task(fields[STATE].decode(), int(fields[PARENT]), int(fields[SESSION]))
