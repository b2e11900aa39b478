"""The bwrap backend: bubblewrap makes the namespaces and the mounts, the gate inside does the rest.

For those who want the helper that their distribution audits and ships, and for
machines where it is the only program that may make user namespaces. The same
tree, described by the same operations, is told to bubblewrap as arguments;
every source by a descriptor that was judged, the filter by another. The gate,
which it executes as the first process inside, looks at what was made, puts
itself behind Landlock and serves as it does everywhere.

What bubblewrap has no words for is not offered: names that are hidden in a
tree, mounts from which nothing is executed, one file system for all that is
written. Before 0.11 it has no overlays.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

import msgspec

from stockade import state
from stockade.backends import native
from stockade.backends.base import Backend, Given, Mechanism
from stockade.backends.native import HOSTNAME, Native, inner_names
from stockade.backends.native_offers import LANDLOCK_SCOPES
from stockade.backends.native_offers import MECHANISMS as NATIVE
from stockade.backends.select import Selected
from stockade.backends.shared import DEVICES, by_process, within
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.gate import helper
from stockade.gate import plan as ops
from stockade.gate.client import HELPED
from stockade.host import bubblewrap
from stockade.host.model import Host
from stockade.policy import Policy, Resolved
from stockade.policy.resolve import refuse_foreign

#: The descriptor on which bubblewrap says whom it has started: HELD_STATUS in gate.h.
STATUS = 9
#: What the options of a mount are written with, so that a path is not read back as it was.
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
    def plan(cls, given: Given) -> ops.Plan:
        return compile_plan(inputs(given))

    @classmethod
    def resident(cls, policy: Policy) -> str:
        return HELPED

    @classmethod
    def home(cls, resolved: Resolved, scratch: str) -> str:
        return Native.home(resolved, scratch)

    @classmethod
    def adjusted(cls, policy: Policy, controls: Mapping[Control, Selected]) -> Mapping[Control, Selected]:
        return Native.adjusted(policy, controls)


class Inputs(msgspec.Struct, frozen=True):
    """All that a plan depends on: what a native one does, and the helper."""

    wanted: native.Inputs
    program: str
    version: str
    #: An empty directory: an overlay that only shows has two below it.
    empty: str


def inputs(given: Given) -> Inputs:
    """The value that a plan is compiled from."""
    resolved = given.resolved
    wanted = native.inputs(given)
    program, version = bubblewrap.which()
    _refuse_hiding(wanted)
    if wanted.alone:
        raise PolicyError(
            f"{wanted.alone[0]}: bubblewrap cannot show it without the file systems that are mounted in it",
            hint='use the native backend, or workspace.mode = "rw"',
        )
    _refuse_landlock_denied(resolved.policy)
    if resolved.workspace is not None and resolved.workspace.access == "overlay":
        refuse_foreign(resolved.workspace, resolved.caller, 'use backend = "native" as root')
        if any(char in given.layer for char in UNSPEAKABLE):
            raise PolicyError(
                f"bubblewrap cannot keep changes in {given.layer}", hint="set STOCKADE_HOME to a plain path"
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
    return Inputs(wanted, program, version, empty)


def _is_view(wanted: native.Inputs, grant: tuple[str, str, bool, str]) -> bool:
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


def _refuse_hiding(wanted: native.Inputs) -> None:
    """Nothing can be hidden in what is shown: a tree with something to hide is not shown at all."""
    trees = [(path, path, clause) for path, _, _, clause in wanted.grants]
    trees += [(shown.path, shown.source, "profile") for shown in wanted.system if shown.source]
    for path, source, clause in trees:
        for _, hidden in inner_names(path, source, wanted.denied):
            if os.path.lexists(hidden):
                raise PolicyError(
                    f"{clause}: {hidden} would have to be hidden in it, and bubblewrap cannot",
                    hint="use the native backend, or --no-toolchain",
                )


def _refuse_landlock_denied(policy: Policy) -> None:
    for name in policy.syscalls.deny:
        if name.startswith("landlock_"):
            raise PolicyError(
                f"syscalls.deny: {name!r} is how the gate raises its wall behind bubblewrap's filter",
                hint="remove it, or use the native backend",
            )


@lru_cache(maxsize=64)
def compile_plan(given: Inputs) -> ops.Plan:
    """The operations that enforce the policy, and what of them bubblewrap is told."""
    wanted = given.wanted
    names = [name for name in ops.NAMESPACES if name != "net" or wanted.own_network]
    told = helper.Helper(program=given.program, version=given.version, arguments=())
    plan: list[ops.Op] = [
        ops.Namespaces(names=tuple(names), every_id=False, helper=given.version),
        told,
        *native.cgroup_entries(wanted),
        ops.Hostname(name=HOSTNAME),
        ops.Root(),
        *_placed(_tree(wanted)),
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
        told, arguments=arguments(tuple(plan), wanted.uid, wanted.gid), layer=wanted.layer, empty=given.empty
    )
    return ops.Plan("bwrap", 0, tuple(plan))


def _tree(wanted: native.Inputs) -> list[ops.Op]:
    """The file tree: devices, the system, what is private, then what is granted."""
    # To root, who owns the host's nodes, they are read-only; nobody else may change them.
    found: list[ops.Op] = [helper.Devices(names=DEVICES, readonly=wanted.uid == 0)]
    for shown in wanted.system:
        found.append(
            ops.Link(path=shown.path, target=shown.link, clause="profile")
            if shown.link
            else ops.Bind(path=shown.path, source=shown.source, clause="profile")
        )
    taken = {shown.path for shown in wanted.system}
    found += [
        ops.File(path=path, content=content)
        for path, content in native.etc_files(wanted).items()
        if path not in taken
    ]
    scratch = native.scratch_places(wanted)
    if not any(within("/var/tmp", path) for path in (*scratch, *(path for path, *_ in wanted.grants))):
        found.append(ops.Link(path="/var/tmp", target="/tmp"))
    found += [ops.Scratch(path=path, mode=mode) for path, mode in scratch.items()]
    found += native.toolchain_links(wanted, scratch)
    found += [
        msgspec.structs.replace(op, bare=True) if isinstance(op, ops.Overlay) else op
        for op in native.shown_grants(wanted)
    ]
    return [*found, ops.Proc()]


def _placed(tree: list[ops.Op]) -> list[ops.Op]:
    """The same with the directories that lead to each; in what is the host's nothing is made."""
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
        if isinstance(op, ops.Bind | ops.View | ops.Overlay):
            hosts.append(path)
    return found


def arguments(plan: tuple[ops.Op, ...], uid: int, gid: int) -> tuple[str, ...]:
    """A plan as bubblewrap is told it. Descriptors have the numbers that the usher gives them."""
    numbers = helper.held(plan)
    names = next(op for op in plan if isinstance(op, ops.Namespaces)).names
    told = [*bubblewrap.WALLS, *(["--unshare-net"] if "net" in names else [])]
    told += ["--uid", str(uid), "--gid", str(gid), "--json-status-fd", str(STATUS)]
    for number, op in enumerate(plan):
        told += _told(op, str(numbers.get(number, "")))
    return (*told, "--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/")


def _told(op: ops.Op, held: str) -> list[str]:
    match op:
        case ops.Hostname(name=name):
            return ["--hostname", name]
        case helper.Devices(path=path):
            return ["--dev", path]
        case ops.Dir(path=path, mode=mode):
            return ["--perms", f"{mode:04o}", "--dir", path]
        case ops.File(path=path, mode=mode):
            return ["--perms", f"{mode:04o}", "--file", held, path]
        case ops.Link(path=path, target=target):
            return ["--symlink", target, path]
        case ops.Bind(path=path, writable=writable):
            return ["--bind-fd" if writable else "--ro-bind-fd", held, path]
        case ops.Scratch(path=path, mode=mode):
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
