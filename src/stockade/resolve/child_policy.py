"""The policy of a sandbox that a program inside another one asks for: never more than that program has.

A request may choose which of the parent's grants the child sees, how much it
may use, and its variables. Everything else is as for the parent. The
supervisor looks at a path only if a grant of the parent covers its text, and
then below the descriptor of that grant, through no link and into no other
mount; the child must be shown that very file. So a request cannot make the
supervisor look where the program itself could not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.linux.path_lookup import covers
from stockade.policy.model import Limits, Policy, Syscalls, WorkspaceRule
from stockade.policy.patterns import quote
from stockade.policy.profile import profile
from stockade.policy.values import literal, quote_protected, show
from stockade.resolve.resolved import Grant, ResolvedPolicy

#: The clauses that a request may write.
ASKED = ("profile", "read", "write", "net", "env", "pass_env", "limits", "syscalls", "toolchain", "delegate")
#: The clauses that it may not write, and why.
HELD = {
    "workspace": "a child has no workspace; name what it sees of its parent's grants in read and write",
    "deny": "whatever is hidden from its parent is hidden from a child",
    "protect": "a child has no workspace",
    "unprotect": "whatever is protected from its parent is protected from a child",
    "hold_back": "a child has no workspace",
    "allow_commit": "a child has no workspace",
    "exec": "a child may execute what its parent may",
    "backend": "a child has the backend of its parent",
    "accept": "a child accepts what its parent accepts",
    "image": "a child has the image of its parent",
    "secrets": "a child has no secrets",
}

#: Each costs the supervisor a descriptor.
MOST_PATHS = 100

#: The device and the inode of a file.
Identity = tuple[int, int]


class ChildRefusedError(PolicyError):
    """A request asks for more than the program has, or for what no child gets. The program may read it."""


class Child(msgspec.Struct, frozen=True):
    """The policy for a child, with its files and variables."""

    policy: Policy
    #: For each path that it may show, the file that this must be.
    files: dict[str, Identity]
    #: The variables that it inherits from its parent.
    environ: dict[str, str]


def child(
    asked: Mapping[str, Any], parent: ResolvedPolicy, backend: str, environ: Mapping[str, str]
) -> Child:
    """Check a request and return the child's policy, within what the parent has.

    `environ` is the program's environment: a child gets a variable of the host with the value that the
    program saw.
    """
    for key in asked:
        if key in HELD:
            raise ChildRefusedError(f"{key}: {HELD[key]}", hint="leave it out")
        if key not in ASKED:
            raise ChildRefusedError(f"{key}: a request has no such key", hint=f"known: {', '.join(ASKED)}")
    if not isinstance(asked.get("toolchain", True), bool):
        raise ChildRefusedError(
            "toolchain: a child sees the installs that its parent sees, or none", hint="write true or false"
        )
    files = {grant.path: identity(grant.fd) for grant in parent.grants if not _is_of_policy(grant)}
    wanted = {
        "read": [_check_path(path, "read", parent, files) for path in _paths(asked, "read")],
        "write": [_check_path(path, "write", parent, files) for path in _paths(asked, "write")],
    }
    env = dict(asked.get("env", {})) if isinstance(asked.get("env", {}), Mapping) else asked["env"]
    if asked.get("toolchain", True):
        installs = [grant.path for grant in parent.grants if grant.clause.startswith("toolchain")]
        wanted["read"] += [path for path in installs if path not in wanted["read"]]
        if installs and isinstance(env, dict):
            env.setdefault("PATH", parent.environ["PATH"])
    own = parent.policy
    if asked.get("net", "none") not in ("none", []) and isinstance(env, dict):
        env = {**_network_variables(own, proxies=asked["net"] == "open"), **env}
    policy = _policy(
        {
            **asked,
            **{key: [literal(path) for path in paths] for key, paths in wanted.items()},
            "env": env,
            "deny": [quote(literal(path)) for path in parent.denied],
            "unprotect": _unprotected_paths(parent),
            "hold_back": own.hold_back,
            "allow_commit": own.allow_commit,
            "exec": own.exec,
            "accept": own.accept,
            "backend": backend,
            "toolchain": False,
        },
        own,
    )
    variables = _inherited_variables(policy, parent, environ)
    policy = msgspec.structs.replace(policy, pass_env=())
    beyond = policy.excess(_view(parent, policy, backend))
    if beyond:
        raise ChildRefusedError(
            "the request asks for more than the program itself has:\n" + "\n".join(beyond)
        )
    return Child(policy, files, variables)


def confirm(made: ResolvedPolicy, asked: Child, parent: ResolvedPolicy) -> None:
    """Refuse a child whose grants are other files than those that were checked.

    Also refuse one that could execute more: the files that a pattern names may have changed since its
    parent began.
    """
    for grant in made.grants:
        if asked.files.get(grant.path) != identity(grant.fd):
            raise ChildRefusedError(f"{grant.path} was replaced while it was looked up", hint="try again")
    if made.workspace is not None:
        raise ChildRefusedError(HELD["workspace"])
    for path in parent.repositories.kept:
        # The repository that leads to it may lie where the child cannot write, so that its search missed it.
        above = next((one for one in made.grants if one.access == "write" and covers(one.path, path)), None)
        if above is not None and not any(covers(one, path) for one in made.repositories.kept):
            raise ChildRefusedError(
                f"write = {show(above.path)}: the program itself may only read {path}",
                hint="name the paths beside it",
            )
    for name in made.profile.pass_env:
        if name in made.environ and name not in made.policy.env and name not in asked.environ:
            raise ChildRefusedError(f"pass_env = {show(name)}: the host has set it since the program started")
    for name, value in (made.network.variables if made.network else {}).items():
        had = parent.network.variables.get(name, value) if parent.network else ""
        if name not in parent.environ or had != value:
            raise ChildRefusedError(f"{name}: the program did not get it from the host with this value")
    own = (parent.programs or {}).values()
    trees, known = [tree for one in own for tree in one.trees], {file for one in own for file in one.files}
    for programs in (made.programs or {}).values():
        for name in (*programs.files, *programs.trees):
            if name not in known and not any(covers(tree, name) for tree in trees):
                raise ChildRefusedError(
                    "exec: its patterns name other files than when the program started", hint=HELD["exec"]
                )


def identity(descriptor: int) -> Identity:
    """Return the device and the inode of an open file."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _is_of_policy(grant: Grant) -> bool:
    """Whether the policy itself grants it, and not the profile, a toolchain or the network."""
    return not grant.clause.startswith(("profile", "toolchain", "net"))


def _paths(asked: Mapping[str, Any], key: str) -> list[str]:
    """Check that the paths of a request are absolute and in their shortest form, and return them."""
    found = asked.get(key, [])
    if not isinstance(found, list):
        raise ChildRefusedError(f"{key}: must be a list of paths")
    if len(found) > MOST_PATHS:
        raise ChildRefusedError(
            f"{key}: {len(found)} paths, more than {MOST_PATHS}", hint="name their directories"
        )
    for path in found:
        plain = isinstance(path, str) and path.startswith("/") and os.path.normpath(path) == path
        if not plain or path.startswith("//") or {"\0", "$"} & set(path) or path.endswith("?"):
            raise ChildRefusedError(f"{key} = {show(path)}: is not an absolute path in its shortest form")
    return list(dict.fromkeys(found))


def _check_path(path: str, way: str, parent: ResolvedPolicy, files: dict[str, Identity]) -> str:
    """Return the path if a grant of the parent covers it, and add the file that it names to `files`."""
    every = (*parent.grants, *(() if parent.workspace is None else (parent.workspace,)))
    above = max((one for one in every if covers(one.path, path)), key=lambda one: len(one.path), default=None)
    if above is None or parent.hidden.covers(path):
        raise ChildRefusedError(f"{way} = {show(path)}: the program has no grant for it")
    if above.access == "overlay":
        raise ChildRefusedError(
            f"{way} = {show(path)}: is in the program's workspace, whose changes only the program sees",
            hint="pass what the child needs as its input",
        )
    if way == "write" and above.access != "write":
        raise ChildRefusedError(f"{way} = {show(path)}: the program itself may only read it")
    if way == "write" and any(covers(one, path) for one in parent.repositories.kept):
        raise ChildRefusedError(
            f"{way} = {show(path)}: is in a repository that the program itself may only read"
        )
    files[path] = identity(above.fd) if path == above.path else _identity_below(above, path, way)
    return path


def _identity_below(above: Grant, path: str, way: str) -> Identity:
    from stockade.linux import openat2

    straight = openat2.STRAIGHT | openat2.NO_XDEV
    try:
        found = openat2.node(above.fd, path[len(above.path) :].lstrip("/"), straight)
    except OSError:
        why = "does not exist, or a link or another mount is on the way"
        raise ChildRefusedError(f"{way} = {show(path)}: {why}") from None
    try:
        return identity(found)
    finally:
        os.close(found)


def _policy(table: dict[str, Any], own: Policy) -> Policy:
    """Make the policy, with the parent's limits where the request writes none, and its refused calls."""
    if profile(own.profile).limits != profile("strict").limits:
        table = {"profile": own.profile, **table}
    try:
        policy = Policy(**table)
    except ChildRefusedError:
        raise
    except PolicyError as error:
        raise ChildRefusedError(error.message, hint=error.hint) from None
    limits = {
        name: getattr(own.limits if getattr(policy.limits, name) is None else policy.limits, name)
        for name in Limits.__struct_fields__
    }
    denied = tuple(dict.fromkeys((*own.syscalls.deny, *policy.syscalls.deny)))
    allowed = tuple(name for name in policy.syscalls.allow if name not in denied)
    return msgspec.structs.replace(policy, limits=Limits(**limits), syscalls=Syscalls(allowed, denied))


def _unprotected_paths(parent: ResolvedPolicy) -> list[str]:
    """Return the absolute paths that the parent's `unprotect` names."""
    root = "" if parent.workspace is None else parent.workspace.path
    names = (name for name in parent.policy.unprotected() if root or name.startswith("/"))
    return [quote_protected(os.path.join(root, name)) for name in names]


def _inherited_variables(
    policy: Policy, parent: ResolvedPolicy, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that the child inherits from its parent."""
    known = {*parent.profile.pass_env, *parent.policy.pass_env, *environ}
    for name in policy.pass_env:
        if name not in known:
            raise ChildRefusedError(f"pass_env = {show(name)}: the program has no such variable")
    names = (*profile(policy.profile).pass_env, *policy.pass_env)
    return {name: environ[name] for name in names if name in environ and name not in policy.env}


def _network_variables(parent: Policy, proxies: bool) -> dict[str, str]:
    """Return the parent's values of the variables that come from the host with a network."""
    from stockade.resolve.host_network import DIRECTORIES, FILES, NO_PROXIES, PROXIES

    names = (*FILES, *DIRECTORIES, *((*PROXIES, *NO_PROXIES) if proxies else ()))
    return {name: parent.env[name] for name in names if name in parent.env}


def _view(parent: ResolvedPolicy, policy: Policy, backend: str) -> Policy:
    """Return the parent's policy by real names, with the variables that it lets its child have."""
    workspace = None
    if parent.workspace is not None and parent.policy.workspace is not None:
        workspace = WorkspaceRule(literal(parent.workspace.path), parent.policy.workspace.mode)
    return msgspec.structs.replace(
        parent.policy,
        read=tuple(literal(grant.path) for grant in parent.grants if grant.access == "read"),
        write=tuple(literal(grant.path) for grant in parent.grants if grant.access == "write"),
        deny=tuple(quote(literal(path)) for path in parent.denied),
        workspace=workspace,
        toolchain=False,
        backend=backend,
        env=policy.env,
    )
