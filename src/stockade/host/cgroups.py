"""Where this process may make cgroups, and with which controllers.

Version 1 has a hierarchy for each controller (or a few together); there an
administrator can make `stockade-UID` below our own cgroup and give it to the
user. Version 2 has one for all, and a rule: a cgroup whose children have
controllers may hold no process itself. Where our own cgroup is delegated and
holds nobody but us, we step into a leaf of it first. Where it is not, systemd
can start a process in a scope that is (`scope`), and `places` of that process
are then ours.

Everything is read below `proc`, so that a pretend tree can stand in for a
machine that is not here.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from stockade.host import cgroupfs

CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
#: What has to be switched on for children in version 2; accounting is always there.
SWITCHED = ("memory", "pids", "cpu")
#: The groups of sandboxes, and the leaf that a supervisor moves into.
GROUP = "stockade-run-"
LEAF = "stockade-supervisor-"
#: How the detail of a probe begins that succeeds only in a scope.
IN_SCOPE = "systemd scope, "

Answer = tuple[bool, int, str]


class Place(msgspec.Struct, frozen=True):
    """A directory in which cgroups with some controller can be made, of a hierarchy of that version."""

    directory: str
    version: int


class Places(msgspec.Struct, frozen=True):
    """Where groups can be made, by controller, and why there is no such place for the others."""

    found: dict[str, Place] = {}
    refused: dict[str, tuple[int, str]] = {}
    proc: str = "/proc"

    def at(self, controller: str) -> Place | None:
        return self.found.get(controller)


def text(path: str) -> str:
    """A small file of the kernel's, "" where there is none."""
    try:
        return cgroupfs.read(path)
    except OSError:
        return ""


def own_cgroups(membership: str, mountinfo: str) -> dict[tuple[str, ...], str]:
    """A process's cgroup in each hierarchy, as a directory here; () stands for version 2."""
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
        # What is mounted may be another part of the tree than the one we are in.
        if inside != ".." and not inside.startswith("../"):
            places[controllers] = os.path.normpath(f"{point}/{inside}")
    return places


def membership(proc: str = "/proc") -> str:
    """Which cgroups we are in, for telling one start from another: the leaf that we moved into is ours."""
    return _without_leaf(text(f"{proc}/self/cgroup"))


@lru_cache(maxsize=4)
def _without_leaf(membership: str) -> str:
    lines = membership.splitlines()
    return " ".join(os.path.dirname(line) if _is_leaf(line) else line for line in lines)


def places(pid: int | None = None, *, proc: str = "/proc") -> Places:
    """Where groups for our own processes can be made, or for those that `pid` starts.

    A version 2 cgroup that is delegated and holds only that process is made
    ready; nothing of anybody else's is changed.
    """
    own = own_cgroups(text(f"{proc}/{pid or 'self'}/cgroup"), text(f"{proc}/self/mountinfo"))
    candidates: dict[str, list[Place]] = {name: [] for name in CONTROLLERS}
    refused: dict[str, tuple[int, str]] = {}
    for names, directory in own.items():
        given = f"{directory}/stockade-{os.geteuid()}"
        for name in set(names).intersection(CONTROLLERS):
            candidates[name] += [Place(path, 1) for path in (given, directory) if os.path.isdir(path)]
    if () in own:
        directory = os.path.dirname(own[()]) if _is_leaf(own[()]) else own[()]
        lacking = [name for name in SWITCHED if not candidates[name]]
        refused = _switch_on(directory, lacking, pid or os.getpid(), proc)
        for name in CONTROLLERS:
            if name not in SWITCHED or (name in lacking and name not in refused):
                candidates[name].append(Place(directory, 2))
    return Places(
        found={name: _best(found) for name, found in candidates.items() if found},
        refused=refused,
        proc=proc,
    )


def _is_leaf(path: str) -> bool:
    return os.path.basename(path).startswith(LEAF)


def _best(found: list[Place]) -> Place:
    """The first that we may write to; else the first, whose refusal then says why."""
    may = (place for place in found if os.access(place.directory, os.W_OK, effective_ids=True))
    return next(may, found[0])


def _switch_on(directory: str, wanted: list[str], pid: int, proc: str) -> dict[str, tuple[int, str]]:
    """Let children of a version 2 cgroup have the controllers; what cannot be had, with errno and step."""
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
    """Refuse what is not ours to rearrange: the whole machine's, another manager's, or with others in it."""
    if not os.access(directory, os.W_OK, effective_ids=True):
        raise OSError(errno.EACCES, "not delegated")
    if not os.path.exists(f"{directory}/cgroup.type"):
        raise OSError(errno.EPERM, "the root of the machine")
    if os.geteuid() == 0 and os.path.exists("/run/systemd/system") and not _marked(directory):
        raise OSError(errno.EPERM, "managed by systemd")
    for other in text(f"{directory}/cgroup.procs").split():
        if not _descends(int(other), pid, proc):
            raise OSError(errno.EBUSY, "other processes are in our cgroup")


def _marked(directory: str) -> bool:
    """Whether systemd has written on the cgroup that it leaves it alone."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(directory, name) == b"1":
                return True
        except OSError:
            continue
    return False


def _descends(pid: int, ancestor: int, proc: str) -> bool:
    while pid not in (0, 1, ancestor):
        after_name = text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
        pid = int(after_name[1]) if after_name else 0
    return pid == ancestor


def _step_aside(directory: str, pid: int, controllers: list[str]) -> None:
    """Move what is in the cgroup into a leaf, then give the children controllers; all or nothing."""
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
    """What to put before a command so that systemd starts it in a delegated cgroup; () without systemd.

    systemd-run becomes the command itself, so the process id stays. Once the
    command is running, `places(pid)` makes its cgroup ready.
    """
    whose = () if os.geteuid() == 0 else ("--user",)
    runtime = "/run" if os.geteuid() == 0 else environ.get("XDG_RUNTIME_DIR", "")
    if not os.path.exists(f"{runtime}/systemd/private"):
        return ()
    import shutil

    program = shutil.which("systemd-run", path=environ.get("PATH", os.defpath))
    if not program:
        return ()
    options = ("--scope", "--quiet", "--collect", "--property=Delegate=yes")
    return (program, *whose, *options, "--")


def probe_in_scope(
    names: Iterable[str], environ: Mapping[str, str], *, proc: str = "/proc"
) -> dict[str, Answer]:
    """The same for a process that systemd starts in a scope of its own; {} without systemd."""
    prefix = scope(environ)
    if not prefix:
        return {}
    import subprocess

    command = [*prefix, "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        try:
            # It has come as far as this once it is in its scope.
            assert waiting.stdout is not None
            if not waiting.stdout.readline():
                return dict.fromkeys(names, (False, 0, "systemd-run --scope"))
            answers = probe(names, places(waiting.pid, proc=proc))
            return {name: (ok, number, IN_SCOPE + said) for name, (ok, number, said) in answers.items()}
        finally:
            waiting.kill()


def probe(names: Iterable[str], found: Places) -> dict[str, Answer]:
    """Whether limits by cgroup work, by making one, setting the limit and putting a process into it."""
    answers: dict[str, Answer] = {}
    made: dict[str, cgroupfs.Cgroup] = {}
    try:
        for name in names:
            answers[name] = _limited(name, found, made)
        if made:
            import subprocess

            # A process that ends when we do: it waits for the end of its input. One for all, because
            # the first move after a while costs 5 ms and the next ones a tenth of one.
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waiting:
                for name, group in made.items():
                    answers[name] = _entered(group, waiting.pid)
                waiting.kill()
    finally:
        for group in made.values():
            group.close()
    return answers


def _limited(name: str, found: Places, made: dict[str, cgroupfs.Cgroup]) -> Answer:
    controller = name.removeprefix("cgroup.")
    place = found.at(controller)
    if place is None:
        return (False, *found.refused.get(controller, (errno.ENOENT, "find the controller")))
    try:
        path = f"{place.directory}/{GROUP}probe-{os.getpid()}-{controller}"
        group = made[name] = cgroupfs.Cgroup(path, place.version)
    except OSError as error:
        return False, error.errno or errno.EIO, "mkdir"
    try:
        if controller == "memory":
            group.limit_memory(1 << 30)
        elif controller == "pids":
            group.limit_tasks(64)
        elif controller == "cpu":
            group.limit_cpu(0.5)
        else:
            group.read("cpu.stat" if place.version == 2 else "cpuacct.usage")
    except OSError as error:
        made.pop(name).close()
        return False, error.errno or errno.EIO, "set a limit"
    return True, 0, f"version {place.version}"


def _entered(group: cgroupfs.Cgroup, pid: int) -> Answer:
    try:
        group.add(pid)
        if pid not in group.processes():
            raise OSError(errno.ESRCH, "it is not there")
    except OSError as error:
        return False, error.errno or errno.EIO, "move a process"
    return True, 0, f"version {group.version}"
