"""Where a policy's paths meet the file system: once, here, and by descriptor from then on.

Each path is expanded, followed through links to its real name, opened as
O_PATH without following anything more, and the descriptor asked for its name:
if that is not the name that was checked, somebody moved something in between
and the run is refused. Backends mount the descriptors, so no path is looked
up twice.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NoReturn

import msgspec

from stockade.controls import Control
from stockade.errors import PolicyError
from stockade.policy.caller import Caller
from stockade.policy.model import Limits, Policy
from stockade.policy.mounted import HOLDING, alone, mounted_below, mounted_names
from stockade.policy.profile import Profile, profile
from stockade.policy.programs import Programs, find
from stockade.policy.toolchain import Surroundings, Toolchain, shown_by, toolchain
from stockade.policy.values import literal, show

#: Inside they are the sandbox's own, so a grant in them could not appear.
OWN = ("/proc", "/sys", "/dev")
#: What the machine itself runs on: never writable, at any depth.
SYSTEM = ("/etc", "/usr", "/boot", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", *OWN)

# Not every system has them; there policies can be checked, and nothing runs.
_OPEN = getattr(os, "O_PATH", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_MISSING = (errno.ENOENT, errno.ENOTDIR)
_USED_UP = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

#: Each is an operation of the plan, in each tree that shows it.
MOST_DENIED = 1000
NO_LIMITS = Limits()
PACKAGE = os.path.realpath(os.path.dirname(os.path.dirname(__file__)))


class Grant(msgspec.Struct, frozen=True):
    """One path that is visible inside, held open by a descriptor."""

    path: str
    access: Literal["read", "write", "overlay"]
    is_dir: bool
    clause: str
    """The words of the policy that grant it, such as `read = "./data"`."""
    fd: int
    alone: bool = False
    """Whether the directory is shown without what is mounted in it."""


class Resolved(msgspec.Struct, frozen=True):
    """A policy met with this machine's files and this caller. Owns the descriptors of its grants."""

    policy: Policy
    profile: Profile
    caller: Caller
    grants: tuple[Grant, ...]
    workspace: Grant | None
    protected: tuple[tuple[str, bool], ...]
    """Paths below the workspace that stay as they are, and whether each exists."""
    denied: tuple[str, ...]
    """Real names that must not be seen, none of them in another."""
    programs: dict[str, Programs] | None
    """By pattern, the files that may be executed; None for whatever can be."""
    environ: dict[str, str]
    limits: Limits
    links: dict[str, str]
    """Links of the host that lead to what is granted, made again inside."""
    _open: list[int]

    @property
    def needs_image(self) -> bool:
        """Whether what is written is limited, and must outlive the supervisor all the same."""
        rule = self.policy.workspace
        limited = self.limits.disk is not None
        return limited and rule is not None and rule.mode == "overlay" and rule.durable

    def close(self) -> None:
        """Close every descriptor; harmless when repeated."""
        while self._open:
            os.close(self._open.pop())

    def __enter__(self) -> Resolved:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def resolve(
    policy: Policy,
    caller: Caller,
    state: str,
    *,
    pinned: bool = False,
    command: str = "",
    table: bytes | None = None,
) -> Resolved:
    """Find and open everything the policy names, and what the command needs.

    `state` is Stockade's own directory, which no grant may touch. `pinned` says
    that the policy's paths are real names already (see `discover`): a link met
    on the way was put there since, and is refused. `table` is the mount table for
    a process that confines itself: nothing is laid over what is mounted in a tree.
    """
    base = profile(policy.profile)
    opener, mounts = _Opener(caller, state, pinned, table), table is None
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
        protected: tuple[tuple[str, bool], ...] = ()
        if policy.workspace is not None:
            workspace = opener.workspace(policy.workspace.path, policy.workspace.mode)
            _settle(grants, workspace)
            protected = tuple((path, _exists(path, workspace.fd)) for path in policy.protect)
        chain = _toolchain(policy, base, opener, grants, workspace, command)
        if mounts and workspace is not None and workspace.access != "write" and caller.uid == 0:
            _show_mounted(workspace, opener, grants)
        denied = _deny((*policy.deny, *map(literal, chain.hidden)), caller, grants, workspace)
        sockets = Control.IPC in policy.accept
        for path, grant in grants.items():
            if mounts and (not sockets or any(covers(path, name) for name in denied)):
                grants[path] = _by_itself(grant, opener, grants)
        if workspace is not None and mounts:
            workspace = _by_itself(workspace, opener, grants)
        if workspace is not None and workspace.access == "overlay":
            _refuse_foreign(workspace, caller)
        resolved = Resolved(
            policy=policy,
            profile=base,
            caller=caller,
            grants=tuple(grants[path] for path in sorted(grants)),
            workspace=workspace,
            protected=protected,
            denied=denied,
            programs=_programs(policy.exec, caller),
            environ=environment(policy, base, caller, chain.path),
            limits=effective(policy.limits, base.limits),
            links=chain.links,
            _open=opener.open,
        )
        _refuse_durable(resolved)
        return resolved
    except BaseException:
        for fd in opener.open:
            os.close(fd)
        raise


def unfit(path: str, caller: Caller, state: str) -> str:
    """Why a directory cannot be the workspace of a run; empty if it can."""
    try:
        resolve(Policy(workspace=literal(path)), caller, state).close()
    except PolicyError as error:
        return error.message
    return ""


def _toolchain(
    policy: Policy,
    base: Profile,
    opener: _Opener,
    grants: dict[str, Grant],
    workspace: Grant | None,
    command: str,
) -> Toolchain:
    """Grant what the command needs of the caller's installs."""
    mine = [grant for grant in grants.values() if not grant.clause.startswith("profile")]
    mine += [] if workspace is None else [workspace]
    found = toolchain(
        policy,
        base,
        opener.caller,
        command,
        lambda: Surroundings(
            home=opener.home.rstrip("/"),
            environ=opener.caller.environ,
            cwd=opener.caller.home if workspace is None else workspace.path,
            caller_cwd=opener.caller.cwd or "/",
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
        # Pinned: what was found is what is shown, or the run is refused. The ? is not part of the name.
        grant = opener.grant(f"{literal(tree)}?", "read", f"toolchain = {show(name)}", pinned=True)
        if grant is not None:
            grants.setdefault(grant.path, grant)
    return found


def environment(policy: Policy, base: Profile, caller: Caller, path: tuple[str, ...] = ()) -> dict[str, str]:
    """The whole environment inside: nothing of the host's unless it is passed by name.

    `path` is searched before the directories of the profile.
    """
    environ = {"HOME": caller.home, "USER": caller.user, "LOGNAME": caller.user, "SHELL": "/bin/sh"}
    environ.update(base.env)
    for name in (*base.pass_env, *policy.pass_env):
        if (value := caller.environ.get(name)) is not None:
            environ[name] = value
    if path:
        environ["PATH"] = ":".join((*path, environ["PATH"]))
    environ.update(policy.env)
    return environ


def effective(written: Limits, default: Limits) -> Limits:
    """The limits that hold: the profile's where the policy writes none."""
    if written == NO_LIMITS:
        return default
    names = Limits.__struct_fields__
    return Limits(*(getattr(default if getattr(written, name) is None else written, name) for name in names))


def expand(path: str, clause: str, *, home: str, cwd: str, environ: Mapping[str, str]) -> str:
    """The path as an absolute one: ~ and $VARIABLE replaced ($$ is a $), relative ones counted from `cwd`."""
    found = _substituted(path, clause, environ) if "$" in path else path
    if path.startswith("~"):
        found = home + found[1:]
    if "\0" in found:
        raise PolicyError(f"{clause}: has a NUL byte in it")
    if found.startswith("/"):
        return found
    if not cwd:
        raise PolicyError(f"{clause}: is relative, and the current directory is gone")
    return f"{cwd}/{found}"


def _substituted(path: str, clause: str, environ: Mapping[str, str]) -> str:
    done, rest = "", path
    while "$" in rest:
        before, _, rest = rest.partition("$")
        done += before
        if rest.startswith("$"):
            done, rest = done + "$", rest[1:]
            continue
        if rest.startswith("{"):
            name, _, rest = rest[1:].partition("}")
        else:
            end = next((i for i, c in enumerate(rest) if not (c.isalnum() or c == "_")), len(rest))
            name, rest = rest[:end], rest[end:]
        value = environ.get(name)
        if not value:
            raise PolicyError(f"{clause}: ${name} is not set", hint="set it, or write $$ for a $ in a name")
        if not done and not value.startswith("/"):
            raise PolicyError(f"{clause}: ${name} is not an absolute path but {show(value)}")
        done += value
    return done + rest


def real(path: str, home: str, cwd: str, environ: Mapping[str, str], clause: str) -> str:
    """The real name of a policy's path as it is now, with its ? if it has one; missing parts are kept."""
    optional = "?" if path.endswith("?") else ""
    found = expand(path.removesuffix("?"), clause, home=home, cwd=cwd, environ=environ)
    return literal(os.path.realpath(found)) + optional


def names_of(path: str, *, home: str, cwd: str, environ: Mapping[str, str]) -> list[str]:
    """The real names that a denied path goes by: its own and, where it is a link, those it leads to.

    The link's own name is among them because the host may put a file in its place.
    """
    name = expand(path, f"deny = {show(path)}", home=home, cwd=cwd, environ=environ)
    found: list[str] = []
    while True:
        above, last = os.path.split(name.rstrip("/"))
        # A link may lead to a name that ends in a dot or two.
        plain = last not in ("", ".", "..")
        name = os.path.join(os.path.realpath(above), last) if plain else os.path.realpath(name)
        if name in found:  # a link that leads to itself
            return found
        found.append(name)
        try:
            name = os.path.join(os.path.dirname(name), os.readlink(name))
        except OSError:
            return found


def _deny(
    paths: tuple[str, ...], caller: Caller, grants: dict[str, Grant], workspace: Grant | None
) -> tuple[str, ...]:
    """What is hidden, as real names; grants that lie in it are taken out."""
    found: dict[str, str] = {}
    for path in paths:
        names = names_of(path, home=caller.home, cwd=caller.cwd, environ=caller.environ)
        for name in names:
            found[name] = clause = f"deny = {show(path)}"
            for tree in OWN:
                if covers(tree, name):
                    raise PolicyError(f"{clause}: the sandbox has a {tree} of its own", hint="leave it out")
            if name in ("/", "/etc"):
                raise PolicyError(f"{clause}: no program could run", hint="name what is to be hidden in it")
            if workspace is not None and covers(name, workspace.path):
                raise PolicyError(f"{clause}: the workspace is in it", hint="deny paths in the workspace")
    for place in [place for place in grants if any(covers(name, place) for name in found)]:
        del grants[place]
    for grant in (*grants.values(), workspace):
        if grant is None or grant.access != "write":
            continue
        for name, clause in found.items():
            if covers(grant.path, name):
                # A mount over the file would come off when the host replaces it.
                raise PolicyError(
                    f"{clause}: {grant.path} is writable for real: nothing can be hidden in it for good",
                    hint='use workspace.mode = "overlay" or "ro"'
                    if grant is workspace
                    else "grant the paths beside it instead",
                )
    if len(found) > MOST_DENIED:
        raise PolicyError(f"deny: {len(found)} paths, more than {MOST_DENIED}", hint="deny what they are in")
    return tuple(sorted(name for name in found if found.keys().isdisjoint(_above(name))))


def _above(name: str) -> Iterator[str]:
    """The directories that a path is in."""
    while (name := os.path.dirname(name)) != "/":
        yield name


def _programs(patterns: tuple[str, ...] | None, caller: Caller) -> dict[str, Programs] | None:
    """What may be executed, by the pattern that names it."""
    if patterns is None:
        return None
    found: dict[str, Programs] = {}
    for pattern in patterns:
        clause = f"exec = {show(pattern)}"
        wanted = expand(
            pattern.removesuffix("?"), clause, home=caller.home, cwd=caller.cwd, environ=caller.environ
        )
        programs = find(os.path.normpath(wanted), clause)
        if programs.files or programs.trees:
            found[pattern] = programs
        elif not pattern.endswith("?"):
            raise PolicyError(
                f"{clause}: there is no such program",
                hint=f'name files that can be executed; "{pattern}?" would be optional',
            )
    return found


def _refuse_durable(resolved: Resolved) -> None:
    if not resolved.needs_image:
        return
    from stockade.workspace import image

    if why := image.missing():
        raise PolicyError(
            f"workspace.durable = true: under limits.disk = {resolved.limits.disk} the changes are in memory "
            f"until the sandbox ends, and a killed supervisor loses them, because {why}",
            hint="leave one of the two out, or run as root where loop devices and mkfs.ext4 are",
        )


def covers(tree: str, path: str) -> bool:
    """Whether the path is the tree or in it; both are real names."""
    return path == tree or path.startswith(tree if tree.endswith("/") else tree + "/")


class _Opener:
    """Opens paths for one caller and refuses those that no policy may grant."""

    def __init__(self, caller: Caller, state: str, pinned: bool, table: bytes | None) -> None:
        self.caller, self.pinned = caller, pinned
        self.names = functools.cache(lambda path: mounted_names(path, table))
        self.open: list[int] = []
        self._state = state

    @functools.cached_property
    def home(self) -> str:
        return os.path.realpath(self.caller.home)

    @functools.cached_property
    def state(self) -> str:
        return os.path.realpath(self._state)

    @functools.cached_property
    def config(self) -> str:
        from stockade.policy.load import config_dir

        return os.path.realpath(config_dir(self.caller.environ, self.caller.home))

    @functools.cached_property
    def secrets(self) -> tuple[str, ...]:
        """What signs receipts and is not in the state directory: whoever sees it can sign."""
        from stockade.policy.load import config_file

        caller = self.caller
        if not os.path.lexists(config_file(caller.environ, caller.home)):
            return ()
        from stockade.receipt.settings import settings

        return settings(caller.environ, caller.home).secrets

    def grant(self, path: str, access: str, clause: str, *, pinned: bool) -> Grant | None:
        optional = path.endswith("?")
        found = self._find(path.removesuffix("?"), clause, optional=optional, pinned=pinned)
        if found is None:
            return None
        fd, name, is_dir = found
        self._refuse(name, access == "write", clause)
        return Grant(name, "write" if access == "write" else "read", is_dir, clause, fd)

    def workspace(self, path: str, mode: str) -> Grant:
        clause = f"workspace = {show(path)}"
        found = self._find(path, clause, optional=False, pinned=self.pinned)
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
        if not os.access(name, os.R_OK | os.X_OK):
            hint = f"`chmod u+rwx {name}` if it is yours, or ask its owner"
            raise PolicyError(f"{clause}: you may not read and enter {name}", hint=hint)
        access: dict[str, Any] = {"ro": "read", "rw": "write", "overlay": "overlay"}
        return Grant(name, access[mode], True, clause, fd)

    def _find(self, path: str, clause: str, *, optional: bool, pinned: bool) -> tuple[int, str, bool] | None:
        caller = self.caller
        wanted = expand(path, clause, home=caller.home, cwd=caller.cwd, environ=caller.environ)
        try:
            name = os.path.realpath(wanted, strict=True)
            fd = os.open(name, _OPEN)
        except OSError as error:
            if error.errno in _MISSING:
                if optional:
                    return None
                _missing(clause, wanted, hint=not clause.startswith("workspace"))
            if error.errno in _USED_UP:
                raise  # no policy is to blame
            hint = f"you may not enter a directory on the way: `namei -l {wanted}` shows which"
            raise PolicyError(
                f"{clause}: cannot open {wanted}: {error.strerror}",
                hint=hint if error.errno == errno.EACCES else "check the path",
            ) from None
        self.open.append(fd)
        moved = sys.platform == "linux" and os.readlink(f"/proc/self/fd/{fd}") != name
        if moved or (pinned and name != wanted):
            raise PolicyError(f"{clause}: {wanted} was replaced while being looked up", hint="try again")
        mode = os.fstat(fd).st_mode
        if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode)):
            raise PolicyError(
                f"{clause}: {name} is {_kind(mode)}: it would lead out of the sandbox",
                hint="grant files and directories only",
            )
        return fd, name, stat.S_ISDIR(mode)

    def _refuse(self, name: str, writable: bool, clause: str) -> None:
        if name == "/":
            raise PolicyError(f"{clause}: the whole file system", hint="grant the trees that are needed")
        for tree in OWN:
            if covers(tree, name):
                raise PolicyError(f"{clause}: the sandbox has a {tree} of its own", hint="leave it out")
        if any(covers(name, one) or covers(one, name) for one in self.names(self.state)):
            raise PolicyError(
                f"{clause}: Stockade's own state is in {self.state}",
                hint="grant the directories beside it, or set STOCKADE_HOME to a place elsewhere",
            )
        for secret in self.secrets:
            if any(covers(name, one) for one in self.names(secret)):
                raise PolicyError(
                    f"{clause}: {secret} is in it, which your config.toml names under [receipts]",
                    hint="move it to a directory of its own that is granted to no program, and name it there",
                )
        if not writable:
            return
        for tree in SYSTEM:
            if covers(tree, name):
                raise PolicyError(
                    f"{clause}: {tree} belongs to the system", hint="write elsewhere, then copy"
                )
        if covers(name, self.home):
            raise PolicyError(f"{clause}: that is all of your home", hint="grant the trees that are needed")
        # Else a run could write the policy of the next one, or the program that raises its walls.
        for what, place in (("your own policy", self.config), ("Stockade itself", PACKAGE)):
            if covers(name, place) or covers(place, name):
                raise PolicyError(f"{clause}: {what} is in {place}", hint="grant what is beside it")


def _show_mounted(workspace: Grant, opener: _Opener, grants: dict[str, Grant]) -> None:
    """Let root see what is mounted in the workspace: read-only, since an overlay is of one file system."""
    for point, kind in mounted_below(workspace.path).items():
        written = any(grant.access == "write" and covers(path, point) for path, grant in grants.items())
        if kind in HOLDING and not written:
            clause = f"{workspace.clause}, where {point} is mounted"
            grant = opener.grant(literal(point), "read", clause, pinned=True)
            assert grant is not None  # only an optional path may be absent
            grants.setdefault(grant.path, grant)


def _by_itself(grant: Grant, opener: _Opener, grants: dict[str, Grant]) -> Grant:
    """The grant of a directory that is shown through an overlay, which shows none of what is mounted in it.

    Read-only directories are shown through one too, because the sockets in them must not be reached. Where
    each of those file systems is granted by itself, root has a mount of the directory alone; others cannot.
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
        'use workspace.mode = "rw"'
        if grant.access == "overlay"
        else 'grant directories beside them, or write accept = ["ipc"] to let sockets in it be reached'
    )
    if grant.clause.startswith("toolchain"):
        fix = f"show what is needed of {grant.path} by hand, and write --no-toolchain"
    elif opener.caller.uid == 0:
        fix = f"name each in read or write, or {fix}"
    raise PolicyError(f"{grant.clause}: other file systems are mounted in it: {', '.join(inner)}", hint=fix)


def _refuse_foreign(workspace: Grant, caller: Caller) -> None:
    """Refuse what an ordinary user's overlay cannot copy up, as far as it is soon found."""
    if caller.uid != 0 and sys.platform == "linux":
        refuse_foreign(workspace, caller)


def refuse_foreign(workspace: Grant, caller: Caller, otherwise: str = "run as root") -> None:
    """The same for anybody whose user namespace knows one user and one group."""
    from stockade.workspace import owners

    if found := owners.first(workspace.fd, caller.uid, caller.gid):
        path = f"{workspace.path}/{found.path}"
        raise PolicyError(
            f"{workspace.clause}: {path} belongs to {found.owner}, not to {caller.user}:{caller.group}: "
            "you may write there, and an overlay cannot",
            hint=f"`sudo chown {caller.user}:{caller.group} {path}`, or use mode ro or rw, or {otherwise}; "
            "`stockade workspaces check` lists every such path",
        )


def _settle(grants: dict[str, Grant], workspace: Grant) -> None:
    """The workspace's mode counts for its own path; a clause that says otherwise is a contradiction."""
    same = grants.pop(workspace.path, None)
    if same is not None and same.access == "write" and workspace.access != "write":
        raise PolicyError(
            f"{same.clause}: {same.path} is the workspace too, and that is not writable",
            hint='write workspace.mode = "rw", or leave one of them out',
        )


def _exists(path: str, directory: int) -> bool:
    try:
        os.stat(path, dir_fd=directory, follow_symlinks=False)
    except OSError:
        return False
    return True


def _missing(clause: str, path: str, *, hint: bool) -> NoReturn:
    parent = os.path.dirname(os.path.normpath(path))
    while not os.path.exists(parent):
        parent = os.path.dirname(parent)
    advice = f'; "{path}?" would be optional' if hint else ""
    raise PolicyError(f"{clause}: there is no {path}", hint=f"{parent} exists, what follows does not{advice}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe", stat.S_IFLNK: "a link"}
    return kinds.get(stat.S_IFMT(mode), "a device")
