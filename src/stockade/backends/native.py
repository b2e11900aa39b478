"""The native backend: the kernel's own walls, raised by the gate.

`compile_plan` turns a resolved policy into the operations of the gate. It is pure: what the host looks like
(which of /bin and /lib are links, which parts of /etc exist) is one of its inputs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from stockade.backends.backend import Backend, PlanInputs
from stockade.backends.mechanisms import FOUNDATION, MECHANISMS
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
    SCOPES_ABI,
    WRITE_FILE,
    SystemPath,
    by_process,
    cpu_seconds,
    handled_rights,
    refuse_multicast,
    system_layout,
    within,
)
from stockade.backends.seccomp import syscalls
from stockade.backends.selection import ControlChoice
from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.gate import operations as ops
from stockade.gate.wire import KIND_HOST_NETWORK, KIND_OWN_NETWORK
from stockade.linux.mount_table import mounted_below
from stockade.policy import Policy
from stockade.policy.socket_options import MULTICAST
from stockade.policy.values import show
from stockade.resolve import certificates_inside, policy_text
from stockade.resolve.config_files import NAMES as PROJECT_POLICIES
from stockade.resolve.paths.hidden_paths import HiddenPaths
from stockade.resolve.paths.protected_paths import covered
from stockade.resolve.resolved import ResolvedPolicy

if TYPE_CHECKING:
    from stockade.backends.private_mounts import OwnMount
    from stockade.resolve.paths.programs import Programs

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
#: Each program is an operation, and the gate accepts plans of at most PLAN_MAX_OPS (gate/src/wire.h).
MOST_PROGRAMS = 3000


class Native(Backend):
    """Namespaces, mounts, Landlock and seccomp, through the gate."""

    name: ClassVar[str] = "native"
    system: ClassVar[str] = "linux"
    foundation = FOUNDATION
    copies = True
    mechanisms = MECHANISMS

    @classmethod
    def plan(cls, given: PlanInputs) -> ops.Plan:
        if given.resolved.policy.net == "open":
            refuse_multicast(given.resolved.policy, 'with net = "open" the network is the host\'s')
        plan = compile_plan(inputs(given))
        if given.resolved.denied and not plan.fits:
            raise PolicyError(
                f"deny: {len(given.resolved.denied)} paths are more than a plan can hold",
                hint="deny the directories that contain them",
            )
        return plan

    @classmethod
    def resident(cls, policy: Policy) -> str:
        return KIND_HOST_NETWORK if policy.net == "open" else KIND_OWN_NETWORK

    @classmethod
    def home(cls, resolved: ResolvedPolicy, scratch: str) -> str:
        if resolved.environment is not None:
            return resolved.environment.home
        return home_inside(resolved.caller.home, resolved.profile.system)

    @classmethod
    def adjusted(
        cls, policy: Policy, controls: Mapping[Control, ControlChoice]
    ) -> Mapping[Control, ControlChoice]:
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


class NativeInputs(msgspec.Struct, frozen=True):
    """Everything that a plan depends on."""

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
    system: tuple[SystemPath, ...]
    #: path, access, is_dir, clause; in the order of their descriptors
    grants: tuple[tuple[str, str, bool, str], ...]
    protected: tuple[str, ...]
    #: Whether a program may connect to sockets in read-only grants.
    sockets: bool
    layer: str
    #: Limits on each process instead of a cgroup: bytes of address space, seconds. 0 for none.
    memory: int = 0
    cpu_time: int = 0
    #: Real paths on the host to hide; and for those that a pattern matched, the pattern.
    denied: tuple[str, ...] = ()
    matched: tuple[tuple[str, str], ...] = ()
    #: path, is_dir, clause of what may be executed; None for everything.
    programs: tuple[tuple[str, bool, str], ...] | None = None
    #: Size of the private file system; 0 for the kernel's default.
    disk: int = 0
    #: Whether that is an image in the layer, which outlives the supervisor.
    image: bool = False
    #: The version of each cgroup that the gate enters, and their limits in words.
    groups: tuple[tuple[int, ...], str] = ((), "")
    #: Links to grants, and their targets.
    links: tuple[tuple[str, str], ...] = ()
    #: The granted directories that are shown without the mounts below them.
    alone: tuple[str, ...] = ()
    #: The content of /etc/gitconfig; empty for none.
    gitconfig: bytes = b""
    #: The directory with the certificates of the sandbox's own authority, and the paths at which its bundle
    #: takes the place of the system's.
    trust: tuple[str, tuple[str, ...]] = ("", ())
    #: Whether programs find placeholders of secrets in files.
    secret_files: bool = False
    #: The content of /etc/resolv.conf with network rules; empty without.
    resolv_conf: bytes = b""
    #: The mounts of a private environment, and how many descriptors they have.
    mounts: tuple[OwnMount, ...] = ()
    mounted: int = 0
    #: The ids of its user namespace and the capabilities that programs keep; none without an environment.
    uids: tuple[tuple[int, int, int], ...] = ()
    gids: tuple[tuple[int, int, int], ...] = ()
    keep: int = 0
    joins_network: bool = False
    #: Whether programs may join multicast groups.
    multicast: bool = False
    #: How many bytes its private memory may hold, whoever writes there; 0 for any number.
    most_private: int = 0
    #: The files in which a program reads its own policy, by path.
    policy_files: tuple[tuple[str, bytes], ...] = ()

    @property
    def taken(self) -> tuple[str, ...]:
        """The paths of everything that is granted or mounted."""
        return (*(path for path, *_ in self.grants), *(mount.path for mount in self.mounts))


def inputs(given: PlanInputs) -> NativeInputs:
    """Return the value that a plan is compiled from."""
    resolved, selection = given.resolved, given.selection
    caller, limits, policy = resolved.caller, resolved.limits, resolved.policy
    grants = [*resolved.grants, *((resolved.workspace,) if resolved.workspace is not None else ())]
    if (whole := next((grant for grant in grants if grant.path == "/etc"), None)) is not None:
        hint = "grant what the program needs in it, such as /etc/apt"
        raise PolicyError(f"{whole.clause}: the sandbox has an /etc of its own", hint=hint)
    # With the host's network, names are looked up as on the host.
    names = HOST_NAMES if policy.net == "open" else ()
    private = resolved.environment
    own: dict[str, Any] = {}
    system = system_layout(resolved.profile.system, (*resolved.profile.etc, *names))
    if private is not None:
        from stockade.backends.private_mounts import environment_inputs, image_layout

        own = environment_inputs(private, given, len(grants))
        if private.image:
            system = image_layout(private.image, private.taken, names)
    system = _shown(system, resolved.hidden)
    by_rlimit = any(name.endswith("nproc") for name in selection.controls[Control.LIMITS_TASKS].means)
    found = NativeInputs(
        uid=caller.uid if private is None else 0,
        gid=caller.gid if private is None else 0,
        user=caller.user if private is None else "root",
        group=caller.group if private is None else "root",
        home=home_inside(caller.home, resolved.profile.system) if private is None else private.home,
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
            syscalls.FilterKey(listed=policy.exec is not None),
        ),
        system=system,
        grants=tuple((g.path, g.access, g.is_dir, g.clause) for g in grants),
        # The program must not change the policy of the project in any way.
        protected=covered(resolved, besides=PROJECT_POLICIES),
        sockets=Control.IPC in policy.accept,
        layer=given.layer,
        denied=resolved.denied,
        matched=tuple(
            (name, path) for name, path in resolved.hidden.written.items() if path in resolved.hidden.matched
        ),
        programs=_programs(resolved, system),
        disk=limits.disk or 0,
        image=resolved.needs_image,
        groups=given.groups,
        links=tuple(sorted(resolved.links.items())),
        gitconfig=resolved.gitconfig,
        resolv_conf=_resolv_conf(policy),
        trust=_trust(given),
        secret_files=bool(given.trust) and any(one.inside != "env" for one in policy.secrets.values()),
        alone=tuple(grant.path for grant in grants if grant.alone),
        multicast=MULTICAST in policy.syscalls.allow,
        **own,
    )
    sources = policy_text.FactSources.of(resolved, selection.backend)
    return msgspec.structs.replace(found, policy_files=_policy_files(found, sources))


@lru_cache(maxsize=64)
def _policy_files(given: NativeInputs, sources: policy_text.FactSources) -> tuple[tuple[str, bytes], ...]:
    """Return the files in which a program reads its own policy; none if something else is at their place."""
    taken = (*given.taken, *(shown.path for shown in given.system))
    if any(within(policy_text.DIRECTORY, path) or within(path, policy_text.DIRECTORY) for path in taken):
        return ()
    private = tuple(scratch_places(given))
    files = policy_text.policy_files(sources, private)
    return tuple((f"{policy_text.DIRECTORY}/{name}", content) for name, content in files.items())


def _trust(given: PlanInputs) -> tuple[str, tuple[str, ...]]:
    if not given.trust:
        return "", ()
    private, hidden = given.resolved.environment, given.resolved.hidden
    root = private.image if private is not None else ""
    return given.trust, tuple(path for path in certificates_inside.shown_at(root) if not hidden.covers(path))


def _resolv_conf(policy: Policy) -> bytes:
    """Return how names are looked up inside with network rules; empty without."""
    if not policy.net or policy.net == "open":
        return b""
    from stockade.resolve.name_lookup import resolv_conf

    return resolv_conf()


def _shown(system: tuple[SystemPath, ...], hidden: HiddenPaths) -> tuple[SystemPath, ...]:
    """Return the system's paths without those that are denied."""
    if not hidden.names:
        return system
    kept = tuple(
        shown
        for shown in system
        if not hidden.covers(shown.path) and not (shown.source and hidden.covers(shown.source))
    )
    for shown in kept:
        if shown.source in hidden.above and (inner := mounted_below(shown.source)):
            raise PolicyError(
                f"deny: {shown.path} has other file systems mounted in it: {', '.join(inner)}",
                hint="leave the clause out: Stockade cannot hide anything in such a directory",
            )
    return kept


def _programs(
    resolved: ResolvedPolicy, system: tuple[SystemPath, ...]
) -> tuple[tuple[str, bool, str], ...] | None:
    """Return what may be executed, by its path inside; None for everything."""
    if resolved.programs is None:
        return None
    from stockade.resolve.paths.programs import Programs, loaders

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
        inside = _programs_inside(clause, named, trees, resolved.hidden)
        if not inside and not pattern.endswith("?"):
            hint = "grant its directory with read"
            raise PolicyError(f"{clause}: the policy shows none of it inside", hint=hint)
        found |= inside
    if not found:
        raise PolicyError(f"exec = {show(resolved.policy.exec)}: nothing could run", hint="leave it out")
    found = _programs_inside("exec", Programs(loaders()), trees, resolved.hidden) | found
    if len(found) > MOST_PROGRAMS:
        raise PolicyError(
            f"exec: {len(found)} files, more than {MOST_PROGRAMS}",
            hint="write DIRECTORY/* for all files of a directory",
        )
    return tuple(found.values())


def _programs_inside(
    clause: str, named: Programs, trees: dict[str, tuple[str, str]], hidden: HiddenPaths
) -> dict[str, tuple[str, bool, str]]:
    """Return the paths of programs inside; those that the policy does not show are left out."""
    wanted = dict.fromkeys(named.files, False) | dict.fromkeys(named.trees, True)
    # Also grants below a directory that `exec` names.
    wanted |= {tree: True for tree in trees if any(within(tree, name) for name in named.trees)}
    found: dict[str, tuple[str, bool, str]] = {}
    for name, is_dir in wanted.items():
        tree = max((tree for tree in trees if within(name, tree)), key=len, default="")
        if not tree or hidden.covers(name):
            continue
        place, access = trees[tree]
        if access != "read":
            raise PolicyError(
                f"{clause}: {name} is in {place}, where the program can write",
                hint="a file that may be executed must not be writable: grant its directory with read",
            )
        inside = place + name[len(tree) :]
        found[inside] = (inside, is_dir, clause)
    return found


def inner_names(path: str, source: str, denied: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the denied paths in a tree of the host, each inside and outside; a link has no source."""
    if not source:
        return []
    below = f"{source}/"
    return [(path + name[len(source) :], name) for name in denied if name.startswith(below)]


@lru_cache(maxsize=64)
def compile_plan(given: NativeInputs) -> ops.Plan:
    """Return the operations that enforce the policy, in the only order that the gate accepts."""
    base = _base(given)
    return ops.Plan(
        "native",
        len(base),
        (
            _namespaces(given),
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
            ops.Privileges(keep=given.keep),
            *landlock_rules(given),
            ops.Seccomp(program=given.program, clause="syscalls"),
        ),
    )


def _namespaces(given: NativeInputs) -> ops.Op:
    names = [name for name in ops.NAMESPACES if name != "net" or given.own_network]
    return ops.Namespaces(
        names=tuple(names),
        every_id=given.uid == 0 and not given.uids,
        ids=given.uids,
        group_ids=given.gids,
        joins_network=given.joins_network,
        few_memberships=given.multicast,
    )


def _private(given: NativeInputs) -> list[ops.Op]:
    if not given.disk and not given.most_private:
        return [ops.Root()]
    if not given.disk:
        return [_sized_root(given, given.most_private, f"limits.memory = {given.most_private}")]
    clause = f"limits.disk = {given.disk}"
    if given.image:
        return [ops.Root(), ops.Image(size=given.disk, descriptor=len(given.grants) + 1, clause=clause)]
    return [_sized_root(given, given.disk, clause)]


def _sized_root(given: NativeInputs, size: int, clause: str) -> ops.Op:
    # The files of the policy are in it too, and leave the program all that it may use.
    own = sum(-(-len(content) // PAGE) * PAGE for _, content in given.policy_files)
    # Empty files use memory of the kernel too.
    return ops.Root(size=size + own, inodes=max(LEAST_INODES, size // PAGE), clause=clause)


def cgroup_entries(given: NativeInputs) -> list[ops.Op]:
    """Return the operations that enter the cgroups.

    Their descriptors come last, after an image or the two directories of an overlay in the layer, or after
    the mounts of a private environment.
    """
    versions, words = given.groups
    overlay = any(access == "overlay" for _, access, *_ in given.grants) and not given.disk
    first = len(given.grants) + 2 * overlay + given.mounted + given.image + 1
    return [
        ops.JoinCgroup(version=version, descriptor=first + number, limits=words, clause="limits")
        for number, version in enumerate(versions)
    ]


def task_limit(given: NativeInputs) -> list[ops.Op]:
    if not given.tasks:
        return []
    # One more for the gate, which is a task of the same user.
    return [ops.Limit(resource="tasks", value=given.tasks + 1, clause=f"limits.tasks = {given.tasks}")]


@lru_cache(maxsize=8)
def home_inside(home: str, system: tuple[str, ...]) -> str:
    """Return the path of the private home: the caller's own, unless the system has something there."""
    home = os.path.normpath(home) if home else "/"
    taken = ["/dev", "/etc", "/proc", "/sys", *(entry.removesuffix("?") for entry in system)]
    return "/tmp" if home == "/" or any(within(home, path) for path in taken) else home


def _base(given: NativeInputs) -> list[ops.Op]:
    """Return what all sandboxes of one profile and user share: the system's trees, /etc and /dev."""
    found: list[ops.Op] = []
    for shown in given.system:
        if inner_names(shown.path, shown.source, given.denied):
            if shown.path.startswith("/etc/"):
                found.append(ops.Dir(path=shown.path, clause="deny"))  # a mount point
        elif not shown.link:
            found.append(ops.Bind(path=shown.path, source=shown.source, clause="profile"))
        elif shown.path.startswith("/etc/"):
            found.append(ops.Symlink(path=shown.path, target=shown.link, clause="profile"))
    taken = {shown.path for shown in given.system}
    found += [
        ops.File(path=path, content=content)
        for path, content in etc_files(given).items()
        if path not in taken and not any(within(path, tree) for tree in given.denied)
    ]
    found += _mount_points(given, found)
    found += [ops.Bind(path=f"/dev/{name}", source=f"/dev/{name}", device=True) for name in DEVICES]
    found += [ops.Symlink(path=f"/dev/{name}", target=target) for name, target in DEVICE_LINKS.items()]
    found += [ops.Dir(path="/dev/pts"), ops.Dir(path="/dev/shm")]
    return found


def _mount_points(given: NativeInputs, made: list[ops.Op]) -> list[ops.Op]:
    """Return missing mount points for grants in /etc, which is read-only later."""
    there = [op.path for op in made if isinstance(op, ops.Bind | ops.File | ops.Symlink | ops.Dir)]
    found: list[ops.Op] = []
    for path, _, is_dir, clause in sorted(given.grants):
        if not path.startswith("/etc/") or any(within(path, one) or within(one, path) for one in there):
            continue
        there.append(path)
        found.append(
            ops.Dir(path=path, clause=clause) if is_dir else ops.File(path=path, content=b"", clause=clause)
        )
    return found


def _root(given: NativeInputs) -> list[ops.Op]:
    """Return the file tree of one sandbox: shared parts, private parts, then the grants, parents first."""
    found: list[ops.Op] = [ops.Show(path="/etc"), ops.Show(path="/dev")]
    for number, shown in enumerate(given.system, 1):
        if inner := inner_names(shown.path, shown.source, given.denied):
            # Not from the base, which other sandboxes share.
            found += _masks(given, inner, shown.path, shown.source, number)
            found.append(ops.View(path=shown.path, source=shown.source, masks=number, clause="profile"))
        elif not shown.path.startswith("/etc/"):
            found.append(
                ops.Symlink(path=shown.path, target=shown.link, clause="profile")
                if shown.link
                else ops.Show(path=shown.path, clause="profile")
            )
    found.append(ops.Pts())
    scratch = scratch_places(given)
    if not any(within("/var/tmp", path) for path in (*scratch, *given.taken)):
        found.append(ops.Symlink(path="/var/tmp", target="/tmp"))
    noexec = given.programs is not None
    found += [
        ops.ScratchMount(path=path, mode=mode, noexec=noexec, image=given.image)
        for path, mode in scratch.items()
    ]
    found += toolchain_links(given, scratch)
    found += own_policy(given)
    # Grants come last: they go on top of the scratch directories.
    return [*found, *shown_grants(given), *trust_mounts(given), ops.Proc()]


def trust_mounts(given: NativeInputs) -> list[ops.Op]:
    """Return the mounts of the certificates that programs trust, with rules for requests."""
    source, places = given.trust
    if not source:
        return []
    shown = {certificates_inside.DIRECTORY: source}
    if given.secret_files:
        shown[certificates_inside.SECRETS] = f"{source}/{certificates_inside.SECRETS_NAME}"
    bundle = f"{source}/{certificates_inside.BUNDLE}"
    shown |= {path: bundle for path in places if not any(within(path, grant) for grant in given.taken)}
    return [ops.Bind(path=path, source=origin, own=True, clause="net") for path, origin in shown.items()]


def toolchain_links(given: NativeInputs, scratch: dict[str, int]) -> list[ops.Op]:
    """Return the links that lead to a toolchain, where nothing else is at their path."""
    taken = ["/dev", "/etc", "/proc", *scratch, *(shown.path for shown in given.system)]
    granted = given.taken
    return [
        ops.Symlink(path=path, target=target, clause="toolchain")
        for path, target in given.links
        if not any(within(path, tree) for tree in granted)
        and not any(within(tree, path) for tree in (*taken, *granted))
    ]


def own_policy(given: NativeInputs) -> list[ops.Op]:
    """Return the files that describe the policy to the program. The root, and they with it, is read-only."""
    return [ops.File(path=path, content=content) for path, content in given.policy_files]


def _masks(
    given: NativeInputs, inner: list[tuple[str, str]], tree: str, source: str, number: int, grant: int = 0
) -> list[ops.Op]:
    patterns = dict(given.matched) if inner else {}
    return [
        ops.Mask(
            path=path,
            tree=tree,
            source=source,
            masks=number,
            grant=grant,
            clause=f"deny = {show(patterns.get(name, name))}",
        )
        for path, name in inner
    ]


def shown_grants(given: NativeInputs) -> list[ops.Op]:
    """Return the mounts of what the policy shows, parents first."""
    found: dict[str, ops.Op] = {}
    hidden: list[ops.Op] = []
    noexec = given.programs is not None
    system = {shown.path for shown in given.system if not shown.link}
    for number, (path, access, is_dir, clause) in enumerate(given.grants, 1):
        if access == "read" and path in system:
            continue  # the profile shows it already
        inner = inner_names(path, path, given.denied) if is_dir else []
        masks = len(given.system) + number if inner else 0
        hidden += _masks(given, inner, path, path, masks, number)
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
    if given.mounts:
        from stockade.backends.private_mounts import own_mounts

        found |= own_mounts(given.mounts, noexec=noexec, private=bool(given.disk))
    for path in given.protected:
        found[path] = ops.Bind(path=path, source=path, clause="protect")
    # A program could rename a directory that is writable for real, with the mounts in it, and put another
    # one in its place. It cannot rename a directory that is a mount point itself.
    writable = [path for path, access, *_ in given.grants if access == "write"]
    for path in list(found):
        for tree in writable:
            above = os.path.dirname(path)
            while path not in writable and within(above, tree) and above != tree:
                writing = ops.Bind(path=above, source=above, writable=True, noexec=noexec, clause="protect")
                found.setdefault(above, writing)
                above = os.path.dirname(above)
    return [*hidden, *(found[path] for path in sorted(found))]


def scratch_places(given: NativeInputs) -> dict[str, int]:
    """Return the private writable directories and their modes; a granted path is not made private."""
    wanted = {"/dev/shm": 0o1777, "/tmp": 0o1777}
    wanted.setdefault(given.home, 0o700)
    granted = given.taken
    if any(within(path, "/var/tmp") for path in (given.home, *granted)):
        wanted["/var/tmp"] = 0o1777
    return {path: wanted[path] for path in sorted(wanted) if not any(within(path, tree) for tree in granted)}


def etc_files(given: NativeInputs) -> dict[str, bytes]:
    """Return the files of /etc that are made for the sandbox: users, and how names are looked up."""
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
        # Without network rules no server listens there: a lookup fails at once instead of waiting.
        "/etc/resolv.conf": given.resolv_conf or b"nameserver 127.0.0.1\noptions timeout:1 attempts:1\n",
        "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files dns\n",
        **({"/etc/gitconfig": given.gitconfig} if given.gitconfig else {}),
    }


def landlock_rules(given: NativeInputs) -> list[ops.Op]:
    """Return the second wall besides the mounts: Landlock's rules for the same tree."""
    handled = handled_rights(given.landlock)
    reading, may = (READING, "read and execute") if given.programs is None else (READING & ~EXECUTE, "read")
    writing = handled & ~(MAKE_CHAR | MAKE_BLOCK)
    changing = "read, execute and write"
    if given.programs is not None:
        writing, changing = writing & ~EXECUTE, "read and write"
    found: list[ops.Op] = [
        ops.LandlockRules(
            files=handled, scopes=SCOPES if given.landlock >= SCOPES_ABI else 0, clause="files, ipc"
        ),
        ops.BindGrant(path="/", rights=READ_DIR, words="list directories"),
        ops.BindGrant(path="/etc", rights=reading, words="read", clause="profile"),
        ops.BindGrant(path="/proc", rights=READ_FILE | READ_DIR, words="read"),
        ops.BindGrant(
            path="/dev",
            rights=handled & (READ_FILE | WRITE_FILE | READ_DIR | IOCTL_DEVICE),
            words="use devices",
        ),
    ]
    if given.policy_files:
        found.append(
            ops.BindGrant(path=policy_text.DIRECTORY, rights=READ_FILE | READ_DIR, words="read the policy")
        )
    for shown in given.system:
        if shown.source and not shown.path.startswith("/etc/"):
            rights = reading if shown.is_dir else reading & OF_FILES
            found.append(ops.BindGrant(path=shown.path, rights=rights, words=may, clause="profile"))
    found += [ops.BindGrant(path=path, rights=writing, words=changing) for path in scratch_places(given)]
    own = [(one.path, one.access, one.is_dir, one.clause) for one in given.mounts]
    for path, access, is_dir, clause in (*given.grants, *own):
        rights, words = (reading, may) if access == "read" else (writing, changing)
        found.append(
            ops.BindGrant(
                path=path, rights=rights if is_dir else rights & OF_FILES, words=words, clause=clause
            )
        )
    if given.trust[0]:
        rights = reading & ~EXECUTE
        for place in (certificates_inside.DIRECTORY, *([certificates_inside.SECRETS] * given.secret_files)):
            found.append(ops.BindGrant(path=place, rights=rights, words="read", clause="net"))
    for path, is_dir, clause in given.programs or ():
        words = "execute every file in it" if is_dir else "execute"
        found.append(ops.BindGrant(path=path, rights=EXECUTE, words=words, clause=clause))
    return found
