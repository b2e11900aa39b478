"""The landlock backend: walls without namespaces, for hosts and containers that refuse namespaces.

The gate puts itself, and so everything that it starts, behind Landlock and the filter. It stays in the
host's own file tree, among the host's processes. A program can open only what is granted, and the filter
refuses what Landlock does not check. But a program can look up names, it shares /tmp with the host, and
nothing can be mounted over anything: the backend does not offer controls that need that.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

import msgspec

from stockade.backends.backend import Backend, Mechanism, PlanInputs
from stockade.backends.mechanisms import MECHANISMS as NATIVE
from stockade.backends.plan_parts import (
    DEVICES,
    EXECUTE,
    IOCTL_DEVICE,
    MAKE_BLOCK,
    MAKE_CHAR,
    OF_FILES,
    READ_DIR,
    READ_FILE,
    READING,
    SCOPES,
    WRITE_FILE,
    SystemPath,
    by_process,
    cpu_seconds,
    handled_rights,
    refuse_hiding,
    refuse_multicast,
    refuse_taking_away,
    system_layout,
)
from stockade.backends.seccomp import syscalls
from stockade.controls import Control
from stockade.gate import operations as ops
from stockade.gate.wire import KIND_PLAIN
from stockade.policy import Policy
from stockade.resolve.paths.protected_paths import refuse_repositories
from stockade.resolve.resolved import ResolvedPolicy, UnnamedTrees

TCP = 0b11  # bind, connect
#: Files of /etc besides those of the profile. Other backends make them; here they are the host's.
ETC = ("passwd?", "group?", "nsswitch.conf?", "hosts?")
RESOLVER = ("resolv.conf?", "gai.conf?", "host.conf?")
#: The parts of /proc that reveal nothing about a process.
FIGURES = tuple(
    f"/proc/{name}"
    for name in ("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "filesystems", "sys")
)
DEVICE_FILES = tuple(f"/dev/{name}" for name in DEVICES)
#: Where the gate makes terminals. The caller's are there as well, so programs cannot open any.
TERMINALS = ("/dev/ptmx", "/dev/pts")
READ_ONLY_WORDS, CHANGING_WORDS = "read and execute", "read, execute and write"

FILES = (
    "nothing outside the grants can be opened, made, removed or changed, but that names exist, their sizes, "
    "owners and times can be learned; /etc/passwd is the host's, /tmp is not granted, and the time of a file "
    "that can be read can be set to now"
)

MECHANISMS: Mapping[Control, Mechanism] = {
    Control.FILES: Mechanism(
        never="without a mount namespace the names, sizes, owners and times of all files can be looked up",
        optional=True,
        weaker=FILES,
    ),
    Control.DENY: Mechanism(never="Landlock cannot hide a part of a granted directory"),
    Control.PROTECT: Mechanism(
        never="Landlock cannot make a part of a writable directory read-only", optional=True
    ),
    Control.EXEC: Mechanism(
        never="without mounts of its own, what is writable cannot be kept from being executed"
    ),
    Control.WORKSPACE_OVERLAY: Mechanism(never="without a mount namespace there is no overlay"),
    Control.NETWORK_NONE: Mechanism("no sockets but unnamed pairs by the filter; TCP refused by Landlock"),
    Control.NETWORK_RULES: Mechanism(
        never="without a network namespace connections cannot be led through a process that decides"
    ),
    Control.NETWORK_HTTP: Mechanism(
        never="without a network namespace connections cannot be led through a process that decides"
    ),
    Control.SECRETS: Mechanism(never="there is no egress process that could hold them"),
    Control.PROCESSES: Mechanism(
        never="without a pid namespace it can be learned that other processes exist",
        optional=True,
        weaker="none but those of the same run can be signalled, none traced, and their memory, words and "
        "files not read; that a number is taken, and of it owner, group, session, capabilities, priority, "
        "processors and numbers of descriptors, can be learned",
    ),
    Control.IPC: Mechanism("no System V objects, queues or named sockets by the filter, Landlock scopes"),
    Control.SYSCALLS: NATIVE[Control.SYSCALLS],
    Control.PRIVILEGES: Mechanism("no capabilities, no_new_privs"),
    Control.ENVIRONMENT: NATIVE[Control.ENVIRONMENT],
    Control.DEVICES: Mechanism(
        never="without mounts of its own, a device file in a granted directory can be opened",
        optional=True,
        weaker="of /dev only null, zero, full, random, urandom and tty; none can be made, terminals neither",
    ),
    Control.TERMINAL: NATIVE[Control.TERMINAL],
    Control.LIMITS_MEMORY: NATIVE[Control.LIMITS_MEMORY],
    Control.LIMITS_TASKS: Mechanism("pids cgroup", ("cgroup.pids",), optional=True),
    Control.LIMITS_CPU: NATIVE[Control.LIMITS_CPU],
    Control.LIMITS_CPU_TIME: NATIVE[Control.LIMITS_CPU_TIME],
    Control.LIMITS_WALL: NATIVE[Control.LIMITS_WALL],
    Control.LIMITS_OUTPUT: NATIVE[Control.LIMITS_OUTPUT],
    Control.LIMITS_FILES: NATIVE[Control.LIMITS_FILES],
    Control.LIMITS_DISK: Mechanism(
        never="without a mount namespace there is no private file system to bound"
    ),
    Control.LIMITS_NETWORK: Mechanism(
        never="without a network namespace no process is between the program and the network to count"
    ),
    Control.CLEANUP: Mechanism(
        "two subreapers that end everything when either dies, by a signal to the whole Landlock domain; "
        "pidfd of the supervisor"
    ),
}


class LandlockBackend(Backend):
    """Landlock, seccomp and rlimits, through the gate and without namespaces."""

    name: ClassVar[str] = "landlock"
    system: ClassVar[str] = "linux"
    foundation = ("landlock", "scopes", "seccomp", "pidfd")
    mechanisms = MECHANISMS
    observed: ClassVar[Mapping[Control, str]] = {
        Control.NETWORK_NONE: "filter as for syscalls",
        Control.IPC: "filter as for syscalls, a signal that Landlock refuses tried by the gate",
        Control.PRIVILEGES: "capability sets and no_new_privs read from the kernel",
        Control.CLEANUP: "parents read from the kernel, process held by pidfd",
    }
    scratch = True
    copies = True

    @classmethod
    def unnamed_trees(cls, policy: Policy) -> UnnamedTrees:
        return UnnamedTrees(hiding=False)

    @classmethod
    def plan(cls, given: PlanInputs) -> ops.Plan:
        return compile_plan(inputs(given))

    @classmethod
    def resident(cls, policy: Policy) -> str:
        return KIND_PLAIN

    @classmethod
    def home(cls, resolved: ResolvedPolicy, scratch: str) -> str:
        return scratch


class LandlockInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on."""

    files: int
    landlock: int
    program: bytes
    own_network: bool
    #: The real paths of the system's trees and files, of devices, terminals and parts of /proc.
    system: tuple[SystemPath, ...]
    devices: tuple[str, ...]
    terminals: tuple[str, ...]
    figures: tuple[SystemPath, ...]
    #: path, access, is_dir, clause; in the order of their descriptors, the private directory's after them
    grants: tuple[tuple[str, str, bool, str], ...]
    memory: int = 0
    cpu_time: int = 0
    groups: tuple[tuple[int, ...], str] = ((), "")


def inputs(given: PlanInputs) -> LandlockInputs:
    """Return the value that a plan is compiled from; refuse what Landlock cannot do."""
    resolved, selection = given.resolved, given.selection
    policy, limits = resolved.policy, resolved.limits
    grants = [*resolved.grants, *((resolved.workspace,) if resolved.workspace is not None else ())]
    refuse_taking_away(grants, LandlockBackend.name)
    refuse_hiding(grants, resolved.denied)
    if Control.PROTECT not in policy.accept:
        refuse_repositories(resolved, LandlockBackend.name)
    refuse_multicast(policy, "without namespaces there is only the host's")
    own = policy.net != "open"
    names = (*resolved.profile.etc, *ETC, *(() if own else RESOLVER))
    return LandlockInputs(
        files=given.files,
        landlock=given.landlock,
        program=syscalls.program(
            policy.syscalls.allow,
            policy.syscalls.deny,
            given.state,
            syscalls.FilterKey(alone=True, network=not own),
        ),
        own_network=own,
        system=tuple(shown for shown in system_layout(resolved.profile.system, names) if shown.source),
        # Real paths: the gate follows no links, and on some systems /dev/ptmx is one.
        devices=tuple(os.path.realpath(path) for path in DEVICE_FILES if os.path.exists(path)),
        terminals=tuple(os.path.realpath(path) for path in TERMINALS if os.path.exists(path)),
        figures=tuple(
            SystemPath(path, is_dir=os.path.isdir(path)) for path in FIGURES if os.path.exists(path)
        ),
        grants=tuple((g.path, g.access, g.is_dir, g.clause) for g in grants),
        memory=(limits.memory or 0) if Control.LIMITS_MEMORY in selection.by_process else 0,
        cpu_time=cpu_seconds(limits) if Control.LIMITS_CPU_TIME in selection.by_process else 0,
        groups=given.groups,
    )


@lru_cache(maxsize=64)
def compile_plan(given: LandlockInputs) -> ops.Plan:
    """Return the operations that enforce the policy, in the only order that the gate accepts."""
    versions, words = given.groups
    first = len(given.grants) + 3  # after the private directory and the one of the policy
    return ops.Plan(
        "landlock",
        0,
        (
            ops.Namespaces(names=(), every_id=False),
            *(
                ops.JoinCgroup(version=version, descriptor=first + number, limits=words, clause="limits")
                for number, version in enumerate(versions)
            ),
            ops.Limit(resource="core", value=0),
            ops.Limit(resource="files", value=given.files, clause=f"limits.files = {given.files}"),
            *by_process(given.memory, given.cpu_time),
            ops.Privileges(),
            *_rights(given),
            ops.Seccomp(program=given.program, clause="syscalls"),
        ),
    )


USING = READ_FILE | WRITE_FILE | IOCTL_DEVICE


def _rights(given: LandlockInputs) -> list[ops.Op]:
    found = of_system(given)
    # The gate finds the processes of a run through it. The wall around programs does not grant it.
    found.append(ops.BindGrant(path="/proc", rights=READ_FILE | READ_DIR, words="read", gate=True))
    found += [
        ops.BindGrant(path=path, rights=USING, words="make terminals", gate=True) for path in given.terminals
    ]
    found += of_policy(given)
    # The path is a placeholder for the descriptor: each sandbox has another directory.
    found.append(
        ops.BindGrant(
            path="/scratch",
            rights=_writing(given),
            words=f"{CHANGING_WORDS}; the private home",
            grant=len(given.grants) + 1,
        )
    )
    found.append(
        ops.BindGrant(
            path="/policy",
            rights=READ_FILE | READ_DIR,
            words="read; the files that describe the policy",
            grant=len(given.grants) + 2,
        )
    )
    return found


def of_system(given: LandlockInputs) -> list[ops.Op]:
    """Return the ruleset, and the rules that every policy has."""
    found: list[ops.Op] = [
        ops.LandlockRules(
            files=handled_rights(given.landlock),
            network=TCP if given.own_network else 0,
            scopes=SCOPES,
            clause="files, ipc, network",
        )
    ]
    found += [
        ops.BindGrant(
            path=shown.source, rights=_of(READING, shown.is_dir), words=READ_ONLY_WORDS, clause="profile"
        )
        for shown in given.system
    ]
    found += [ops.BindGrant(path=path, rights=USING, words="use the device") for path in given.devices]
    found += [
        ops.BindGrant(path=shown.path, rights=_of(READING & ~EXECUTE, shown.is_dir), words="read")
        for shown in given.figures
    ]
    return found


def of_policy(given: LandlockInputs) -> list[ops.Op]:
    """Return the rules for the grants of the policy."""
    found: list[ops.Op] = []
    for number, (path, access, is_dir, clause) in enumerate(given.grants, 1):
        rights, words = (READING, READ_ONLY_WORDS) if access == "read" else (_writing(given), CHANGING_WORDS)
        found.append(
            ops.BindGrant(path=path, rights=_of(rights, is_dir), words=words, grant=number, clause=clause)
        )
    return found


def _writing(given: LandlockInputs) -> int:
    return handled_rights(given.landlock) & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEVICE)


def _of(rights: int, is_dir: bool) -> int:
    return rights if is_dir else rights & OF_FILES
