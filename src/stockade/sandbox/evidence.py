"""Evidence: what the kernel says about a sandbox, read before its first program.

The gate has said "ready" and waits. Now its process is looked at from
outside: namespaces by the descriptors it passed, the rest in /proc. What only
a process inside can try (Landlock's canary, the filter's answer, files of the
root, rlimits) the gate has tried before it said "ready", or it would not
have said it. If anything that was asked for is not there, nothing starts.
"""

from __future__ import annotations

import errno
import os
import re

from stockade.controls import Control
from stockade.errors import SetupError
from stockade.gate import plan as ops
from stockade.gate.client import Reply

#: The order in which the resident passes the namespaces, after a pidfd.
NAMESPACES = ("user", "mnt", "pid", "ipc", "uts", "net", "cgroup")
CAPABILITIES = (b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb")
NOTHING = b"0000000000000000"
WANTED_STATUS = (
    b"".join(b"%s:\t%s\n" % (name, NOTHING) for name in CAPABILITIES)
    + b"NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t%d\n"
)
#: Mount ids and device numbers differ from sandbox to sandbox.
NUMBERS = re.compile(rb"^\d+ \d+ \d+:\d+ ", re.MULTILINE)


def observe_birth(born: Reply, plan: ops.Plan) -> None:
    """Look at the namespaces and id maps. The gate is still raising its walls meanwhile."""
    _namespaces(born.descriptors[1:], plan)
    _id_maps(f"/proc/{born.status}", plan)


def observe_mounts(pid: int, plan: ops.Plan) -> None:
    """Compare the mount table of a gate that has let go of the host with the plan."""
    _mounts(_read(f"/proc/{pid}/mountinfo"), plan)


def observe_privileges(pid: int, filters_before: int) -> None:
    """Look at what a gate that is ready may still do."""
    _privileges(_read(f"/proc/{pid}/status"), filters_before)


def observe_plain(pid: int, warden: int | None, filters_before: int) -> None:
    """The same of a gate without namespaces, which its warden has started."""
    status = _lines(_read(f"/proc/{pid}/status"))
    if warden is None or int(status[b"PPid"]) != warden:
        raise _missing("the gate is not its warden's child")
    # What bounds them only root may take away; below no_new_privs nothing is gained from it.
    _bounded(status, filters_before, tuple(name for name in CAPABILITIES if name != b"CapBnd"))


#: How each control is seen, once everything above and the gate's own trials have passed.
OBSERVED = {
    Control.FILES: "mounts read from the kernel, Landlock tried by the gate",
    Control.DENY: "each name in what is shown looked up by the gate",
    Control.EXEC: "noexec mounts read from the kernel, Landlock tried by the gate, filter as for syscalls",
    Control.PROTECT: "mounts read from the kernel",
    Control.WORKSPACE_OVERLAY: "overlay mount read from the kernel",
    Control.NETWORK_NONE: "namespace descriptor compared",
    Control.PROCESSES: "namespace descriptor compared",
    Control.IPC: "namespace descriptor compared",
    Control.SYSCALLS: "filter count read from the kernel, a refused call tried by the gate",
    Control.PRIVILEGES: "capability sets, no_new_privs and id maps read from the kernel",
    Control.ENVIRONMENT: "handed over by the supervisor",
    Control.DEVICES: "mounts read from the kernel",
    Control.TERMINAL: "none of the host's is handed in; filter as for syscalls",
    Control.LIMITS_MEMORY: "limit and membership read from the kernel",
    Control.LIMITS_TASKS: "confirmed by the gate",
    Control.LIMITS_CPU: "limit and membership read from the kernel",
    Control.LIMITS_CPU_TIME: "membership read from the kernel, kept by the supervisor",
    Control.LIMITS_FILES: "confirmed by the gate",
    Control.LIMITS_DISK: "confirmed by the gate",
    Control.LIMITS_WALL: "kept by the gate",
    Control.LIMITS_OUTPUT: "kept by the supervisor",
    Control.CLEANUP: "namespace descriptor compared, process held by pidfd",
}
#: And those that a cgroup enforces here and another means elsewhere.
OBSERVED_IN_CGROUP = {Control.LIMITS_TASKS: "limit and membership read from the kernel"}


def incomplete() -> SetupError:
    """The gate said that it was ready before everything had been shown."""
    return _missing("the gate is ready before everything could be seen")


def shared_network() -> SetupError:
    """Two sandboxes were found in one network namespace."""
    return _missing("it shares its network namespace with another sandbox")


def _missing(what: str) -> SetupError:
    return SetupError(
        f"nothing was run: {what}",
        stage="evidence",
        hint="this is a defect of Stockade or of this kernel; please report it with `stockade doctor --json`",
    )


def _read(path: str) -> bytes:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = b""
            while part := os.read(file, 65536):
                content += part
            return content
        finally:
            os.close(file)
    except OSError as error:
        # The mount table of a gate that is just gone gives EINVAL.
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM, errno.EINVAL):
            raise
        raise _missing(f"{path} cannot be read: {error.strerror}") from None


def _namespaces(descriptors: tuple[int, ...], plan: ops.Plan) -> None:
    if len(descriptors) != len(NAMESPACES):
        raise _missing("the gate did not pass its namespaces")
    for name, descriptor in zip(NAMESPACES, descriptors, strict=True):
        is_new = identity(f"/proc/self/ns/{name}") != identity(descriptor)
        if is_new != (name in plan.namespaces.names):
            raise _missing(f"the {name} namespace is {'not ' if is_new else ''}the host's")


def identity(file: str | int) -> tuple[int, int]:
    """Which file it is, for as long as it is open."""
    info = os.stat(file)
    return info.st_dev, info.st_ino


def _privileges(text: bytes, filters_before: int) -> None:
    if text.find(WANTED_STATUS % (filters_before + 1)) > 0 and b"\t1\nNSpgid:" in text:
        return
    # Something is amiss, or this kernel writes its lines in another order: one by one.
    status = _lines(text)
    _bounded(status, filters_before, CAPABILITIES)
    if not status[b"NSpid"].endswith(b"\t1"):
        raise _missing("the gate is not the first process of its namespace")


def _lines(status: bytes) -> dict[bytes, bytes]:
    return dict(line.split(b":\t", 1) for line in status.splitlines())


def _bounded(status: dict[bytes, bytes], filters_before: int, capabilities: tuple[bytes, ...]) -> None:
    for name in capabilities:
        if status[name] != NOTHING:
            raise _missing(f"{name.decode()} is {status[name].decode()} instead of empty")
    if status[b"NoNewPrivs"] != b"1":
        raise _missing("no_new_privs is not set")
    if status[b"Seccomp"] != b"2" or int(status[b"Seccomp_filters"]) != filters_before + 1:
        raise _missing("the system call filter is not in force")


def _id_maps(process: str, plan: ops.Plan) -> None:
    if plan.plain:
        return  # it is in the user namespace of the caller, as was just seen
    for kind, own in (("uid_map", os.geteuid()), ("gid_map", os.getegid())):
        wanted = ["0", "0", "4294967295"] if plan.namespaces.every_id else [str(own), str(own), "1"]
        if _read(f"{process}/{kind}").decode().split() != wanted:
            raise _missing(f"{kind} is not what was asked for")


def _mounts(table: bytes, plan: ops.Plan) -> None:
    """Compare the mount table with the plan: all of it, and nothing besides."""
    table = NUMBERS.sub(b"", table)
    # A plan is a value, so a table that was found right for it once is right again.
    if table in plan.verified:
        return
    seen = set()
    lines = table.split(b"\n")[:-1]
    for line in lines:
        _, path, options, rest = line.split(b" ", 3)
        seen.add(_judged(plan, path, options, rest.partition(b"- ")[2].partition(b" ")[0]))
    if missing := plan.mounts.keys() - seen:
        raise _missing(f"{', '.join(sorted(missing))}: not mounted")
    if len(lines) != len(seen):
        raise _missing("something is mounted over something else")
    plan.verified.add(table)


def _judged(plan: ops.Plan, escaped: bytes, options: bytes, kind: bytes) -> str:
    """The path of one mount, which the plan asks for in this very form."""
    path = _unescape(escaped)
    known = plan.mounts.get(path)
    if known is None:
        # A tree is shown with what is mounted in it, under the same rules.
        above = [tree for tree, (_, kind) in plan.mounts.items() if not kind and path.startswith(tree + "/")]
        if not above:
            raise _missing(f"something unexpected is mounted on {path}")
        known = (plan.mounts[max(above, key=len)][0], "")
    attributes, wanted = known
    words = options.split(b",")
    for attribute, word in ops.ATTRIBUTES.items():
        if attributes & attribute and word not in words:
            raise _missing(f"{path} is not mounted {word.decode()}")
    if wanted and kind != wanted.encode():
        raise _missing(f"{path} is not a {wanted}")
    return path


def _unescape(path: bytes) -> str:
    if b"\\" in path:
        for code in (b"040", b"011", b"012", b"134"):
            path = path.replace(b"\\" + code, bytes([int(code, 8)]))
    return path.decode("utf-8", "surrogateescape")
