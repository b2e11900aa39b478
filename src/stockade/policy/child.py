"""The policy of a sandbox that a program inside another one asks for: never more than that program has.

What the request may say is little: which of the parent's grants the child
sees, how much it may use, its variables. Everything else is the parent's own.
A path is looked at only when the parent's grants cover its very letters, and
then beneath the descriptor that the parent's sandbox was made from, through no
link and into no other mount; what is shown to the child must be that very
file. So the request cannot make its supervisor look where the program itself
could not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.policy.model import Limits, Policy, Syscalls, WorkspaceRule
from stockade.policy.resolve import Grant, Resolved, covers
from stockade.policy.values import literal, show

#: What a request may write.
ASKED = ("profile", "read", "write", "net", "env", "pass_env", "limits", "syscalls", "toolchain", "delegate")
#: What it may not, and what holds instead.
HELD = {
    "workspace": "a child has none; read and write name what it sees of its parent's grants",
    "deny": "what is hidden from its parent is hidden from it",
    "protect": "it has no workspace",
    "exec": "it executes what its parent may",
    "backend": "it has that of its parent",
    "accept": "it has what its parent accepts",
    "image": "it has that of its parent",
}

#: Each is a descriptor of the supervisor's, which has other things to do as well.
MOST_PATHS = 100

#: The device and the number of a file.
Identity = tuple[int, int]


class RefusedError(PolicyError):
    """The request asks for more than the program has, or for what no child gets. Safe to be told inside."""


class Child(msgspec.Struct, frozen=True):
    """The policy for a child, and for each path that it may show which file that must be."""

    policy: Policy
    files: dict[str, Identity]


def child(asked: Mapping[str, Any], parent: Resolved, backend: str) -> Child:
    """The policy that the request comes to, within what the parent really has."""
    for key in asked:
        if key in HELD:
            raise RefusedError(f"{key}: {HELD[key]}", hint="leave it out")
        if key not in ASKED:
            raise RefusedError(f"{key}: there is no such key in a request", hint=f"known: {', '.join(ASKED)}")
    if not isinstance(asked.get("toolchain", True), bool):
        raise RefusedError("toolchain: a child sees the installs that its parent sees, or none")
    files = {grant.path: identity(grant.fd) for grant in parent.grants if not _mine(grant)}
    wanted = {
        "read": [_looked_up(path, "read", parent, files) for path in _paths(asked, "read")],
        "write": [_looked_up(path, "write", parent, files) for path in _paths(asked, "write")],
    }
    env = dict(asked.get("env", {})) if isinstance(asked.get("env", {}), Mapping) else asked["env"]
    if asked.get("toolchain", True):
        installs = [grant.path for grant in parent.grants if grant.clause.startswith("toolchain")]
        wanted["read"] += [path for path in installs if path not in wanted["read"]]
        if installs and isinstance(env, dict):
            env.setdefault("PATH", parent.environ["PATH"])
    own = parent.policy
    policy = _policy(
        {
            **asked,
            **{key: [literal(path) for path in paths] for key, paths in wanted.items()},
            "env": env,
            "deny": [literal(path) for path in parent.denied],
            "exec": own.exec,
            "accept": own.accept,
            "backend": backend,
            "toolchain": False,
        },
        own,
    )
    beyond = policy.excess(_view(parent))
    if beyond:
        raise RefusedError("that is more than the program itself has:\n" + "\n".join(beyond))
    return Child(policy, files)


def confirm(made: Resolved, files: Mapping[str, Identity], parent: Resolved) -> None:
    """Refuse a child whose grants turned out to be other files than those that were looked at.

    And one that could execute more: what a pattern names may have changed since its parent began.
    """
    for grant in made.grants:
        if files.get(grant.path) != identity(grant.fd):
            raise RefusedError(f"{grant.path}: was replaced while being looked up", hint="try again")
    if made.workspace is not None:
        raise RefusedError(HELD["workspace"])
    own = (parent.programs or {}).values()
    trees, known = [tree for one in own for tree in one.trees], {file for one in own for file in one.files}
    for programs in (made.programs or {}).values():
        for name in (*programs.files, *programs.trees):
            if name not in known and not any(covers(tree, name) for tree in trees):
                raise RefusedError("exec: its patterns name other files by now", hint=HELD["exec"])


def identity(descriptor: int) -> Identity:
    """Which file a descriptor is of."""
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino


def _mine(grant: Grant) -> bool:
    """Whether the policy's author granted it, and not the profile or an install."""
    return not grant.clause.startswith(("profile", "toolchain"))


def _paths(asked: Mapping[str, Any], key: str) -> list[str]:
    """The paths of a request: absolute, plain, and in one spelling."""
    found = asked.get(key, [])
    if not isinstance(found, list):
        raise RefusedError(f"{key}: must be a list of paths")
    if len(found) > MOST_PATHS:
        raise RefusedError(f"{key}: {len(found)} paths, more than {MOST_PATHS}", hint="name what they are in")
    for path in found:
        plain = isinstance(path, str) and path.startswith("/") and os.path.normpath(path) == path
        if not plain or path.startswith("//") or {"\0", "$"} & set(path) or path.endswith("?"):
            raise RefusedError(f"{key} = {show(path)}: is not an absolute path in its shortest form")
    return list(dict.fromkeys(found))


def _looked_up(path: str, way: str, parent: Resolved, files: dict[str, Identity]) -> str:
    """The path, if a grant of the parent's covers it; what it names there is noted."""
    every = (*parent.grants, *(() if parent.workspace is None else (parent.workspace,)))
    above = max((one for one in every if covers(one.path, path)), key=lambda one: len(one.path), default=None)
    if above is None or any(covers(hidden, path) for hidden in parent.denied):
        raise RefusedError(f"{way} = {show(path)}: the program was not granted that")
    if above.access == "overlay":
        raise RefusedError(
            f"{way} = {show(path)}: is in the program's workspace, which only it sees as it is",
            hint="hand in what the child needs as its input",
        )
    if way == "write" and above.access != "write":
        raise RefusedError(f"{way} = {show(path)}: the program itself may only read that")
    files[path] = identity(above.fd) if path == above.path else _beneath(above, path, way)
    return path


def _beneath(above: Grant, path: str, way: str) -> Identity:
    from stockade.workspace import beneath

    straight = beneath.STRAIGHT | beneath.NO_XDEV
    try:
        found = beneath.node(above.fd, path[len(above.path) :].lstrip("/"), straight)
    except OSError:
        why = "is not there, or a link or another mount is on the way"
        raise RefusedError(f"{way} = {show(path)}: {why}") from None
    try:
        return identity(found)
    finally:
        os.close(found)


def _policy(table: dict[str, Any], own: Policy) -> Policy:
    """The policy, with the parent's limits and refused calls where the request writes none."""
    try:
        policy = Policy(**table)
    except RefusedError:
        raise
    except PolicyError as error:
        raise RefusedError(error.message, hint=error.hint) from None
    limits = {
        name: getattr(own.limits if getattr(policy.limits, name) is None else policy.limits, name)
        for name in Limits.__struct_fields__
    }
    denied = tuple(dict.fromkeys((*own.syscalls.deny, *policy.syscalls.deny)))
    allowed = tuple(name for name in policy.syscalls.allow if name not in denied)
    return msgspec.structs.replace(policy, limits=Limits(**limits), syscalls=Syscalls(allowed, denied))


def _view(parent: Resolved) -> Policy:
    """What the parent has, by real names."""
    workspace = None
    if parent.workspace is not None and parent.policy.workspace is not None:
        workspace = WorkspaceRule(literal(parent.workspace.path), parent.policy.workspace.mode)
    return msgspec.structs.replace(
        parent.policy,
        read=tuple(literal(grant.path) for grant in parent.grants if grant.access == "read"),
        write=tuple(literal(grant.path) for grant in parent.grants if grant.access == "write"),
        deny=tuple(literal(path) for path in parent.denied),
        workspace=workspace,
        toolchain=False,
        backend="auto",
    )
