"""Evidence: what the kernel says about a sandbox, read before its first program starts.

The gate has said "ready" and waits. The supervisor now checks the gate's process from outside: its namespaces
by the descriptors that the gate passed, the rest in /proc. Some things only a process inside can try
(Landlock's canary, the filter's answer, files of the root, rlimits): the gate tries them before it says
"ready". If anything that the plan asks for is missing, nothing starts.

The observations are kept as a value (`Evidence`), which the receipts of the sandbox's runs carry.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import msgspec

from stockade.backends.backend import Backend
from stockade.backends.selection import Selection
from stockade.controls import Control, Grade
from stockade.errors import SetupError
from stockade.gate import operations as ops
from stockade.gate import wire
from stockade.gate.wire import Reply
from stockade.linux.sha256 import sha256
from stockade.policy import Policy
from stockade.result import Enforcement

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.resolve.environment import Environment

#: The order in which the resident passes the namespaces, after a pidfd.
NAMESPACES = ("user", "mnt", "pid", "ipc", "uts", "net", "cgroup")
CAPABILITIES = (b"CapInh", b"CapPrm", b"CapEff", b"CapBnd", b"CapAmb")
NOTHING = b"0000000000000000"
#: The sets that root inside keeps capabilities in, if the plan lets it.
KEPT = (b"CapPrm", b"CapEff", b"CapBnd")
WANTED_STATUS = (
    b"".join(b"%s:\t%%s\n" % name for name in CAPABILITIES)
    + b"NoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t%d\n"
)
#: Where bubblewrap has the host's tree while it mounts.
HELPERS_ROOT = "/oldroot"
#: How many words of a line of the mount table differ from sandbox to sandbox: mount ids, device numbers.
NUMBERS = 3
#: The option of every mount of pseudo-terminals.
MOST_TERMINALS = f"max={wire.MOST_TERMINALS}".encode()
#: The names of the plan's limits in /proc/PID/limits.
LIMITS = {
    "cpu_time": "Max cpu time",
    "file_size": "Max file size",
    "data": "Max data size",
    "core": "Max core file size",
    "tasks": "Max processes",
    "files": "Max open files",
    "memory": "Max address space",
}
#: Tasks that the gate reserves beyond those of its programs: GRACE_TASKS in gate.h.
RESERVED_TASKS = 2 * 256 + 2


class Evidence(msgspec.Struct, kw_only=True, eq=False):
    """What the supervisor observed of one sandbox before its first program."""

    #: The inode number of each, which is unique while the namespace lives.
    namespaces: dict[str, int] = {}
    uid_map: str = ""
    gid_map: str = ""
    #: SHA-256 of the mount table without its numbers, which differ from sandbox to sandbox.
    mounts: str = ""
    capabilities: dict[str, str] = {}
    no_new_privs: bool = False
    #: Mode and number of the system call filters, and the SHA-256 of the filter that the gate installed.
    seccomp: int = 0
    filters: int = 0
    filter: str = ""
    #: How many Landlock rules the gate added, and what it tried once they were in force.
    rules: int = 0
    canaries: tuple[str, ...] = ()
    rlimits: dict[str, int] = {}
    #: The files of its cgroups that hold a limit, with their contents as read back.
    cgroups: dict[str, str] = {}


def observe_birth(born: Reply, plan: ops.Plan, evidence: Evidence) -> None:
    """Check the namespaces and id maps while the gate is still raising its walls."""
    evidence.namespaces = _namespaces(born.descriptors[1:], plan)
    if plan.helped:
        _check_helper_report(born, evidence.namespaces, plan)
    evidence.uid_map, evidence.gid_map = _id_maps(f"/proc/{born.status}", plan)


def observe_joined(evidence: Evidence, network: int) -> None:
    """Check that the sandbox is in the network namespace that it was to join."""
    if os.fstat(network).st_ino != evidence.namespaces["net"]:
        raise _missing("the sandbox is in another network namespace than the one that it joins")


def observe_mounts(pid: int, plan: ops.Plan, evidence: Evidence) -> None:
    """Compare the mount table of a gate that has detached the host's root with the plan."""
    table = _read(f"/proc/{pid}/mountinfo")
    evidence.mounts = _mounts(table, plan)
    if plan.helped and plan.overlay is not None:
        _check_overlay(table, plan.overlay)


def observe_walls(ready: Reply, plan: ops.Plan, filters_before: int, evidence: Evidence) -> None:
    """Check the privileges of a gate that is ready, and the filter, rules and limits that it installed."""
    wanted = _capability_sets(plan.keep)
    _check_init_privileges(_read(f"/proc/{ready.pid}/status"), wanted, filters_before)
    _observe_installed(ready, plan, wanted, filters_before, evidence)


def _capability_sets(keep: int) -> dict[bytes, bytes]:
    """Return what each capability set of the gate must be, and so of every program that it starts as root."""
    return {name: b"%016x" % keep if name in KEPT else NOTHING for name in CAPABILITIES}


def _observe_installed(
    ready: Reply, plan: ops.Plan, sets: dict[bytes, bytes], filters_before: int, evidence: Evidence
) -> None:
    evidence.capabilities = {name.decode(): value.decode() for name, value in sets.items()}
    evidence.no_new_privs = True
    evidence.seccomp, evidence.filters = 2, filters_before + 1
    evidence.rlimits = _limits(_read(f"/proc/{ready.pid}/limits"), plan)
    # A helper gets the filter's bytes from the usher, and no process can read them back afterwards.
    if ready.text != ("" if plan.helped else plan.filter):
        raise _missing("the gate installed a system call filter that is not the plan's")
    if ready.index != plan.rules:
        raise _missing(f"the gate added {ready.index} Landlock rules, and the plan has {plan.rules}")
    evidence.filter, evidence.rules = plan.filter, ready.index
    evidence.canaries = (
        CANARIES
        + (SCOPED if plan.scoped else ())
        + (SEALED if plan.helped else ())
        + (PORTS if plan.ports else ())
    )


def observe_filter(pid: int, gate: int, filters: int) -> int:
    """Check that a child of the gate is under so many filters, and return their number."""
    status = _lines(_read(f"/proc/{pid}/status"))
    if int(status[b"PPid"]) != gate:
        raise _missing("the process that reported a filter is not the gate's child")
    _check_privileges(status, filters - 1, _capability_sets(0))
    return filters


def observe_confined(pid: int, filters: int, plan: ops.Plan) -> int:
    """Check the privileges and limits of a process that has confined itself, and return its user."""
    status = _lines(_read(f"/proc/{pid}/status"))
    # Only root can empty the bounding set; under no_new_privs a program gains nothing from it.
    _check_privileges(status, filters - 1, _unbounded_sets())
    _limits(_read(f"/proc/{pid}/limits"), plan)
    return int(status[b"Uid"].split()[0])


#: What the gate tries before it says "ready".
CANARIES = (
    "an ungranted file was refused",
    "a granted directory was opened",
    "a refused system call was refused",
)
#: What a child of the usher tries where a helper made the namespaces.
SEALED = ("a further user namespace was refused",)
#: Tried where the plan grants TCP ports.
PORTS = ("a connection to an ungranted port was refused",)
SCOPED = ("an abstract socket of outside was refused",)


def observe_plain(
    ready: Reply, plan: ops.Plan, warden: int | None, filters_before: int, evidence: Evidence
) -> None:
    """Do the checks of `observe_walls` for a gate without namespaces, which a warden started."""
    status = _lines(_read(f"/proc/{ready.pid}/status"))
    if warden is None or int(status[b"PPid"]) != warden:
        raise _missing("the gate is not a child of its warden")
    # Only root can empty the bounding set; under no_new_privs a program gains nothing from it.
    empty = _unbounded_sets()
    _check_privileges(status, filters_before, empty)
    _observe_installed(ready, plan, empty, filters_before, evidence)


def _unbounded_sets() -> dict[bytes, bytes]:
    return {name: NOTHING for name in CAPABILITIES if name != b"CapBnd"}


#: How each control is observed, once the checks above and the gate's own have passed.
OBSERVED = {
    Control.FILES: "mounts read from the kernel, Landlock tried by the gate",
    Control.DENY: "each name in what is shown looked up by the gate",
    Control.EXEC: "noexec mounts read from the kernel, Landlock tried by the gate, filter as for syscalls",
    Control.PROTECT: "mounts read from the kernel",
    Control.WORKSPACE_OVERLAY: "overlay mount read from the kernel",
    Control.NETWORK_NONE: "namespace descriptor compared",
    Control.NETWORK_RULES: "routes, listeners and namespace read back; the egress process observed like a "
    "sandbox",
    Control.NETWORK_HTTP: "the authority's certificate checked and shown inside by the supervisor; the "
    "egress process observed like a sandbox",
    Control.SECRETS: "locked memory and core limit of the egress process read from the kernel",
    Control.PROCESSES: "namespace descriptor compared",
    Control.IPC: "namespace descriptor compared",
    Control.SYSCALLS: "filter count read from the kernel, its bytes and a refused call by the gate",
    Control.PRIVILEGES: "capability sets, no_new_privs and id maps read from the kernel",
    Control.ENVIRONMENT: "handed over by the supervisor",
    Control.DEVICES: "mounts read from the kernel",
    Control.TERMINAL: "no terminal of the host is handed in; filter as for syscalls",
    Control.LIMITS_MEMORY: "limit and membership read from the kernel",
    Control.LIMITS_TASKS: "limit of the process read from the kernel",
    Control.LIMITS_CPU: "limit and membership read from the kernel",
    Control.LIMITS_CPU_TIME: "membership read from the kernel",
    Control.LIMITS_FILES: "limit of the process read from the kernel",
    Control.LIMITS_DISK: "confirmed by the gate",
    Control.LIMITS_WALL: "kept by the gate",
    Control.LIMITS_OUTPUT: "kept by the supervisor",
    Control.LIMITS_NETWORK: "kept by the egress process, which is observed like a sandbox",
    Control.CLEANUP: "namespace descriptor compared, process held by pidfd",
}
#: The same for controls that a cgroup enforces here and another mechanism elsewhere.
OBSERVED_IN_CGROUP = {Control.LIMITS_TASKS: "limit and membership read from the kernel"}
#: How reliable that observation is, for the first wall that each control rests on.
GRADES = {
    Control.FILES: Grade.KERNEL,
    Control.DENY: Grade.GATE,
    Control.EXEC: Grade.GATE,
    Control.PROTECT: Grade.KERNEL,
    Control.WORKSPACE_OVERLAY: Grade.KERNEL,
    Control.NETWORK_NONE: Grade.NAMESPACES,
    Control.NETWORK_RULES: Grade.NAMESPACES,
    Control.NETWORK_HTTP: Grade.KEPT,
    Control.SECRETS: Grade.KERNEL,
    Control.PROCESSES: Grade.NAMESPACES,
    Control.IPC: Grade.NAMESPACES,
    Control.SYSCALLS: Grade.GATE,
    Control.PRIVILEGES: Grade.KERNEL,
    Control.ENVIRONMENT: Grade.KEPT,
    Control.DEVICES: Grade.KERNEL,
    Control.TERMINAL: Grade.GATE,
    Control.LIMITS_MEMORY: Grade.KERNEL,
    Control.LIMITS_TASKS: Grade.KERNEL,
    Control.LIMITS_CPU: Grade.KERNEL,
    Control.LIMITS_CPU_TIME: Grade.KERNEL,
    Control.LIMITS_FILES: Grade.KERNEL,
    Control.LIMITS_DISK: Grade.GATE,
    Control.LIMITS_WALL: Grade.KEPT,
    Control.LIMITS_OUTPUT: Grade.KEPT,
    Control.LIMITS_NETWORK: Grade.KEPT,
    Control.CLEANUP: Grade.NAMESPACES,
}
#: The grades where a backend without namespaces enforces them: by Landlock, the filter or process parents.
PLAIN_GRADES = {
    Control.FILES: Grade.GATE,
    Control.NETWORK_NONE: Grade.GATE,
    Control.PROCESSES: Grade.GATE,
    Control.IPC: Grade.GATE,
    Control.DEVICES: Grade.GATE,
    Control.CLEANUP: Grade.KERNEL,
}


class BackendChoice(msgspec.Struct, frozen=True, eq=False):
    """The backend for a policy, and the controls that a run reports once everything has been observed."""

    backend: type[Backend]
    selection: Selection
    controls: dict[str, Enforcement]


def reported(backend: type[Backend], selection: Selection, policy: Policy) -> dict[str, Enforcement]:
    """Return the controls that a run under the policy reports once everything has been observed."""
    controls = {}
    for control, chosen in backend.adjusted(policy, selection.controls).items():
        in_cgroup = OBSERVED_IN_CGROUP if control in selection.by_cgroup else {}
        observed = (OBSERVED | dict(backend.observed) | in_cgroup)[control]
        plain = PLAIN_GRADES if control in backend.observed else {}
        grade = plain.get(control, GRADES[control])
        if chosen.weaker:
            observed, grade = Grade.WEAKER.value, Grade.WEAKER if chosen.mechanism else Grade.ABSENT
        controls[control.value] = Enforcement(
            requested=chosen.requested,
            mechanism=chosen.mechanism or f"none: {chosen.reason}",
            observed=observed,
            grade=grade,
        )
    return controls


def with_notes(controls: dict[str, Enforcement], notes: list[str]) -> dict[str, Enforcement]:
    """Add notes about the patterns of `deny` to its entry, and return the controls."""
    deny = controls.get(Control.DENY.value)
    if deny is None or not notes:
        return controls
    noted = msgspec.structs.replace(deny, observed="; ".join((deny.observed, *notes)))
    return {**controls, Control.DENY.value: noted}


def of_environment(controls: dict[str, Enforcement], environment: Environment) -> dict[str, Enforcement]:
    """Say in the controls what a private environment mounts and what programs in it may do."""
    from stockade.resolve.environment import CAPABILITIES

    words = {
        Control.FILES: f"{environment.describe()}; ",
        Control.IPC: "sockets in the environment's own directories are shared by all that mount them; ",
        Control.PRIVILEGES: f"of the capabilities only {', '.join(CAPABILITIES)}, over mapped ids: "
        f"{environment.ids.describe()}; ",
    }
    found = dict(controls)
    for control, more in words.items():
        known = found[control.value]
        mechanism = more + known.mechanism.replace("no capabilities, ", "")
        found[control.value] = msgspec.structs.replace(known, mechanism=mechanism)
    return found


def incomplete() -> SetupError:
    """Return the error for a gate that said "ready" before the supervisor could check everything."""
    return _missing("the gate said that it was ready before its walls could be checked")


def shared_network() -> SetupError:
    """Return the error for two sandboxes in one network namespace."""
    return _missing("the sandbox shares its network namespace with another sandbox")


def _missing(what: str) -> SetupError:
    return SetupError(
        f"nothing was run: {what}",
        stage="evidence",
        hint="this is a bug in Stockade or in this kernel; please report it with `stockade doctor --json`",
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
        # Reading the mount table of a gate that has just ended gives EINVAL.
        if error.errno not in (errno.ENOENT, errno.ESRCH, errno.EACCES, errno.EPERM, errno.EINVAL):
            raise
        raise _missing(f"{path} cannot be read: {error.strerror}") from None


def _namespaces(descriptors: tuple[int, ...], plan: ops.Plan) -> dict[str, int]:
    found, wanted = {}, plan.namespaces.names
    if len(descriptors) != len(NAMESPACES):
        raise _missing("the gate did not pass its namespaces")
    for name, descriptor in zip(NAMESPACES, descriptors, strict=True):
        number = found[name] = os.fstat(descriptor).st_ino
        is_new = os.readlink(f"/proc/self/ns/{name}") != f"{name}:[{number}]"
        if is_new != (name in wanted):
            raise _missing(
                f"the sandbox has a {name} namespace of its own, and the plan shares the host's"
                if is_new
                else f"the sandbox is in the host's {name} namespace"
            )
    return found


def _check_helper_report(born: Reply, namespaces: dict[str, int], plan: ops.Plan) -> None:
    """Compare the process and namespaces that bubblewrap reports with those of the gate."""
    try:
        report = msgspec.json.decode(born.text.partition("\n")[0], type=dict[str, int])
    except msgspec.MsgspecError:
        raise _missing("bubblewrap did not report which process it started") from None
    if report.pop("child-pid", 0) != born.status:
        raise _missing("the gate is not the process that bubblewrap started")
    names = {name: namespaces[name] for name in plan.namespaces.names if name != "user"}
    if report != {f"{name}-namespace": number for name, number in names.items()}:
        raise _missing("the gate is not in the namespaces that bubblewrap made")


def _check_overlay(table: bytes, overlay: ops.Overlay) -> None:
    """Check that an overlay that was mounted by path keeps its changes in the plan's layer.

    The gate has compared the lower directory itself, name by name.
    """
    wanted = {"upperdir": f"{overlay.layer}/upper", "workdir": f"{overlay.layer}/work"}
    for line in table.split(b"\n"):
        before, _, after = line.partition(b" - overlay ")
        if after and _unescape(before.split(b" ")[4]) == overlay.path:
            options = dict(option.partition(b"=")[::2] for option in after.split(b" ")[1].split(b","))
            if b"userxattr" not in options:
                raise _missing(f"the overlay on {overlay.path} is mounted without userxattr")
            for name, path in wanted.items():
                if _unescape(options.get(name.encode(), b"")) != HELPERS_ROOT + path:
                    raise _missing(f"the {name} of the overlay on {overlay.path} is not the plan's")
            return
    raise _missing(f"{overlay.path} is not mounted")


def identity(file: str | int) -> tuple[int, int]:
    """Return device and inode of a file, which identify it while it is open."""
    info = os.stat(file)
    return info.st_dev, info.st_ino


def _check_init_privileges(text: bytes, wanted: dict[bytes, bytes], filters_before: int) -> None:
    if text.find(WANTED_STATUS % (*wanted.values(), filters_before + 1)) > 0 and b"\t1\nNSpgid:" in text:
        return
    # Something is wrong, or this kernel writes the lines in another order: check them one by one.
    status = _lines(text)
    _check_privileges(status, filters_before, wanted)
    if not status[b"NSpid"].endswith(b"\t1"):
        raise _missing("the gate is not PID 1 of its PID namespace")


def _lines(status: bytes) -> dict[bytes, bytes]:
    return dict(line.split(b":\t", 1) for line in status.splitlines())


def _check_privileges(status: dict[bytes, bytes], filters_before: int, sets: dict[bytes, bytes]) -> None:
    for name, wanted in sets.items():
        if status[name] != wanted:
            what = "empty" if wanted == NOTHING else wanted.decode()
            raise _missing(f"the capability set {name.decode()} is {status[name].decode()} and not {what}")
    if status[b"NoNewPrivs"] != b"1":
        raise _missing("no_new_privs is not set")
    if status[b"Seccomp"] != b"2" or int(status[b"Seccomp_filters"]) != filters_before + 1:
        raise _missing("the system call filter is not in force")


def _id_maps(process: str, plan: ops.Plan) -> tuple[str, str]:
    if plan.plain:
        return "", ""  # `_namespaces` has just seen that it is in the caller's user namespace
    users, groups = plan.namespaces.maps
    return (
        _id_map(_read(f"{process}/uid_map"), "uid_map", users, os.geteuid(), plan),
        _id_map(_read(f"{process}/gid_map"), "gid_map", groups, os.getegid(), plan),
    )


def _id_map(table: bytes, kind: str, rows: Sequence[tuple[int, int, int]], own: int, plan: ops.Plan) -> str:
    """Check that a map has the plan's rows, or maps every id or the caller's own; return its rows."""
    known = (kind, own, table)
    if known not in plan.verified_maps:
        wanted = sorted(rows) or [(0, 0, 4294967295) if plan.namespaces.every_id else (own, own, 1)]
        # The kernel keeps the rows in an order of its own.
        if sorted(tuple(map(int, line.split())) for line in table.splitlines()) != wanted:
            raise _missing(f"{kind} is not the plan's")
        plan.verified_maps[known] = ", ".join(" ".join(map(str, row)) for row in wanted)
    return plan.verified_maps[known]


def _limits(table: bytes, plan: ops.Plan) -> dict[str, int]:
    """Compare the soft and hard limits of a gate with the plan's."""
    found = {}
    for name, value in plan.limits.items():
        found[name] = value + (RESERVED_TASKS if name == "tasks" else 0)
        if b"%-25s %-20d %-20d " % (LIMITS[name].encode(), found[name], found[name]) not in table:
            raise _missing(f"the gate's limit of {name} is not {found[name]}")
    return found


def _mounts(table: bytes, plan: ops.Plan) -> str:
    """Check that every mount of the plan is in the mount table and nothing else is; return its hash."""
    table = b"\n".join([line.split(b" ", NUMBERS)[-1] for line in table.split(b"\n")])
    # A plan never changes, so a table that matched it once matches it again.
    if table in plan.verified:
        return plan.verified[table]
    seen = set()
    lines = table.split(b"\n")[:-1]
    # Bubblewrap leaves slave mounts as they are, and only root could change that.
    joined = (b" shared:",) if plan.helped and os.geteuid() else (b" shared:", b" master:")
    for line in lines:
        _, path, options, rest = line.split(b" ", 3)
        tags, _, rest = (b" " + rest).partition(b" - ")
        kind, _, superblock = rest.split(b" ", 2)
        seen.add(_check_mount(plan, path, options, kind))
        if kind == b"devpts" and MOST_TERMINALS not in superblock.split(b","):
            raise _missing(f"the number of pseudo-terminals in {_unescape(path)} is not limited")
        if any(tag in tags for tag in joined):
            raise _missing(f"later mounts of the host in {_unescape(path)} would appear in the sandbox")
    if missing := plan.mounts.keys() - seen:
        raise _missing(f"not mounted: {', '.join(sorted(missing))}")
    if len(lines) != len(seen):
        raise _missing("one mount covers another")
    plan.verified[table] = sha256(table).hexdigest()
    return plan.verified[table]


def _check_mount(plan: ops.Plan, escaped: bytes, options: bytes, kind: bytes) -> str:
    """Check that the plan asks for a mount with this type and these options, and return its path."""
    path = _unescape(escaped)
    known = plan.mounts.get(path)
    if known is None:
        # A bind mount of a tree includes the mounts below it, with the same attributes.
        above = [tree for tree, (_, kind) in plan.mounts.items() if not kind and path.startswith(tree + "/")]
        if plan.helped and kind == b"proc" and path.startswith("/proc/"):
            above = ["/proc"]  # bubblewrap bind-mounts parts of /proc over themselves
        if not above:
            raise _missing(f"there is an unexpected mount on {path}")
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
