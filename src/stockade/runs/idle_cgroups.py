"""Cgroups that wait for the next sandbox of this process.

The kernel takes longer to make and to destroy a cgroup than a short program runs. So a group is used again
where nothing of the earlier sandbox can be counted in it:

- It limits tasks alone. What memory was charged and what processor time was used outlives the processes.
- It has no task left, and none was refused.
- Its peak, which nobody can reset, is two tasks: the gate's first process and one program, which every
  sandbox has. A program that forked or started a thread was the last one in its group.

The next sandbox sets its own limit and reads it back, as in a new group. A group that fails one of these
checks, or that the kernel (before 6.11) has no peak of, is removed, and the next sandbox gets a new one.

The register names each idle group, so that it is removed after its supervisor was killed. A program can read
the name of its group, and so tell that an earlier program had the same supervisor.
"""

from __future__ import annotations

import _thread
import atexit
import os
from typing import TYPE_CHECKING

from stockade.errors import SetupError
from stockade.runs.register import register
from stockade.runs.register.sandbox_record import SandboxRecord

if TYPE_CHECKING:
    from stockade.linux.cgroupfs import Cgroup
    from stockade.linux.cgroups import CgroupParent
    from stockade.runs.cgroup import SandboxCgroups

#: The tasks of every sandbox: the gate's first process, and its program.
FEWEST_TASKS = 2
#: How many groups wait at most; normally as many as this process has used at once.
MOST_IDLE = 8


class _IdleState:
    """The lock that the threads of this process share, and whether groups may wait: not while it exits."""

    lock = _thread.allocate_lock()
    may_wait = True


#: State directories and the groups that wait, the last one used last.
_groups: list[tuple[str, Cgroup]] = []
#: The register's entries of all groups that have waited, also while they are in use, by path.
_entries: dict[str, register.RegisterEntry] = {}


def take(home: str, place: CgroupParent) -> Cgroup | None:
    """Return a group in that place that is as good as new, if one waits; `give_back` takes it again."""
    gone: list[Cgroup] = []
    try:
        with _IdleState.lock:
            for known in reversed(_groups.copy()):
                state, group = known
                there = os.path.dirname(group.path) == place.directory and group.version == place.version
                if there and state == home and _is_as_new(group):
                    _groups.remove(known)
                    return group
                if not os.path.lexists(group.path):  # `stockade purge` has removed it
                    _groups.remove(known)
                    gone.append(group)
        return None
    finally:
        _remove(gone)


def give_back(home: str, used: SandboxCgroups) -> None:
    """Keep the group of a sandbox that has ended, if it is as good as new; otherwise remove it."""
    group = used.only_group
    if group is not None and _had_one_program(group) and _has_entry(home, group):
        with _IdleState.lock:
            if _IdleState.may_wait and len(_groups) < MOST_IDLE:
                used.release()
                _groups.append((home, group))
                return
    used.close()
    if group is not None and not used.paths:
        _close_entry(group.path)


def shutdown() -> None:
    """Remove the groups that wait. The next sandbox makes a new one."""
    with _IdleState.lock:
        idle = [group for _, group in _groups]
        _groups.clear()
    _remove(idle)


def _remove(groups: list[Cgroup]) -> None:
    for group in groups:
        if group.close():
            _close_entry(group.path)


def _at_exit() -> None:
    """Remove the groups that wait, and keep none from now on: nobody would remove it."""
    _IdleState.may_wait = False
    shutdown()


def _is_as_new(group: Cgroup) -> bool:
    """Whether nothing of an earlier sandbox can be counted in the group."""
    try:
        # In this order: the other counters are final once there is no task left.
        return group.read("pids.current") == "0\n" and _had_one_program(group)
    except OSError:
        return False


def _had_one_program(group: Cgroup) -> bool:
    try:
        return int(group.read("pids.peak")) <= FEWEST_TASKS and group.read("pids.events") == "max 0\n"
    except OSError:
        return False


def _has_entry(home: str, group: Cgroup) -> bool:
    """Whether the register names the group, after an attempt to enter it."""
    if group.path in _entries:
        return True
    record = SandboxRecord(id=register.new_id(), groups=(group.path,), idle=True)
    try:
        _entries[group.path] = register.enter(home, record)
        for name in ("pids.current", "pids.peak", "pids.events"):
            group.hold(name)
        group.hold("pids.max", os.O_RDWR)
        group.hold(*(("tasks", os.O_WRONLY) if group.version == 1 else ("cpu.stat",)))
    except (OSError, SetupError):
        return False
    return True


def _close_entry(path: str) -> None:
    entry = _entries.pop(path, None)
    if entry is not None:
        entry.close()


def _after_fork() -> None:
    """Leave the groups to the parent, whatever its threads were doing."""
    _IdleState.lock = _thread.allocate_lock()
    _entries.clear()
    while _groups:
        _groups.pop()[1].forget()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(_at_exit)
