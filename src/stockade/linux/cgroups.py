"""Where this process may make cgroups, and with which controllers.

Version 1 has a hierarchy for each controller (or a few together); there an
administrator can make `stockade-UID` below our own cgroup and give it to the
user. Version 2 has one for all, and a rule: a cgroup whose children have
controllers may hold no process itself. Where our own cgroup is delegated and
holds no other process, we move into a leaf of it first. Where it is not
delegated, systemd can start a process in a scope that is (`scope`), and
`places` then prepares the cgroup of that process.

Everything is read below `proc`, so that a test can pretend another machine.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from functools import lru_cache

import msgspec

from stockade.linux import cgroupfs
from stockade.linux.procstat import PARENT, stat_fields

CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
#: The controllers that version 2 must enable for children; accounting is always there.
SWITCHED = ("memory", "pids", "cpu")
#: How the names of sandboxes' cgroups begin, and of the leaf that a supervisor moves into.
GROUP = "stockade-run-"
LEAF = "stockade-supervisor-"
#: How the detail of a probe begins if the probe succeeds only in a scope.
IN_SCOPE = "systemd scope, "

Answer = tuple[bool, int, str]


class CgroupParent(msgspec.Struct, frozen=True):
    """A directory in which cgroups with some controller can be made; `version` is that of its hierarchy."""

    directory: str
    version: int


class CgroupParents(msgspec.Struct, frozen=True):
    """Where cgroups can be made, by controller, and for the other controllers why not (errno and step)."""

    found: dict[str, CgroupParent] = {}
    refused: dict[str, tuple[int, str]] = {}
    proc: str = "/proc"

    def at(self, controller: str) -> CgroupParent | None:
        return self.found.get(controller)


def text(path: str) -> str:
    """Read a small file of the kernel; "" if it cannot be read."""
    try:
        return cgroupfs.read(path)
    except OSError:
        return ""


def own_cgroups(membership: str, mountinfo: str) -> dict[tuple[str, ...], str]:
    """The directory of a process's cgroup in each hierarchy, by its controllers; () stands for version 2."""
    mounts: dict[tuple[str, ...], tuple[str, str]] = {}
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split(" ")[3:5]
        if kind == "cgroup2":
            mounts[()] = (root, point)
        elif kind == "cgroup":
            for name in options.split(","):
                mounts[(name,)] = (root, point)
    places = {}
    for line in membership.splitlines():
        _, names, path = line.split(":", 2)
        controllers = tuple(names.split(",")) if names else ()
        root, point = mounts.get(controllers[:1], ("", ""))
        inside = os.path.relpath(path, root) if point else ".."
        # The mount may show another part of the tree than the one that we are in.
        if inside != ".." and not inside.startswith("../"):
            places[controllers] = os.path.normpath(f"{point}/{inside}")
    return places


def membership(proc: str = "/proc") -> str:
    """Our cgroups as text that stays the same when we move into our leaf, for use as a key."""
    return _without_leaf(text(f"{proc}/self/cgroup"))


@lru_cache(maxsize=4)
def _without_leaf(membership: str) -> str:
    lines = membership.splitlines()
    return " ".join(os.path.dirname(line) if _is_leaf(line) else line for line in lines)


def places(pid: int | None = None, *, proc: str = "/proc") -> CgroupParents:
    """Find where cgroups can be made for our own processes, or for those that `pid` starts.

    Prepares a version 2 cgroup if it is delegated and holds only that process and its descendants, and
    changes no cgroup that others use.
    """
    own = own_cgroups(text(f"{proc}/{pid or 'self'}/cgroup"), text(f"{proc}/self/mountinfo"))
    candidates: dict[str, list[CgroupParent]] = {name: [] for name in CONTROLLERS}
    refused: dict[str, tuple[int, str]] = {}
    for names, directory in own.items():
        delegated = f"{directory}/stockade-{os.geteuid()}"
        for name in set(names).intersection(CONTROLLERS):
            candidates[name] += [
                CgroupParent(path, 1) for path in (delegated, directory) if os.path.isdir(path)
            ]
    if () in own:
        directory = os.path.dirname(own[()]) if _is_leaf(own[()]) else own[()]
        lacking = [name for name in SWITCHED if not candidates[name]]
        refused = _switch_on(directory, lacking, pid or os.getpid(), proc)
        for name in CONTROLLERS:
            if name not in SWITCHED or (name in lacking and name not in refused):
                candidates[name].append(CgroupParent(directory, 2))
    return CgroupParents(
        found={name: _first_writable(some) for name, some in candidates.items() if some},
        refused=refused,
        proc=proc,
    )


def _is_leaf(path: str) -> bool:
    return os.path.basename(path).startswith(LEAF)


def _first_writable(candidates: list[CgroupParent]) -> CgroupParent:
    """The first that we may write to; else the first, whose refusal then says why."""
    writable = (place for place in candidates if os.access(place.directory, os.W_OK, effective_ids=True))
    return next(writable, candidates[0])


def _switch_on(directory: str, wanted: list[str], pid: int, proc: str) -> dict[str, tuple[int, str]]:
    """Enable controllers for children of a version 2 cgroup; return those refused, with errno and step."""
    have = text(f"{directory}/cgroup.controllers").split()
    on = text(f"{directory}/cgroup.subtree_control").split()
    refused = {name: (errno.ENOENT, "cgroup.controllers") for name in wanted if name not in have}
    off = [name for name in wanted if name in have and name not in on]
    if not off:
        return refused
    try:
        _check_delegated(directory, pid, proc)
        _step_aside(directory, pid, off)
    except OSError as error:
        refused |= dict.fromkeys(off, (error.errno or errno.EIO, error.strerror or "cgroup.subtree_control"))
    return refused


def _check_delegated(directory: str, pid: int, proc: str) -> None:
    """Refuse a cgroup that is not ours to rearrange: the root, another manager's, or a shared one."""
    if not os.access(directory, os.W_OK, effective_ids=True):
        raise OSError(errno.EACCES, "not delegated")
    if not os.path.exists(f"{directory}/cgroup.type"):
        raise OSError(errno.EPERM, "the root of the machine")
    if os.geteuid() == 0 and os.path.exists("/run/systemd/system") and not _has_delegate_mark(directory):
        raise OSError(errno.EPERM, "managed by systemd")
    for other in text(f"{directory}/cgroup.procs").split():
        if not _descends(int(other), pid, proc):
            raise OSError(errno.EBUSY, "other processes are in our cgroup")


def _has_delegate_mark(directory: str) -> bool:
    """Whether systemd has marked the cgroup as delegated."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(directory, name) == b"1":
                return True
        except OSError:
            continue
    return False


def _descends(pid: int, ancestor: int, proc: str) -> bool:
    while pid not in (0, 1, ancestor):
        fields = stat_fields(f"{proc}/{pid}")
        pid = int(fields[PARENT]) if fields else 0
    return pid == ancestor


def _step_aside(directory: str, pid: int, controllers: list[str]) -> None:
    """Move the processes of the cgroup into a leaf, then enable the controllers; undo the move on failure."""
    leaf = f"{directory}/{LEAF}{pid}"
    if not os.path.isdir(leaf):
        cgroupfs.make(leaf)
    try:
        # A child may be born while its parent moves.
        for _ in range(8):
            for member in text(f"{directory}/cgroup.procs").split():
                cgroupfs.write(f"{leaf}/cgroup.procs", member)
        cgroupfs.write(f"{directory}/cgroup.subtree_control", " ".join(f"+{name}" for name in controllers))
    except OSError:
        for member in text(f"{leaf}/cgroup.procs").split():
            cgroupfs.write(f"{directory}/cgroup.procs", member)
        cgroupfs.drop(leaf)
        raise


def scope(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The words to put before a command so that systemd starts it in a delegated cgroup; () without systemd.

    systemd-run becomes the command itself, so the pid stays. Once the command runs, `places(pid)` prepares
    its cgroup.
    """
    manager = () if os.geteuid() == 0 else ("--user",)
    runtime = "/run" if os.geteuid() == 0 else environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.exists(f"{runtime}/systemd/private"):
        return ()
    import shutil

    program = shutil.which("systemd-run", path=environ.get("PATH", os.defpath))
    if not program:
        return ()
    options = ("--scope", "--quiet", "--collect", "--property=Delegate=yes")
    return (program, *manager, *options, "--")
