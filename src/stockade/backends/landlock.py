"""The landlock backend: walls without namespaces, for hosts and containers that refuse them.

The gate puts itself, and so everything it starts, behind Landlock and the
filter, where it stands: in the host's own file tree, among the host's
processes. What is not granted cannot be opened, and the filter takes away
what Landlock does not look at. But names can be looked up, there is one /tmp,
and nothing can be laid over anything: what needs that is not offered.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

import msgspec

from stockade.backends import syscalls
from stockade.backends.base import Backend, Given, Mechanism
from stockade.backends.native_offers import MECHANISMS as NATIVE
from stockade.backends.shared import (
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
    Shown,
    by_process,
    cpu_seconds,
    handled_rights,
    refuse_hiding,
    refuse_taking_away,
    system_layout,
)
from stockade.controls import Control
from stockade.gate import plan as ops
from stockade.gate.client import PLAIN
from stockade.policy import Policy, Resolved

TCP = 0b11  # bind, connect
#: Of /etc, besides what the profile names. Elsewhere they are made for the sandbox; here they are the host's.
ETC = ("passwd?", "group?", "nsswitch.conf?", "hosts?")
RESOLVER = ("resolv.conf?", "gai.conf?", "host.conf?")
#: Of /proc, what tells nothing about a process.
FIGURES = tuple(
    f"/proc/{name}"
    for name in ("cpuinfo", "meminfo", "stat", "loadavg", "uptime", "version", "filesystems", "sys")
)
DEVICE_FILES = tuple(f"/dev/{name}" for name in DEVICES)
#: Where the gate makes terminals. Those of the caller are there as well, so programs can open none.
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
    Control.DENY: Mechanism(never="Landlock cannot take away below a directory what it gives above"),
    Control.PROTECT: Mechanism(
        never="Landlock cannot take away below a directory what it gives above", optional=True
    ),
    Control.EXEC: Mechanism(
        never="without mounts of its own, what is writable cannot be kept from being executed"
    ),
    Control.WORKSPACE_OVERLAY: Mechanism(never="without a mount namespace there is no overlay"),
    Control.NETWORK_NONE: Mechanism("no sockets but unnamed pairs by the filter; TCP refused by Landlock"),
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
    Control.CLEANUP: Mechanism(
        "two subreapers that end everything when either dies, by a signal to the whole Landlock domain; "
        "pidfd of the supervisor"
    ),
}


class Landlock(Backend):
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
    def plan(cls, given: Given) -> ops.Plan:
        return compile_plan(inputs(given))

    @classmethod
    def resident(cls, policy: Policy) -> str:
        return PLAIN

    @classmethod
    def home(cls, resolved: Resolved, scratch: str) -> str:
        return scratch


class Inputs(msgspec.Struct, frozen=True):
    """All that a plan depends on."""

    files: int
    landlock: int
    program: bytes
    own_network: bool
    #: Real names of the system's trees and files, those of /dev and those of /proc.
    system: tuple[Shown, ...]
    devices: tuple[str, ...]
    terminals: tuple[str, ...]
    figures: tuple[Shown, ...]
    #: path, access, is_dir, clause; in the order of their descriptors, the private directory's after them
    grants: tuple[tuple[str, str, bool, str], ...]
    memory: int = 0
    cpu_time: int = 0
    groups: tuple[tuple[int, ...], str] = ((), "")


def inputs(given: Given) -> Inputs:
    """The value that a plan is compiled from."""
    resolved, selection = given.resolved, given.selection
    policy, limits = resolved.policy, resolved.limits
    grants = [*resolved.grants, *((resolved.workspace,) if resolved.workspace is not None else ())]
    refuse_taking_away(grants, Landlock.name)
    refuse_hiding(grants, resolved.denied)
    own = policy.net != "open"
    names = (*resolved.profile.etc, *ETC, *(() if own else RESOLVER))
    return Inputs(
        files=given.files,
        landlock=given.landlock,
        program=syscalls.program(
            policy.syscalls.allow,
            policy.syscalls.deny,
            given.state,
            syscalls.Kind(alone=True, network=not own),
        ),
        own_network=own,
        system=tuple(shown for shown in system_layout(resolved.profile.system, names) if shown.source),
        devices=tuple(path for path in DEVICE_FILES if os.path.exists(path)),
        terminals=tuple(path for path in TERMINALS if os.path.exists(path)),
        figures=tuple(Shown(path, is_dir=os.path.isdir(path)) for path in FIGURES if os.path.exists(path)),
        grants=tuple((g.path, g.access, g.is_dir, g.clause) for g in grants),
        memory=(limits.memory or 0) if Control.LIMITS_MEMORY in selection.by_process else 0,
        cpu_time=cpu_seconds(limits) if Control.LIMITS_CPU_TIME in selection.by_process else 0,
        groups=given.groups,
    )


@lru_cache(maxsize=64)
def compile_plan(given: Inputs) -> ops.Plan:
    """The operations that enforce the policy, in the only order the gate accepts."""
    versions, words = given.groups
    first = len(given.grants) + 2  # after the private directory
    return ops.Plan(
        "landlock",
        0,
        (
            ops.Namespaces(names=(), every_id=False),
            *(
                ops.Cgroup(version=version, descriptor=first + number, limits=words, clause="limits")
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


def _rights(given: Inputs) -> list[ops.Op]:
    found = of_system(given)
    # By it the gate finds the processes of a run. Programs are put behind a wall that does not have it.
    found.append(ops.Grant(path="/proc", rights=READ_FILE | READ_DIR, words="read", gate=True))
    found += [
        ops.Grant(path=path, rights=USING, words="make terminals", gate=True) for path in given.terminals
    ]
    found += of_policy(given)
    # The path stands for what the descriptor is: each sandbox has another.
    found.append(
        ops.Grant(
            path="/scratch",
            rights=_writing(given),
            words=f"{CHANGING_WORDS}; the private home",
            grant=len(given.grants) + 1,
        )
    )
    return found


def of_system(given: Inputs) -> list[ops.Op]:
    """The set of rules, and those that every policy has."""
    found: list[ops.Op] = [
        ops.Landlock(
            files=handled_rights(given.landlock),
            network=TCP if given.own_network else 0,
            scopes=SCOPES,
            clause="files, ipc, network",
        )
    ]
    found += [
        ops.Grant(
            path=shown.source, rights=_of(READING, shown.is_dir), words=READ_ONLY_WORDS, clause="profile"
        )
        for shown in given.system
    ]
    found += [ops.Grant(path=path, rights=USING, words="use the device") for path in given.devices]
    found += [
        ops.Grant(path=shown.path, rights=_of(READING & ~EXECUTE, shown.is_dir), words="read")
        for shown in given.figures
    ]
    return found


def of_policy(given: Inputs) -> list[ops.Op]:
    """The rules for what the policy grants."""
    found: list[ops.Op] = []
    for number, (path, access, is_dir, clause) in enumerate(given.grants, 1):
        rights, words = (READING, READ_ONLY_WORDS) if access == "read" else (_writing(given), CHANGING_WORDS)
        found.append(
            ops.Grant(path=path, rights=_of(rights, is_dir), words=words, grant=number, clause=clause)
        )
    return found


def _writing(given: Inputs) -> int:
    return handled_rights(given.landlock) & ~(MAKE_CHAR | MAKE_BLOCK | IOCTL_DEVICE)


def _of(rights: int, is_dir: bool) -> int:
    return rights if is_dir else rights & OF_FILES
