"""The bwrap backend: bubblewrap makes the namespaces and the mounts, the gate inside does the rest.

It is for users who want the helper that their distribution audits and ships, and for machines where only
bubblewrap may make user namespaces. The same operations describe the same tree, and become arguments of
bubblewrap; every source is a descriptor that Stockade has checked, and so is the filter. Every destination is
in private memory: what belongs into a tree of the host, the usher moves there. Bubblewrap executes the gate
as the first process inside. The gate checks the mounts, puts itself behind Landlock and serves as it
does everywhere.

This backend does not offer what bubblewrap has no arguments for: names hidden in a tree, noexec mounts, one
file system for everything that is written. Before 0.11 bubblewrap has no overlays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

import msgspec

from stockade import state
from stockade.backends import native
from stockade.backends.backend import Backend, Mechanism, PlanInputs
from stockade.backends.mechanisms import LANDLOCK_SCOPES
from stockade.backends.mechanisms import MECHANISMS as NATIVE
from stockade.backends.native import HOSTNAME, Native, inner_names
from stockade.backends.plan_parts import DEVICES, by_process, refuse_multicast, within
from stockade.backends.selection import ControlChoice
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.gate import bwrap_operations
from stockade.gate import operations as ops
from stockade.gate.wire import HELD_STATUS, KIND_HELPED, STAGING
from stockade.host import bubblewrap
from stockade.host.capabilities import Host
from stockade.policy import Policy
from stockade.resolve.resolution import refuse_foreign
from stockade.resolve.resolved import ResolvedPolicy, UnnamedTrees

#: The operations that show a tree of the host.
HOST_TREES = (ops.Bind, ops.View, ops.Overlay)
#: Characters that the options of a mount escape or split at, so that a path does not read back as it was.
UNSPEAKABLE = ",:\\ \t\n"


def _files(host: Host) -> str:
    return f"mount namespace and root by bubblewrap, Landlock ABI {host.landlock}"


def _ipc(host: Host) -> str:
    scopes = ", Landlock scopes" if host.landlock >= LANDLOCK_SCOPES else ""
    return f"ipc namespace{scopes}"


MECHANISMS: Mapping[Control, Mechanism] = {
    Control.FILES: Mechanism(_files),
    Control.PROTECT: NATIVE[Control.PROTECT],
    Control.DENY: Mechanism(never="bubblewrap cannot hide a name in a tree that it shows"),
    Control.EXEC: Mechanism(never="bubblewrap cannot keep what is writable from being executed"),
    Control.WORKSPACE_OVERLAY: Mechanism("overlayfs with userxattr, by bubblewrap", ("bwrap.overlay",)),
    Control.NETWORK_NONE: Mechanism("own network namespace"),
    Control.NETWORK_RULES: NATIVE[Control.NETWORK_RULES],
    Control.NETWORK_HTTP: NATIVE[Control.NETWORK_HTTP],
    Control.SECRETS: NATIVE[Control.SECRETS],
    Control.PROCESSES: Mechanism("pid namespace"),
    Control.IPC: Mechanism(_ipc),
    Control.SYSCALLS: Mechanism("seccomp filter, loaded by bubblewrap"),
    Control.PRIVILEGES: Mechanism("user namespace without others in it, no capabilities, no_new_privs"),
    Control.ENVIRONMENT: NATIVE[Control.ENVIRONMENT],
    Control.DEVICES: NATIVE[Control.DEVICES],
    Control.TERMINAL: NATIVE[Control.TERMINAL],
    Control.LIMITS_MEMORY: NATIVE[Control.LIMITS_MEMORY],
    Control.LIMITS_TASKS: Mechanism(
        "RLIMIT_NPROC in the user namespace",
        ("bwrap.nproc",),
        optional=True,
        otherwise=Mechanism("pids cgroup", ("cgroup.pids",)),
    ),
    Control.LIMITS_CPU: NATIVE[Control.LIMITS_CPU],
    Control.LIMITS_CPU_TIME: NATIVE[Control.LIMITS_CPU_TIME],
    Control.LIMITS_WALL: NATIVE[Control.LIMITS_WALL],
    Control.LIMITS_OUTPUT: NATIVE[Control.LIMITS_OUTPUT],
    Control.LIMITS_FILES: NATIVE[Control.LIMITS_FILES],
    Control.LIMITS_DISK: Mechanism(
        never="bubblewrap has no one file system of a given size for all that a program writes"
    ),
    Control.LIMITS_NETWORK: NATIVE[Control.LIMITS_NETWORK],
    Control.CLEANUP: Mechanism("pid namespace, --die-with-parent, pidfd of the supervisor"),
}


class Bwrap(Backend):
    """Namespaces and mounts by bubblewrap; Landlock, limits and programs by the gate inside."""

    name: ClassVar[str] = "bwrap"
    system: ClassVar[str] = "linux"
    foundation = ("bwrap", "landlock", "seccomp", "pidfd")
    mechanisms = MECHANISMS
    helped = True
    observed: ClassVar[Mapping[Control, str]] = {
        Control.SYSCALLS: "filter count read from the kernel, its bytes handed to bubblewrap, and a refused "
        "call by the gate",
    }

    @classmethod
    def plan(cls, given: PlanInputs) -> ops.Plan:
        return compile_plan(inputs(given))

    @classmethod
    def resident(cls, policy: Policy) -> str:
        return KIND_HELPED

    @classmethod
    def home(cls, resolved: ResolvedPolicy, scratch: str) -> str:
        return Native.home(resolved, scratch)

    @classmethod
    def unnamed_trees(cls, policy: Policy) -> UnnamedTrees:
        return UnnamedTrees(shown=bubblewrap.has_overlays(), hiding=False)

    @classmethod
    def adjusted(
        cls, policy: Policy, controls: Mapping[Control, ControlChoice]
    ) -> Mapping[Control, ControlChoice]:
        return Native.adjusted(policy, controls)


class BwrapInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on: the inputs of a native plan, and the helper."""

    wanted: native.NativeInputs
    program: str
    version: str
    #: An empty directory: a read-only overlay needs two lower directories.
    empty: str


def inputs(given: PlanInputs) -> BwrapInputs:
    """Return the value that a plan is compiled from; refuse what bubblewrap cannot do."""
    resolved = given.resolved
    refuse_multicast(given.resolved.policy, "bubblewrap makes the network")
    wanted = native.inputs(given)
    program, version = bubblewrap.which()
    _refuse_hiding(wanted)
    if wanted.alone:
        raise PolicyError(
            f"{wanted.alone[0]}: bubblewrap cannot show it without the file systems that are mounted in it",
            hint='use the native backend, or `--mode rw` (workspace.mode = "rw")',
        )
    _refuse_landlock_denied(resolved.policy)
    if resolved.workspace is not None and resolved.workspace.access == "overlay":
        refuse_foreign(resolved.workspace, resolved.caller, 'use backend = "native" as root')
        if any(char in given.layer for char in UNSPEAKABLE):
            raise PolicyError(
                f"bubblewrap cannot mount an overlay from {given.layer}: the path has special characters",
                hint="set STOCKADE_HOME to a path without commas, colons, backslashes and spaces",
            )
    empty = "/empty"
    if views := [grant for grant in wanted.grants if _is_view(wanted, grant)]:
        if not bubblewrap.has_overlays():
            raise PolicyError(
                f"{views[0][3]}: {version} cannot show a directory without the sockets in it",
                hint='use bubblewrap 0.11, or write accept = ["ipc"] to let sockets in it be reached',
            )
        if given.state:
            empty = _empty(given.state)
    return BwrapInputs(wanted, program, version, empty)


def _is_view(wanted: native.NativeInputs, grant: tuple[str, str, bool, str]) -> bool:
    path, access, is_dir, _ = grant
    shown = {shown.path for shown in wanted.system if not shown.link}
    return access == "read" and is_dir and not wanted.sockets and path not in shown


def _empty(home: str) -> str:
    path = os.path.join(state.cache(state.ensure(home)), "empty")
    try:
        os.mkdir(path, 0o500)
    except FileExistsError:
        pass
    except OSError as error:
        raise state.unusable(path, error) from None
    return path


def _refuse_hiding(wanted: native.NativeInputs) -> None:
    """Refuse trees that contain a denied path: bubblewrap cannot hide anything in a tree."""
    trees = [(path, path, clause) for path, _, _, clause in wanted.grants]
    trees += [(shown.path, shown.source, "profile") for shown in wanted.system if shown.source]
    for path, source, clause in trees:
        for _, hidden in inner_names(path, source, wanted.denied):
            if os.path.lexists(hidden):
                raise PolicyError(
                    f"{clause}: bubblewrap cannot hide {hidden} in it",
                    hint="use the native backend, or --no-toolchain",
                )


def _refuse_landlock_denied(policy: Policy) -> None:
    for name in policy.syscalls.deny:
        if name.startswith("landlock_"):
            raise PolicyError(
                f"syscalls.deny: the gate needs {name!r} to raise its wall behind bubblewrap's filter",
                hint="remove it, or use the native backend",
            )


@lru_cache(maxsize=64)
def compile_plan(given: BwrapInputs) -> ops.Plan:
    """Return the operations that enforce the policy, and the arguments of bubblewrap."""
    wanted = given.wanted
    names = [name for name in ops.NAMESPACES if name != "net" or wanted.own_network]
    helper = bwrap_operations.Helper(program=given.program, version=given.version, arguments=())
    plan: list[ops.Op] = [
        ops.Namespaces(names=tuple(names), every_id=False, helper=given.version),
        helper,
        *native.cgroup_entries(wanted),
        ops.Hostname(name=HOSTNAME),
        ops.Root(),
        *_with_parents(_tree(wanted)),
        ops.Pivot(),
        ops.Keyring(),
        ops.Limit(resource="core", value=0),
        ops.Limit(resource="files", value=wanted.files, clause=f"limits.files = {wanted.files}"),
        *native.task_limit(wanted),
        *by_process(wanted.memory, wanted.cpu_time),
        ops.Privileges(),
        *native.landlock_rules(wanted),
        ops.Seccomp(program=wanted.program, clause="syscalls"),
    ]
    plan[1] = msgspec.structs.replace(
        helper,
        arguments=arguments(tuple(plan), wanted.uid, wanted.gid),
        layer=wanted.layer,
        empty=given.empty,
    )
    return ops.Plan("bwrap", 0, tuple(plan))


def _tree(wanted: native.NativeInputs) -> list[ops.Op]:
    """Return the file tree: devices, the system, private directories, then the grants."""
    # Root owns the host's device nodes, so for root they are read-only; no one else may change them anyway.
    found: list[ops.Op] = [bwrap_operations.Devices(names=DEVICES, readonly=wanted.uid == 0)]
    # A grant in /etc replaces what would be at its path and below it.
    granted = [path for path, *_ in wanted.grants if path.startswith("/etc/")]
    for shown in wanted.system:
        if any(within(shown.path, path) for path in granted if path != shown.path):
            continue
        found.append(
            ops.Symlink(path=shown.path, target=shown.link, clause="profile")
            if shown.link
            else ops.Bind(path=shown.path, source=shown.source, clause="profile")
        )
    taken = {shown.path for shown in wanted.system}
    found += [
        ops.File(path=path, content=content)
        for path, content in native.etc_files(wanted).items()
        if path not in taken and not any(within(path, grant) for grant in granted)
    ]
    scratch = native.scratch_places(wanted)
    if not any(within("/var/tmp", path) for path in (*scratch, *(path for path, *_ in wanted.grants))):
        found.append(ops.Symlink(path="/var/tmp", target="/tmp"))
    found += [ops.ScratchMount(path=path, mode=mode) for path, mode in scratch.items()]
    found += native.toolchain_links(wanted, scratch)
    found += native.own_policy(wanted)
    found += [
        msgspec.structs.replace(op, bare=True) if isinstance(op, ops.Overlay) else op
        for op in native.shown_grants(wanted)
    ]
    found += native.trust_mounts(wanted)
    found.append(ops.Proc())
    return [*found, *_places(found)]


def _places(tree: list[ops.Op]) -> list[ops.Op]:
    """Return the moves of the mounts that lie in a tree of the host.

    Other programs may write there, and bubblewrap would follow a link on the way.
    """
    hosts: list[str] = []
    found: list[ops.Op] = []
    for op in tree:
        if isinstance(op, HOST_TREES):
            if any(within(op.path, host) for host in hosts):
                found.append(bwrap_operations.Placement(path=op.path, number=len(found), clause=op.clause))
            hosts.append(op.path)
    return found


def _with_parents(tree: list[ops.Op]) -> list[ops.Op]:
    """Add the directories above each operation's path, except in trees of the host."""
    found: list[ops.Op] = []
    there = {"/", "/dev", "/dev/pts"}
    hosts: list[str] = []
    for op in tree:
        path = getattr(op, "path", "/")
        above = os.path.dirname(path)
        missing = []
        while above not in there and not any(within(above, host) for host in hosts):
            missing.append(above)
            above = os.path.dirname(above)
        found += [ops.Dir(path=directory) for directory in reversed(missing)]
        found.append(op)
        there.update((path, *missing))
        if isinstance(op, HOST_TREES):
            hosts.append(path)
    return found


def arguments(plan: tuple[ops.Op, ...], uid: int, gid: int) -> tuple[str, ...]:
    """Return a plan as arguments of bubblewrap. Descriptors have the numbers that the usher gives them."""
    numbers = bwrap_operations.held(plan)
    names = next(op for op in plan if isinstance(op, ops.Namespaces)).names
    words = [*bubblewrap.WALLS, *(["--unshare-net"] if "net" in names else [])]
    words += ["--uid", str(uid), "--gid", str(gid), "--json-status-fd", str(HELD_STATUS)]
    staged = {op.path: op.staged for op in plan if isinstance(op, bwrap_operations.Placement)}
    for number, op in enumerate(plan):
        words += _arguments_of(_staged(op, staged), str(numbers.get(number, "")))
        if staged and isinstance(op, bwrap_operations.Devices):
            words += ["--tmpfs", STAGING]
    return (*words, "--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/")


def _staged(op: ops.Op, staged: Mapping[str, str]) -> ops.Op:
    """Return an operation with the path at which bubblewrap executes it."""
    if isinstance(op, HOST_TREES) and op.path in staged:
        return msgspec.structs.replace(op, path=staged[op.path])
    return op


def _arguments_of(op: ops.Op, held: str) -> list[str]:
    match op:
        case ops.Hostname(name=name):
            return ["--hostname", name]
        case bwrap_operations.Devices(path=path):
            return ["--dev", path]
        case ops.Dir(path=path, mode=mode):
            return ["--perms", f"{mode:04o}", "--dir", path]
        case ops.File(path=path, mode=mode):
            return ["--perms", f"{mode:04o}", "--file", held, path]
        case ops.Symlink(path=path, target=target):
            return ["--symlink", target, path]
        case ops.Bind(path=path, writable=writable):
            return ["--bind-fd" if writable else "--ro-bind-fd", held, path]
        case ops.ScratchMount(path=path, mode=mode):
            return ["--perms", f"{mode:04o}", "--tmpfs", path]
        case ops.View(path=path):
            below = ["--overlay-src", "{empty}", "--overlay-src", f"/proc/self/fd/{held}"]
            return [*below, "--ro-overlay", path, "--remount-ro", path]
        case ops.Overlay(path=path):
            return [
                "--overlay-src",
                f"/proc/self/fd/{held}",
                "--overlay",
                "{layer}/upper",
                "{layer}/work",
                path,
            ]
        case ops.Proc(path=path):
            return ["--proc", path]
        case ops.Seccomp():
            return ["--seccomp", held]
    return []
