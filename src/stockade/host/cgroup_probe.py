"""Find out whether cgroups can be made and limited here, by making one."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Mapping

from stockade.linux import cgroupfs
from stockade.linux.cgroups import GROUP, IN_SCOPE, Answer, CgroupParents, places, scope

#: What the names of its cgroups begin with; the number of its process follows.
PROBE = f"{GROUP}probe-"
#: Seconds after which a cgroup of a process that does not live was left behind.
LEFT_BEHIND = 60.0


def probe_in_scope(
    names: Iterable[str], environ: Mapping[str, str], *, proc: str = "/proc"
) -> dict[str, Answer]:
    """Do the same as `probe` for a process that systemd starts in a scope of its own; {} without systemd."""
    prefix = scope(environ)
    if not prefix:
        return {}
    import subprocess

    command = [*prefix, "sh", "-c", "echo; exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        try:
            # It writes the line once it is in its scope.
            assert waiting.stdout is not None
            if not waiting.stdout.readline():
                return dict.fromkeys(names, (False, 0, "systemd-run --scope"))
            answers = probe(names, places(waiting.pid, proc=proc))
            return {name: (ok, number, IN_SCOPE + detail) for name, (ok, number, detail) in answers.items()}
        finally:
            waiting.kill()


def probe(names: Iterable[str], found: CgroupParents) -> dict[str, Answer]:
    """Try cgroups: make one for each name, set its limit, and move a process into it."""
    answers: dict[str, Answer] = {}
    made: dict[str, cgroupfs.Cgroup] = {}
    try:
        for name in names:
            answers[name] = _set_limit(name, found, made)
        if made:
            import subprocess

            # It ends when this process does, because it waits for the end of its input. One process serves
            # all groups: the first move after a while costs 5 ms, and the next ones a tenth of one.
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as waiting:
                for name, group in made.items():
                    answers[name] = _move_into(group, waiting.pid)
                waiting.kill()
    finally:
        for group in made.values():
            group.close()
    for directory in {os.path.dirname(group.path) for group in made.values()}:
        remove_left_behind(directory)
    return answers


def remove_left_behind(directory: str) -> None:
    """Remove empty cgroups of probes that were killed before they could remove them."""
    for name in os.listdir(directory):
        number = name.removeprefix(PROBE).partition("-")[0]
        if not name.startswith(PROBE) or not number.isdecimal() or os.path.exists(f"/proc/{number}"):
            continue
        # One that was just made may belong to a process of another PID namespace.
        with contextlib.suppress(OSError):
            if time.time() - os.stat(f"{directory}/{name}").st_mtime > LEFT_BEHIND:
                os.rmdir(f"{directory}/{name}")


def _set_limit(name: str, found: CgroupParents, made: dict[str, cgroupfs.Cgroup]) -> Answer:
    controller = name.removeprefix("cgroup.")
    place = found.at(controller)
    if place is None:
        return (False, *found.refused.get(controller, (errno.ENOENT, "find the controller")))
    try:
        path = f"{place.directory}/{PROBE}{os.getpid()}-{controller}"
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


def _move_into(group: cgroupfs.Cgroup, pid: int) -> Answer:
    try:
        group.add(pid)
        if pid not in group.processes():
            raise OSError(errno.ESRCH, "the process is not in the group")
    except OSError as error:
        return False, error.errno or errno.EIO, "move a process"
    return True, 0, f"version {group.version}"
