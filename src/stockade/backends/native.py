"""The native backend: the kernel's own walls, raised by the gate.

`compile_plan` turns a resolved policy into the operations of the gate. It is
pure: what the host looks like (which of /bin and /lib are links, which parts
of /etc exist) comes in as a value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import ClassVar

import msgspec

from stockade.backends import syscalls
from stockade.backends.base import Backend, Given
from stockade.backends.native_offers import FOUNDATION, MECHANISMS
from stockade.backends.select import Selected
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
    SCOPES_ABI,
    WRITE_FILE,
    Shown,
    by_process,
    cpu_seconds,
    handled_rights,
    system_layout,
    within,
)
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.gate import plan as ops
from stockade.gate.client import HOST_NETWORK, OWN_NETWORK
from stockade.policy import Policy, Resolved
from stockade.policy.load import NAMES as PROJECT_POLICIES
from stockade.policy.mounted import mounted_below
from stockade.policy.programs import Programs, loaders
from stockade.policy.values import show

HOSTNAME = "stockade"
HOST_NAMES = ("hosts?", "resolv.conf?")
DEVICE_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}

PAGE, LEAST_INODES = 4096, 1024
#: The gate takes a plan of at most 4096 operations.
MOST_PROGRAMS = 3000


class Native(Backend):
    """Namespaces, mounts, Landlock and seccomp, through the gate."""

    name: ClassVar[str] = "native"
    system: ClassVar[str] = "linux"
    foundation = FOUNDATION
    copies = True
    mechanisms = MECHANISMS

    @classmethod
    def plan(cls, given: Given) -> ops.Plan:
        return compile_plan(inputs(given))

    @classmethod
    def resident(cls, policy: Policy) -> str:
        return HOST_NETWORK if policy.net == "open" else OWN_NETWORK

    @classmethod
    def home(cls, resolved: Resolved, scratch: str) -> str:
        return home_inside(resolved.caller.home, resolved.profile.system)

    @classmethod
    def adjusted(cls, policy: Policy, controls: Mapping[Control, Selected]) -> Mapping[Control, Selected]:
        kept = controls[Control.IPC]
        if policy.write or (policy.workspace is not None and policy.workspace.mode == "rw"):
            shared = f"{kept.mechanism}; sockets in writable grants are shared with the host"
            kept = msgspec.structs.replace(kept, mechanism=shared)
        if Control.IPC in policy.accept:
            shared = f"{kept.mechanism}; sockets in what is shown read-only can be reached"
            kept = msgspec.structs.replace(kept, mechanism=shared, weaker=True)
        found = {**controls, Control.IPC: kept}
        rule = policy.workspace
        if Control.LIMITS_DISK in found and rule is not None and rule.mode == "overlay" and rule.durable:
            found[Control.LIMITS_DISK] = msgspec.structs.replace(
                found[Control.LIMITS_DISK], mechanism="size of a file system in an image, on a loop device"
            )
        return found


class Inputs(msgspec.Struct, frozen=True):
    """All that a plan depends on."""

    uid: int
    gid: int
    user: str
    group: str
    home: str
    own_network: bool
    tasks: int
    files: int
    landlock: int
    program: bytes
    system: tuple[Shown, ...]
    #: path, access, is_dir, clause; in the order of their descriptors
    grants: tuple[tuple[str, str, bool, str], ...]
    protected: tuple[str, ...]
    #: Sockets in what is shown read-only may be connected to.
    sockets: bool
    layer: str
    #: What stands in for a cgroup, of each process: bytes of address space, seconds. 0 for none.
    memory: int = 0
    cpu_time: int = 0
    #: Real names of the host that are not to be seen.
    denied: tuple[str, ...] = ()
    #: path, is_dir, clause of what may be executed; None for whatever can be.
    programs: tuple[tuple[str, bool, str], ...] | None = None
    #: Size of the private file system; 0 for the kernel's default.
    disk: int = 0
    #: Whether that is an image in the layer, which outlives the supervisor.
    image: bool = False
    #: The version of each cgroup that the gate enters, and in words what they limit.
    groups: tuple[tuple[int, ...], str] = ((), "")
    #: Links to what is granted, and where each leads.
    links: tuple[tuple[str, str], ...] = ()
    #: The granted directories that are shown without what is mounted in them.
    alone: tuple[str, ...] = ()


def inputs(given: Given) -> Inputs:
    """The value that a plan is compiled from."""
    resolved, selection = given.resolved, given.selection
    caller, limits, policy = resolved.caller, resolved.limits, resolved.policy
    grants = [*resolved.grants, *((resolved.workspace,) if resolved.workspace is not None else ())]
    # In the host's network its names are found the host's way.
    names = HOST_NAMES if policy.net == "open" else ()
    system = _shown(system_layout(resolved.profile.system, (*resolved.profile.etc, *names)), resolved.denied)
    by_rlimit = any(name.endswith("nproc") for name in selection.controls[Control.LIMITS_TASKS].means)
    return Inputs(
        uid=caller.uid,
        gid=caller.gid,
        user=caller.user,
        group=caller.group,
        home=home_inside(caller.home, resolved.profile.system),
        own_network=policy.net != "open",
        tasks=(limits.tasks or 0) if by_rlimit else 0,
        files=given.files,
        memory=(limits.memory or 0) if Control.LIMITS_MEMORY in selection.by_process else 0,
        cpu_time=cpu_seconds(limits) if Control.LIMITS_CPU_TIME in selection.by_process else 0,
        landlock=given.landlock,
        program=syscalls.program(
            policy.syscalls.allow,
            policy.syscalls.deny,
            given.state,
            syscalls.Kind(listed=policy.exec is not None),
        ),
        system=system,
        grants=tuple((g.path, g.access, g.is_dir, g.clause) for g in grants),
        protected=_protected(resolved),
        sockets=Control.IPC in policy.accept,
        layer=given.layer,
        denied=resolved.denied,
        programs=_programs(resolved, system),
        disk=limits.disk or 0,
        image=resolved.needs_image,
        groups=given.groups,
        links=tuple(sorted(resolved.links.items())),
        alone=tuple(grant.path for grant in grants if grant.alone),
    )


def _shown(system: tuple[Shown, ...], denied: tuple[str, ...]) -> tuple[Shown, ...]:
    """The system's paths without those that are denied."""
    if not denied:
        return system
    kept = tuple(
        shown
        for shown in system
        if not any(within(name, tree) for tree in denied for name in (shown.path, shown.source or shown.path))
    )
    for shown in kept:
        if inner_names(shown.path, shown.source, denied) and (inner := mounted_below(shown.source)):
            raise PolicyError(
                f"deny: {shown.path} has other file systems mounted in it: {', '.join(inner)}",
                hint="nothing can be hidden in it",
            )
    return kept


def _programs(resolved: Resolved, system: tuple[Shown, ...]) -> tuple[tuple[str, bool, str], ...] | None:
    """What may be executed, by its path inside."""
    if resolved.programs is None:
        return None
    trees = {
        shown.source: (shown.path, "read")
        for shown in system
        if shown.source and (shown.path == shown.source or not shown.path.startswith("/etc/"))
    }
    for grant in (*resolved.grants, resolved.workspace):
        if grant is not None:
            trees[grant.path] = (grant.path, grant.access)
    found: dict[str, tuple[str, bool, str]] = {}
    for pattern, named in resolved.programs.items():
        clause = f"exec = {show(pattern)}"
        placed = _placed(clause, named, trees, resolved.denied)
        if not placed and not pattern.endswith("?"):
            hint = "grant its directory with read"
            raise PolicyError(f"{clause}: nothing of it is shown inside", hint=hint)
        found |= placed
    if not found:
        raise PolicyError(f"exec = {show(resolved.policy.exec)}: nothing could run", hint="leave it out")
    found = _placed("exec", Programs(loaders()), trees, resolved.denied) | found
    if len(found) > MOST_PROGRAMS:
        raise PolicyError(
            f"exec: {len(found)} files, more than {MOST_PROGRAMS}",
            hint="write DIRECTORY/* for all files of a directory",
        )
    return tuple(found.values())


def _placed(
    clause: str, named: Programs, trees: dict[str, tuple[str, str]], denied: tuple[str, ...]
) -> dict[str, tuple[str, bool, str]]:
    """Where programs are inside; those that are not shown are left out."""
    wanted = dict.fromkeys(named.files, False) | dict.fromkeys(named.trees, True)
    # In a directory, also what is shown there on its own.
    wanted |= {tree: True for tree in trees if any(within(tree, name) for name in named.trees)}
    found: dict[str, tuple[str, bool, str]] = {}
    for name, is_dir in wanted.items():
        tree = max((tree for tree in trees if within(name, tree)), key=len, default="")
        if not tree or any(within(name, hidden) for hidden in denied):
            continue
        place, access = trees[tree]
        if access != "read":
            raise PolicyError(
                f"{clause}: {name} is in {place}, where the program can write",
                hint="what may be executed must not be writable: grant its directory with read",
            )
        inside = place + name[len(tree) :]
        found[inside] = (inside, is_dir, clause)
    return found


def inner_names(path: str, source: str, denied: tuple[str, ...]) -> list[tuple[str, str]]:
    """What is denied in a tree of the host, each by its path inside and outside; a link has no source."""
    return [
        (path + name[len(source) :], name)
        for name in denied
        if source and name != source and within(name, source)
    ]


def _protected(resolved: Resolved) -> tuple[str, ...]:
    """The paths that are kept from being written, where a write would land on the host."""
    workspace = resolved.workspace
    if workspace is None:
        return ()
    writable = [grant.path for grant in (*resolved.grants, workspace) if grant.access == "write"]
    found: list[str] = []
    absent: list[str] = []
    for name, exists in resolved.protected:
        path = f"{workspace.path}/{name}"
        if any(within(path, tree) for tree in resolved.denied):
            continue
        if any(within(path, tree) for tree in writable):
            (found if exists else absent).append(path)
        elif workspace.access == "overlay" and exists and os.path.basename(name) in PROJECT_POLICIES:
            # Its changes would not land, but the policy that the project brings is not to be touched at all.
            found.append(path)
    if absent:
        raise PolicyError(
            "a program could create these protected paths, which do not exist: " + ", ".join(absent),
            hint='use workspace.mode = "overlay" without a write grant there, or create them, '
            "or list in `protect` only what exists",
        )
    return tuple(found)


@lru_cache(maxsize=64)
def compile_plan(given: Inputs) -> ops.Plan:
    """The operations that enforce the policy, in the only order the gate accepts."""
    names = [name for name in ops.NAMESPACES if name != "net" or given.own_network]
    base = _base(given)
    return ops.Plan(
        "native",
        len(base),
        (
            ops.Namespaces(names=tuple(names), every_id=given.uid == 0),
            *base,
            *cgroup_entries(given),
            ops.Hostname(name=HOSTNAME),
            *_private(given),
            *_root(given),
            ops.Pivot(),
            ops.Keyring(),
            ops.Limit(resource="core", value=0),
            ops.Limit(resource="files", value=given.files, clause=f"limits.files = {given.files}"),
            *task_limit(given),
            *by_process(given.memory, given.cpu_time),
            ops.Privileges(),
            *landlock_rules(given),
            ops.Seccomp(program=given.program, clause="syscalls"),
        ),
    )


def _private(given: Inputs) -> list[ops.Op]:
    if not given.disk:
        return [ops.Root()]
    clause = f"limits.disk = {given.disk}"
    if given.image:
        return [ops.Root(), ops.Image(size=given.disk, descriptor=len(given.grants) + 1, clause=clause)]
    # Empty files take up memory of the kernel too.
    inodes = max(LEAST_INODES, given.disk // PAGE)
    return [ops.Root(size=given.disk, inodes=inodes, clause=clause)]


def cgroup_entries(given: Inputs) -> list[ops.Op]:
    """Their descriptors come last, after an image or the two directories of an overlay in the layer."""
    versions, words = given.groups
    overlay = any(access == "overlay" for _, access, *_ in given.grants) and not given.disk
    first = len(given.grants) + 2 * overlay + given.image + 1
    return [
        ops.Cgroup(version=version, descriptor=first + number, limits=words, clause="limits")
        for number, version in enumerate(versions)
    ]


def task_limit(given: Inputs) -> list[ops.Op]:
    if not given.tasks:
        return []
    # The gate is a task of the same user: the program gets what the policy says.
    return [ops.Limit(resource="tasks", value=given.tasks + 1, clause=f"limits.tasks = {given.tasks}")]


@lru_cache(maxsize=8)
def home_inside(home: str, system: tuple[str, ...]) -> str:
    """The private home: the caller's own path, unless that is no place for one."""
    home = os.path.normpath(home) if home else "/"
    taken = ["/dev", "/etc", "/proc", "/sys", *(entry.removesuffix("?") for entry in system)]
    return "/tmp" if home == "/" or any(within(home, path) for path in taken) else home


def _base(given: Inputs) -> list[ops.Op]:
    """What sandboxes of one profile and user share: the system's trees, /etc and /dev."""
    found: list[ops.Op] = []
    for shown in given.system:
        if inner_names(shown.path, shown.source, given.denied):
            if shown.path.startswith("/etc/"):
                found.append(ops.Dir(path=shown.path, clause="deny"))  # a mount point
        elif not shown.link:
            found.append(ops.Bind(path=shown.path, source=shown.source, clause="profile"))
        elif shown.path.startswith("/etc/"):
            found.append(ops.Link(path=shown.path, target=shown.link, clause="profile"))
    taken = {shown.path for shown in given.system}
    found += [
        ops.File(path=path, content=content)
        for path, content in etc_files(given).items()
        if path not in taken and not any(within(path, tree) for tree in given.denied)
    ]
    found += [ops.Bind(path=f"/dev/{name}", source=f"/dev/{name}", device=True) for name in DEVICES]
    found += [ops.Link(path=f"/dev/{name}", target=target) for name, target in DEVICE_LINKS.items()]
    found += [ops.Dir(path="/dev/pts"), ops.Dir(path="/dev/shm")]
    return found


def _root(given: Inputs) -> list[ops.Op]:
    """The file tree of one sandbox: the shared, then the private, then what is granted, parents first."""
    found: list[ops.Op] = [ops.Show(path="/etc"), ops.Show(path="/dev")]
    for number, shown in enumerate(given.system, 1):
        if inner := inner_names(shown.path, shown.source, given.denied):
            # Not from the base, which others share.
            found += _masks(inner, shown.path, shown.source, number)
            found.append(ops.View(path=shown.path, source=shown.source, masks=number, clause="profile"))
        elif not shown.path.startswith("/etc/"):
            found.append(
                ops.Link(path=shown.path, target=shown.link, clause="profile")
                if shown.link
                else ops.Show(path=shown.path, clause="profile")
            )
    found.append(ops.Pts())
    scratch = scratch_places(given)
    if not any(within("/var/tmp", path) for path in (*scratch, *(path for path, *_ in given.grants))):
        found.append(ops.Link(path="/var/tmp", target="/tmp"))
    noexec = given.programs is not None
    found += [
        ops.Scratch(path=path, mode=mode, noexec=noexec, image=given.image) for path, mode in scratch.items()
    ]
    found += toolchain_links(given, scratch)
    # Last: what is behind the scratch directories disappears below it.
    return [*found, *shown_grants(given), ops.Proc()]


def toolchain_links(given: Inputs, scratch: dict[str, int]) -> list[ops.Op]:
    """The links that lead to a toolchain, where nothing else is at their place."""
    taken = ["/dev", "/etc", "/proc", *scratch, *(shown.path for shown in given.system)]
    granted = [path for path, *_ in given.grants]
    return [
        ops.Link(path=path, target=target, clause="toolchain")
        for path, target in given.links
        if not any(within(path, tree) for tree in granted)
        and not any(within(tree, path) for tree in (*taken, *granted))
    ]


def _masks(inner: list[tuple[str, str]], tree: str, source: str, number: int, grant: int = 0) -> list[ops.Op]:
    return [
        ops.Mask(
            path=path, tree=tree, source=source, masks=number, grant=grant, clause=f"deny = {show(name)}"
        )
        for path, name in inner
    ]


def shown_grants(given: Inputs) -> list[ops.Op]:
    """What the policy shows, parents first."""
    found: dict[str, ops.Op] = {}
    hidden: list[ops.Op] = []
    noexec = given.programs is not None
    system = {shown.path for shown in given.system if not shown.link}
    for number, (path, access, is_dir, clause) in enumerate(given.grants, 1):
        if access == "read" and path in system:
            continue  # it is shown already
        inner = inner_names(path, path, given.denied) if is_dir else []
        masks = len(given.system) + number if inner else 0
        hidden += _masks(inner, path, path, masks, number)
        if access == "overlay":
            found[path] = ops.Overlay(
                path=path,
                layer=given.layer,
                grant=number,
                masks=masks,
                noexec=noexec,
                private=bool(given.disk),
                image=given.image,
                alone=path in given.alone,
                clause=clause,
            )
        elif access == "write":
            found[path] = ops.Bind(
                path=path, source=path, writable=True, noexec=noexec, grant=number, clause=clause
            )
        elif is_dir and (masks or not given.sockets):
            found[path] = ops.View(
                path=path, source=path, grant=number, masks=masks, alone=path in given.alone, clause=clause
            )
        else:
            found[path] = ops.Bind(path=path, source=path, grant=number, clause=clause)
    for path in given.protected:
        found[path] = ops.Bind(path=path, source=path, clause="protect")
    # A directory that is writable for real could be renamed with what is mounted in it, and another
    # put in its place; one that is a mount point itself cannot.
    writable = [path for path, access, *_ in given.grants if access == "write"]
    for path in list(found):
        for tree in writable:
            above = os.path.dirname(path)
            while path not in writable and within(above, tree) and above != tree:
                writing = ops.Bind(path=above, source=above, writable=True, noexec=noexec, clause="protect")
                found.setdefault(above, writing)
                above = os.path.dirname(above)
    return [*hidden, *(found[path] for path in sorted(found))]


def scratch_places(given: Inputs) -> dict[str, int]:
    """The private writable directories and their modes; what is granted for real is not made private."""
    wanted = {"/dev/shm": 0o1777, "/tmp": 0o1777}
    wanted.setdefault(given.home, 0o700)
    granted = [path for path, *_ in given.grants]
    if any(within(path, "/var/tmp") for path in (given.home, *granted)):
        wanted["/var/tmp"] = 0o1777
    return {path: wanted[path] for path in sorted(wanted) if not any(within(path, tree) for tree in granted)}


def etc_files(given: Inputs) -> dict[str, bytes]:
    """The files of /etc that are written anew: who is here, and how names are found."""
    home = given.home
    users = f"{given.user}:x:{given.uid}:{given.gid}::{home}:/bin/sh\n"
    groups = f"{given.group}:x:{given.gid}:\n"
    if given.uid != 65534:
        users += "nobody:x:65534:65534::/nonexistent:/usr/sbin/nologin\n"
    if given.gid != 65534:
        groups += "nogroup:x:65534:\n"
    return {
        "/etc/passwd": users.encode("utf-8", "surrogateescape"),
        "/etc/group": groups.encode("utf-8", "surrogateescape"),
        "/etc/hostname": f"{HOSTNAME}\n".encode(),
        "/etc/hosts": f"127.0.0.1 localhost {HOSTNAME}\n::1 localhost {HOSTNAME}\n".encode(),
        # Nobody answers there: a look-up fails at once instead of waiting for a server.
        "/etc/resolv.conf": b"nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
        "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
    }


def landlock_rules(given: Inputs) -> list[ops.Op]:
    """The second wall, under the mounts: the same tree again, by rights."""
    handled = handled_rights(given.landlock)
    reading, may = (READING, "read and execute") if given.programs is None else (READING & ~EXECUTE, "read")
    writing = handled & ~(MAKE_CHAR | MAKE_BLOCK)
    changing = "read, execute and write"
    if given.programs is not None:
        writing, changing = writing & ~EXECUTE, "read and write"
    found: list[ops.Op] = [
        ops.Landlock(
            files=handled, scopes=SCOPES if given.landlock >= SCOPES_ABI else 0, clause="files, ipc"
        ),
        ops.Grant(path="/", rights=READ_DIR, words="list directories"),
        ops.Grant(path="/etc", rights=reading, words="read", clause="profile"),
        ops.Grant(path="/proc", rights=READ_FILE | READ_DIR, words="read"),
        ops.Grant(
            path="/dev",
            rights=handled & (READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEVICE),
            words="use devices",
        ),
    ]
    for shown in given.system:
        if shown.source and not shown.path.startswith("/etc/"):
            rights = reading if shown.is_dir else reading & OF_FILES
            found.append(ops.Grant(path=shown.path, rights=rights, words=may, clause="profile"))
    found += [ops.Grant(path=path, rights=writing, words=changing) for path in scratch_places(given)]
    for path, access, is_dir, clause in given.grants:
        rights, words = (reading, may) if access == "read" else (writing, changing)
        found.append(
            ops.Grant(path=path, rights=rights if is_dir else rights & OF_FILES, words=words, clause=clause)
        )
    for path, is_dir, clause in given.programs or ():
        words = "execute every file in it" if is_dir else "execute"
        found.append(ops.Grant(path=path, rights=EXECUTE, words=words, clause=clause))
    return found
