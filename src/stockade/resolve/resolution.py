"""Find and open the paths of a policy: once, here, and by descriptor from then on.

Each path is expanded and opened as O_PATH, link by link (`paths`), and the
kernel is asked for the descriptor's name: if it differs from the name that was
found, something was moved meanwhile and the run is refused. A path that leaves
the workspace through a link is refused too (`links`). Backends mount the
descriptors, so no path is looked up twice.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
from typing import NoReturn

import msgspec

from stockade.controls import Control
from stockade.errors import PolicyError, one_line, typed
from stockade.linux.mount_table import HOLDING, alone, mounted_below, mounted_names
from stockade.linux.path_lookup import PathLink, covers, look_up, names_on_the_way, plain
from stockade.linux.user import Caller
from stockade.policy.model import Limits, Policy
from stockade.policy.patterns import quote
from stockade.policy.profile import Profile, profile
from stockade.policy.values import expand, literal, quote_protected, show
from stockade.resolve.certificates_inside import judges_requests
from stockade.resolve.paths import protected_paths
from stockade.resolve.paths.hidden_paths import hide
from stockade.resolve.paths.policy_paths import MODES, OWN, SYSTEM, NamedPath, places
from stockade.resolve.resolved import ANY_TREE, Grant, ResolvedPolicy, UnnamedTrees
from stockade.resolve.toolchain.needs import (
    Surroundings,
    Toolchain,
    search_path,
    shown_by,
    starts_others,
    toolchain,
    with_plain_python,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from stockade.resolve.environment import Environment
    from stockade.resolve.git_repository import LinkedWorktree
    from stockade.resolve.host_network import HostNetwork
    from stockade.resolve.paths.hidden_paths import HiddenPaths
    from stockade.resolve.paths.programs import Programs

_MISSING = (errno.ENOENT, errno.ENOTDIR)
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

NO_LIMITS = Limits()
PACKAGE = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))


def resolve(
    policy: Policy,
    caller: Caller,
    state: str,
    *,
    pinned: bool = False,
    command: str = "",
    start: str = "",
    table: bytes | None = None,
    unnamed: UnnamedTrees = ANY_TREE,
    private: Environment | None = None,
) -> ResolvedPolicy:
    """Find and open every path that the policy names, and what the command needs if it starts in `start`.

    `state` is Stockade's own directory, which no grant may touch. `pinned` says that the policy's paths are
    real names already (see `discover`): a link on the way was put there since, and is refused. `table` is
    the mount table of a process that confines itself: it mounts nothing, so mounts in a tree do not matter.
    `unnamed` says which trees the backend can show that no clause names. `private` is the environment of a
    sandbox that has one: nothing of the caller's home or toolchains is shown in it unasked.
    """
    base = profile(policy.profile)
    if policy.secrets and policy.net:
        from stockade.policy.secrets import check_together

        check_together(policy.secrets, policy.net, policy.env, (*base.pass_env, *policy.pass_env))
    if private is not None:
        _check_environment(private, policy)
        base = msgspec.structs.replace(base, read=_of_the_system(base.read, private))
        unnamed = UnnamedTrees(shown=False)
    opener, mounts = _PathOpener(caller, state, pinned, table), table is None
    try:
        grants: dict[str, Grant] = {}
        for clause, paths, access in (
            (f"profile = {show(base.name)}", base.read, "read"),
            ("", policy.read, "read"),
            ("", policy.write, "write"),
        ):
            for path in paths:
                words = clause or f"{access} = {show(path)}"
                grant = opener.grant(path, access, words, pinned=pinned and not clause)
                if grant is not None:
                    grants[grant.path] = grant  # write comes last and wins
        workspace: Grant | None = None
        if policy.workspace is not None:
            workspace = opener.workspace(policy.workspace.path, policy.workspace.mode)
            policy = _protect_policies(policy, workspace.path, opener.policies)
            _apply_workspace_mode(grants, workspace)
        root = "" if workspace is None else workspace.path
        linked = _show_repository(policy, opener, grants, root, unnamed) if root else None
        programs = _follow_links(policy, base, opener, root)
        chain = (
            _toolchain(policy, base, opener, grants, workspace, command, start, unnamed)
            if private is None
            else Toolchain()
        )
        if mounts and not (private is not None and private.image):
            chain = with_plain_python(chain, policy, base)
        if mounts and workspace is not None and workspace.access != "write" and caller.uid == 0:
            _show_mounted(workspace, opener, grants)
        # An image has roots of its own, but not the authority of this sandbox.
        shares = policy.net and (not (private is not None and private.image) or judges_requests(policy))
        network = _host_network(policy, base, opener, grants, workspace) if shares else None
        if private is not None:
            _refuse_in_environment(grants, private)
        masked = [quote(literal(path)) for path in chain.hidden]
        masked += [quote(literal(path)) for path in linked.hidden] if linked is not None else ()
        hidden = hide((*policy.deny, *masked), caller, grants, workspace, shown_by(base))
        network = network and network.without(hidden)
        sockets = Control.IPC in policy.accept
        for path, grant in grants.items():
            if mounts and (not sockets or path in hidden.above):
                grants[path] = _without_inner_mounts(grant, opener, grants)
        if workspace is not None and mounts:
            workspace = _without_inner_mounts(workspace, opener, grants)
        if workspace is not None and workspace.access == "overlay":
            _refuse_foreign_unless_root(workspace, caller)
        resolved = ResolvedPolicy(
            policy=policy,
            profile=base,
            caller=caller,
            grants=tuple(grants[path] for path in sorted(grants)),
            workspace=workspace,
            protected=protected_paths.policy_paths(policy, workspace),
            repositories=_repositories(policy, grants.values(), workspace, hidden, caller),
            hidden=hidden,
            programs=programs,
            environ=environment(
                policy,
                base,
                caller if private is None else _root_inside(caller, private),
                chain.path,
                chain.path_after,
                network.variables if network else None,
            ),
            limits=effective(policy.limits, base.limits),
            links=chain.links,
            gitconfig=_git_identity(caller, root, command),
            notes=(linked.note,) if linked is not None and linked.note else (),
            places=places(opener.named, root) if root else (),
            _open=opener.open,
            network=network,
            environment=private,
        )
        _check_durable(resolved)
        if policy.secrets:
            _refuse_shown_secrets(resolved)
        return resolved
    except BaseException:
        for fd in opener.open:
            os.close(fd)
        raise


def _refuse_shown_secrets(resolved: ResolvedPolicy) -> None:
    """Refuse a secret whose file the program could read."""
    caller, shown = resolved.caller, [*resolved.grants]
    if resolved.workspace is not None:
        shown.append(resolved.workspace)
    trees = [*(grant.path for grant in shown), *shown_by(resolved.profile)]
    for name, secret in resolved.policy.secrets.items():
        if secret.from_file is None:
            continue
        clause = f"secrets.{name}.from_file = {show(secret.from_file)}"
        written = expand(
            secret.from_file.removesuffix("?"),
            clause,
            home=caller.home,
            cwd=caller.cwd,
            environ=caller.environ,
        )
        # By whatever link that a program could replace it is found, too.
        for path in names_on_the_way(written):
            if any(covers(tree, path) for tree in trees) and not resolved.hidden.covers(path):
                raise PolicyError(
                    f"{clause}: the program can read this file, so its value would not stay outside",
                    hint=f"hide it: deny = [{show(path)}], or move it out of what the policy shows",
                )


def _check_environment(private: Environment, policy: Policy) -> None:
    private.check()
    if policy.workspace is not None:
        raise PolicyError(
            "workspace: a sandbox with a private environment has no workspace of the host",
            hint="leave it out: the environment has a /workspace of its own",
        )


def _of_the_system(paths: tuple[str, ...], private: Environment) -> tuple[str, ...]:
    """Return the paths of a profile that an environment shows: none of the caller's home or below a mount."""
    if private.image:
        return ()
    return tuple(
        path
        for path in paths
        if path.startswith("/") and not any(covers(tree, path.removesuffix("?")) for tree in private.taken)
    )


def _refuse_in_environment(grants: dict[str, Grant], private: Environment) -> None:
    """Refuse a grant at a place where the environment has something of its own."""
    for path, grant in grants.items():
        for tree in private.taken:
            if covers(tree, path) or covers(path, tree):
                raise PolicyError(
                    f"{grant.clause}: {path} meets {tree}, which this sandbox has of its own",
                    hint="grant paths beside it",
                )


def _root_inside(caller: Caller, private: Environment) -> Caller:
    """Return the caller as programs of an environment see themselves."""
    return msgspec.structs.replace(caller, user="root", group="root", home=private.home)


def _repositories(
    policy: Policy, grants: Iterable[Grant], workspace: Grant | None, hidden: HiddenPaths, caller: Caller
) -> protected_paths.Repositories:
    """Find the repositories where a program can write for real; the search is imported only for that."""
    if not any(one is not None and one.access == "write" for one in (*grants, workspace)):
        return protected_paths.Repositories()
    from stockade.resolve.paths.protected_search import find

    return find(policy, grants, workspace, hidden, caller)


def _show_repository(
    policy: Policy, opener: _PathOpener, grants: dict[str, Grant], workspace: str, unnamed: UnnamedTrees
) -> LinkedWorktree | None:
    """Show the repository of a workspace that is a linked worktree, read-only; see `git_repository`."""
    try:
        if not stat.S_ISREG(os.lstat(f"{workspace}/.git").st_mode) or ".git" in policy.deny:
            return None
    except OSError:
        return None
    from stockade.resolve.git_repository import linked_worktree

    found = linked_worktree(workspace, opener.caller)
    if found is None or any(covers(path, found.repository) for path in grants):
        return None
    if not unnamed.take(found.hidden):
        return None
    if mounted_below(found.repository):
        return None
    try:
        grant = opener.grant(
            literal(found.repository), "read", "the repository of this worktree", pinned=True
        )
    except PolicyError:  # the run works without it
        return None
    assert grant is not None  # only an optional path may be absent
    grants[grant.path] = grant
    return found


def _git_identity(caller: Caller, workspace: str, command: str) -> bytes:
    """Return git's configuration with the user's name and e-mail, if the workspace is in a repository.

    The sandboxes of a Python program get it for every command, so that they share what is made ahead. The
    `stockade` command starts only one, and reads no configuration for a command that does not start git.
    """
    if not workspace or not (caller.from_python or starts_others(command, caller, False)):
        return b""
    if not _is_in_repository(workspace):
        return b""
    from stockade.resolve.git_repository import identity_file

    return identity_file(caller, workspace)


def _is_in_repository(directory: str) -> bool:
    while not os.path.lexists(f"{directory}/.git"):
        if directory == (directory := os.path.dirname(directory)):
            return False
    return True


def _protect_policies(policy: Policy, workspace: str, own: tuple[str, ...]) -> Policy:
    """Also protect the user's own policy files: a commit would land what a run wrote into them."""
    inner = [path for path in own if path != workspace and covers(workspace, path)]
    if not inner:
        return policy
    relative = [quote_protected(os.path.relpath(path, workspace)) for path in inner]
    return msgspec.structs.replace(
        policy,
        protect=(*policy.protect, *relative),
        unprotect=tuple(path for path in policy.unprotect if path not in relative),
    )


def _follow_links(
    policy: Policy, base: Profile, opener: _PathOpener, workspace: str
) -> dict[str, Programs] | None:
    """Refuse paths that leave their tree through a link, and find the files that may be executed."""
    if policy.exec is None and not any(one.lookup.links for one in opener.named):
        return None
    from stockade.resolve.paths import links

    bounds = links.Bounds.of(opener.named, workspace, opener.caller.cwd, opener.caller.home)
    links.check(opener.named, bounds, base.system)
    return links.programs(policy.exec, bounds, opener.expand)


def unfit(path: str, caller: Caller, state: str) -> str:
    """Say why a directory cannot be the workspace of a run; empty if it can.

    Only what depends on the directory is looked at: the run resolves everything else.
    """
    policy = Policy(workspace=literal(path))
    opener, grants = _PathOpener(caller, state, False, None), dict[str, Grant]()
    try:
        workspace = opener.workspace(literal(path), "overlay")
        _follow_links(policy, profile(policy.profile), opener, workspace.path)
        if caller.uid == 0:
            _show_mounted(workspace, opener, grants)
        _refuse_foreign_unless_root(_without_inner_mounts(workspace, opener, grants), caller)
    except PolicyError as error:
        return error.message
    finally:
        for descriptor in opener.open:
            os.close(descriptor)
    return ""


def ungrantable(path: str, access: str, caller: Caller, state: str) -> str:
    """Say why no policy can show a path of the host, or not with this access; empty if one can."""
    opener = _PathOpener(caller, state, False, None)
    try:
        opener.grant(literal(path), access, access, pinned=False)
    except PolicyError as error:
        return error.message.removeprefix(f"{access}: ")
    except OSError as error:
        return error.strerror or "it cannot be looked up"
    finally:
        for descriptor in opener.open:
            os.close(descriptor)
    return "the sandbox has an /etc of its own" if path == "/etc" else ""


def _toolchain(
    policy: Policy,
    base: Profile,
    opener: _PathOpener,
    grants: dict[str, Grant],
    workspace: Grant | None,
    command: str,
    start: str,
    unnamed: UnnamedTrees,
) -> Toolchain:
    """Grant the installs of the user that the command needs."""
    mine = [grant for grant in grants.values() if not grant.clause.startswith("profile")]
    mine += [] if workspace is None else [workspace]
    project = "" if workspace is None else workspace.path
    found = toolchain(
        policy,
        base,
        opener.caller,
        command,
        project,
        unnamed,
        lambda: Surroundings(
            home=opener.home.rstrip("/"),
            environ=opener.caller.environ,
            search=search_path(opener.caller),
            cwd=os.path.join(project or opener.caller.home, start).rstrip("/") or "/",
            caller_cwd=opener.caller.cwd or "/",
            project=project,
            uid=opener.caller.uid,
            shown=(*shown_by(base), *(path for path, grant in grants.items() if grant not in mine)),
            granted=tuple(grant.path for grant in mine),
            own=(
                opener.state,
                opener.config,
                *opener.secrets,
                *(grant.path for grant in mine if grant is workspace or grant.access == "write"),
            ),
            path=tuple(base.env["PATH"].split(":")),
        ),
    )
    for tree, name in found.trees.items():
        # Pinned: if the path leads elsewhere by now, the run is refused. The ? is not part of the name.
        grant = opener.grant(f"{literal(tree)}?", "read", f"toolchain = {show(name)}", pinned=True)
        if grant is not None:
            grants.setdefault(grant.path, grant)
    return found


def _host_network(
    policy: Policy, base: Profile, opener: _PathOpener, grants: dict[str, Grant], workspace: Grant | None
) -> HostNetwork | None:
    """Grant the certificates that the user's environment names, for a program with a network."""
    from stockade.resolve import host_network

    if not host_network.wanted(policy):
        return None
    trees = [*shown_by(base), *grants, *(() if workspace is None else (workspace.path,))]
    found = host_network.find(
        policy,
        opener.caller.environ,
        opener.caller.home,
        # Most variables name the same few files.
        functools.cache(lambda path: any(covers(tree, path) for tree in trees)),
        lambda path, name: opener.grant(
            f"{literal(path)}?", "read", f"{host_network.clause(policy)}, for {name}", pinned=True
        ),
    )
    grants.update((grant.path, grant) for grant in found.grants)
    return found


def environment(
    policy: Policy,
    base: Profile,
    caller: Caller,
    before: tuple[str, ...] = (),
    after: tuple[str, ...] = (),
    network: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Build the whole environment inside: no variable of the host unless it is passed by name.

    PATH has the directories in `before`, then those of the profile, then those in `after`. `network` are the
    variables that the host's network needs.
    """
    environ = {"HOME": caller.home, "USER": caller.user, "LOGNAME": caller.user, "SHELL": "/bin/sh"}
    environ.update(base.env)
    for name in (*base.pass_env, *policy.pass_env):
        if (value := caller.environ.get(name)) is not None:
            environ[name] = value
    environ.update(network or {})
    if before or after:
        environ["PATH"] = ":".join((*before, environ["PATH"], *after))
    environ.update(policy.env)
    return environ


def effective(written: Limits, default: Limits) -> Limits:
    """Return the limits in force: the profile's where the policy writes none."""
    if written == NO_LIMITS:
        return default
    names = Limits.__struct_fields__
    return Limits(*(getattr(default if getattr(written, name) is None else written, name) for name in names))


def _check_durable(resolved: ResolvedPolicy) -> None:
    if not resolved.needs_image:
        return
    from stockade.workspace import disk_image

    if why := disk_image.missing():
        raise PolicyError(
            f"workspace.durable = true: under limits.disk = {resolved.limits.disk} changes stay in memory "
            f"until the sandbox ends, and a killed supervisor loses them, because {why}",
            hint="leave one of the two out, or run as root on a machine with loop devices and mkfs.ext4",
        )


class _PathOpener:
    """Opens paths for one caller and refuses those that no policy may grant."""

    def __init__(self, caller: Caller, state: str, pinned: bool, table: bytes | None) -> None:
        self.caller, self.pinned = caller, pinned
        self.open: list[int] = []
        self.named: list[NamedPath] = []
        self._state, self._table = state, table

    @functools.cached_property
    def names(self) -> Callable[[str], list[str]]:
        """Finds every name that a path has through mounts; a policy without paths needs none."""
        return functools.cache(lambda path: mounted_names(path, self._table))

    @functools.cached_property
    def home(self) -> str:
        return os.path.realpath(self.caller.home)

    @functools.cached_property
    def state(self) -> str:
        return os.path.realpath(self._state)

    @functools.cached_property
    def config(self) -> str:
        from stockade.resolve.config_files import config_dir

        return os.path.realpath(config_dir(self.caller.environ, self.caller.home))

    @functools.cached_property
    def policies(self) -> tuple[str, ...]:
        """The directory of the user's own policy and its layers, and the targets of links in it.

        With the links on the way there.
        """
        from stockade.resolve.config_files import config_dir

        place = config_dir(self.caller.environ, self.caller.home)
        found = [self.config, *names_on_the_way(place)]
        for inner in ("", "/policies", "/policies/category", "/policies/agent"):
            with contextlib.suppress(OSError), os.scandir(place + inner) as entries:
                for entry in entries:
                    found += names_on_the_way(entry.path) if entry.is_symlink() else ()
        return tuple(dict.fromkeys(found))

    @functools.cached_property
    def secrets(self) -> tuple[str, ...]:
        """The secrets of receipts outside the state directory: a program that reads them can sign."""
        from stockade.resolve.config_files import config_file

        caller = self.caller
        if not os.path.lexists(config_file(caller.environ, caller.home)):
            return ()
        from stockade.resolve.receipt_settings import settings

        return settings(caller.environ, caller.home).secrets

    def grant(self, path: str, access: str, clause: str, *, pinned: bool) -> Grant | None:
        optional = path.endswith("?")
        found = self._find(path.removesuffix("?"), clause, access, optional=optional, pinned=pinned)
        if found is None:
            return None
        fd, name, is_dir = found
        self._refuse(name, access == "write", clause)
        return Grant(name, "write" if access == "write" else "read", is_dir, clause, fd)

    def workspace(self, path: str, mode: str) -> Grant:
        clause = f"workspace = {show(path)}"
        access = MODES[mode]
        found = self._find(path, clause, access, optional=False, pinned=self.pinned)
        assert found is not None  # only an optional path may be absent
        fd, name, is_dir = found
        if not is_dir:
            raise PolicyError(f"{clause}: {name} is not a directory", hint="name the directory that it is in")
        if covers(name, self.home):
            what = "your home" if name == self.home else "the root" if name == "/" else "above your home"
            raise PolicyError(f"{clause}: {name} is {what}", hint="use a directory below it")
        for tree in SYSTEM:
            if covers(tree, name):
                raise PolicyError(f"{clause}: {name} is a system directory", hint="use one of your own")
        self._refuse(name, mode == "rw", clause)
        if mode == "overlay" and covers(self.config, name):
            raise PolicyError(f"{clause}: your own policy is in {self.config}", hint="use another directory")
        if not os.access(name, os.R_OK | os.X_OK):
            hint = f"run `chmod u+rwx {typed(name)}` if it is yours, or ask its owner"
            raise PolicyError(f"{clause}: you may not read and enter {name}", hint=hint)
        return Grant(name, access, True, clause, fd)

    def expand(self, path: str, clause: str) -> str:
        caller = self.caller
        return expand(path, clause, home=caller.home, cwd=caller.cwd, environ=caller.environ)

    def _find(
        self, path: str, clause: str, access: str, *, optional: bool, pinned: bool
    ) -> tuple[int, str, bool] | None:
        wanted = self.expand(path, clause)
        found = look_up(wanted)
        wanted = plain(wanted)
        key = "workspace" if clause.startswith("workspace") else access
        self.named.append(NamedPath(clause, access, found, key))
        if (error := found.error) is not None:
            if error.errno in _MISSING:
                if optional:
                    return None
                _raise_missing(clause, wanted, found.links, key)
            if error.errno in _USED_UP:
                raise error  # not a fault of the policy
            hint = f"you may not enter a directory on the way; run `namei -l {wanted}` to see which"
            raise PolicyError(
                f"{clause}: cannot open {wanted}: {error.strerror}",
                hint=hint if error.errno == errno.EACCES else "check the path",
            )
        self.open.append(found.fd)
        if found.moved or (pinned and found.name != wanted):
            raise PolicyError(f"{clause}: {wanted} was replaced while it was looked up", hint="try again")
        if not (stat.S_ISDIR(found.mode) or stat.S_ISREG(found.mode)):
            raise PolicyError(
                f"{clause}: {found.name} is a {found.kind}, which would lead out of the sandbox",
                hint="grant files and directories only",
            )
        return found.fd, found.name, stat.S_ISDIR(found.mode)

    def _refuse(self, name: str, writable: bool, clause: str) -> None:
        if name == "/":
            raise PolicyError(
                f"{clause}: grants the whole file system", hint="grant only the directories that are needed"
            )
        for tree in OWN:
            if covers(tree, name):
                raise PolicyError(f"{clause}: the sandbox has a {tree} of its own", hint="leave it out")
        if any(covers(name, one) or covers(one, name) for one in self.names(self.state)):
            raise PolicyError(
                f"{clause}: Stockade's own state is in {self.state}",
                hint="grant the directories beside it, or set STOCKADE_HOME to a directory elsewhere",
            )
        for secret in self.secrets:
            if any(covers(name, one) for one in self.names(secret)):
                raise PolicyError(
                    f"{clause}: contains {secret}, which your config.toml names under [receipts]",
                    hint="move that file to a directory that is never granted, and correct config.toml",
                )
        if not writable:
            return
        for tree in SYSTEM:
            if covers(tree, name):
                raise PolicyError(
                    f"{clause}: {tree} belongs to the system", hint="write elsewhere, then copy"
                )
        if covers(name, self.home):
            raise PolicyError(
                f"{clause}: contains your whole home", hint="grant only the directories that are needed"
            )
        # Otherwise a run could write the policy of the next one, or the program that raises its walls.
        own = [("your own policy", path) for path in self.policies]
        for what, place in (*own, ("Stockade itself", PACKAGE)):
            if covers(name, place) or covers(place, name):
                raise PolicyError(f"{clause}: {what} is in {place}", hint="grant the paths beside it")


def _show_mounted(workspace: Grant, opener: _PathOpener, grants: dict[str, Grant]) -> None:
    """Show root what is mounted in the workspace, read-only, since an overlay covers one file system."""
    for point, kind in mounted_below(workspace.path).items():
        written = any(grant.access == "write" and covers(path, point) for path, grant in grants.items())
        if kind in HOLDING and not written:
            clause = f"{workspace.clause}, where {point} is mounted"
            grant = opener.grant(literal(point), "read", clause, pinned=True)
            assert grant is not None  # only an optional path may be absent
            grants.setdefault(grant.path, grant)


def _without_inner_mounts(grant: Grant, opener: _PathOpener, grants: dict[str, Grant]) -> Grant:
    """Refuse a directory with mounts in it, unless root can mount it without them.

    An overlay shows none of the file systems that are mounted in its directory. Read-only directories are
    shown through an overlay too, because the sockets in them must not be reached. If each of those file
    systems has a grant of its own, root can mount the directory alone; other users cannot.
    """
    if not grant.is_dir or grant.access == "write" or not (inner := mounted_below(grant.path)):
        return grant
    own = [path for path in grants if path != grant.path and covers(grant.path, path)]
    if all(any(covers(path, point) for path in own) for point in inner):
        mount = alone(grant.fd)
        if mount is not None:
            os.close(mount)
            return msgspec.structs.replace(grant, alone=True)
    fix = (
        'use `--mode rw` (workspace.mode = "rw")'
        if grant.access == "overlay"
        else 'grant directories beside them, or write accept = ["ipc"] to allow access to sockets in it'
    )
    if grant.clause.startswith("toolchain"):
        fix = f"use --no-toolchain, and grant what is needed of {grant.path} with --read"
    elif opener.caller.uid == 0:
        fix = f"name each of them in read or write, or {fix}"
    raise PolicyError(f"{grant.clause}: other file systems are mounted in it: {', '.join(inner)}", hint=fix)


def _refuse_foreign_unless_root(workspace: Grant, caller: Caller) -> None:
    """Refuse files that an ordinary user's overlay cannot copy up, if one is among the nearest entries."""
    if caller.uid != 0 and sys.platform == "linux":
        refuse_foreign(workspace, caller)


def refuse_foreign(workspace: Grant, caller: Caller, otherwise: str = "run as root") -> None:
    """Refuse files that cannot be copied up in a user namespace with one user and one group."""
    from stockade.resolve import owners

    if found := owners.first(workspace.fd, caller.uid, caller.gid):
        path = f"{workspace.path}/{found.path}"
        raise PolicyError(
            f"{workspace.clause}: {path} belongs to {found.owner}, not to {caller.user}:{caller.group}: "
            "you may write there, but an overlay cannot",
            hint=f"run `sudo chown {caller.user}:{caller.group} {typed(path)}`, or use mode ro or rw, "
            f"or {otherwise}; `stockade workspaces check` lists every such path",
        )


def _apply_workspace_mode(grants: dict[str, Grant], workspace: Grant) -> None:
    """Drop a grant of the workspace's own path, whose mode counts; refuse one that contradicts the mode."""
    same = grants.pop(workspace.path, None)
    if same is not None and same.access == "write" and workspace.access != "write":
        raise PolicyError(
            f"{same.clause}: {same.path} is also the workspace, which is not writable in this mode",
            hint='use `--mode rw` (workspace.mode = "rw"), or leave one of them out',
        )


def _raise_missing(clause: str, path: str, through: tuple[PathLink, ...], key: str) -> NoReturn:
    if through:
        message = f"{clause}: {path} does not exist: the link {through[0].at} leads to {through[0].leads}"
        raise PolicyError(one_line(message), hint="remove the link, or name the path that you mean")
    parent = os.path.dirname(os.path.normpath(path))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    advice = f"; `mkdir -p {typed(path)}` makes it" if key == "write" else ""
    advice += f'; write "{path}?" if it may be missing' if key != "workspace" else ""
    raise PolicyError(
        f"{clause}: {path} does not exist", hint=f"{parent} exists, the rest of the path does not{advice}"
    )
