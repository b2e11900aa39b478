"""Whether one policy asks for no more than another.

Files are compared by effect, not clause by clause. A policy gives each path
an access by the longest of its clauses that covers it, and access only changes
at a path that some clause names. So one policy stays within another exactly
if, at every path that either of them names, it gives no more access there.
That order is reflexive and transitive because "no more" is.

Paths are compared as text: whoever compares policies of different authors
must take links, ~ and relative paths out first (`discover` does).
"""

from __future__ import annotations

import math
import os

from stockade.controls import Control
from stockade.policy.model import Limits, Policy, Reuse, limit_text
from stockade.policy.profile import profile
from stockade.policy.programs import taken_in
from stockade.policy.values import show, time_text

NONE, READ, OVERLAY, WRITE = range(4)
WORDS = {READ: "read", OVERLAY: "change a copy of", WRITE: "write"}
MODES = {"ro": READ, "overlay": OVERLAY, "rw": WRITE}


class Files:
    """Who may do what to which path, by one policy."""

    def __init__(self, policy: Policy) -> None:
        base = profile(policy.profile)
        named = [(path, READ) for path in (*base.system, *base.read, *policy.read)]
        named += [(f"/etc/{name}", READ) for name in base.etc]
        named += [(path, WRITE) for path in policy.write]
        self.access: dict[str, int] = {}
        self.protected: set[str] = set()
        self.denied = {normal(path) for path in policy.deny}
        if policy.workspace is not None:
            root = normal(policy.workspace.path)
            self.access[root] = MODES[policy.workspace.mode]
            self.protected = {normal(os.path.join(root, path)) for path in policy.protect}
        for path, access in named:
            name = normal(path.removesuffix("?"))
            self.access[name] = max(access, self.access.get(name, NONE))

    def at(self, path: str) -> int:
        """The access to one path.

        None to a denied one; a protected one is at most readable; else the longest clause counts.
        """
        access: int | None = None
        most = WRITE
        while True:
            if path in self.denied:
                return NONE
            if path in self.protected:
                most = READ
            if access is None:
                access = self.access.get(path)
            parent = os.path.dirname(path)
            if parent == path:
                return min(access or NONE, most)
            path = parent


def normal(path: str) -> str:
    """One spelling per path; a relative one starts with a dot, so that `.` covers `a` but not `../a`."""
    path = os.path.normpath(path)
    if path.startswith("//"):  # POSIX lets two slashes mean something else; Linux does not
        return path[1:]
    return path if path.startswith(("/", "~", "$", "../")) or path in (".", "..") else f"./{path}"


def limits(policy: Policy) -> Limits:
    """The limits that hold: the profile's where the policy writes none."""
    default = profile(policy.profile).limits
    return Limits(
        **{
            name: getattr(default, name) if (value := getattr(policy.limits, name)) is None else value
            for name in Limits.__struct_fields__
        }
    )


def excess(mine: Policy, other: Policy) -> list[str]:
    """In words, what `mine` asks for beyond `other`."""
    if mine == other:
        return []
    found = _files(Files(mine), Files(other))
    if mine.exec is None and other.exec is not None:
        found.append(f"execute any file where only {show(other.exec)} may be")
    elif mine.exec is not None and other.exec is not None:
        found += [f"execute {pattern}" for pattern in mine.exec if not taken_in(pattern, other.exec)]
    if mine.net == "open" and other.net != "open":
        found.append('net = "open": the host\'s network')
    passed = {*profile(other.profile).pass_env, *other.pass_env}
    for name in (*profile(mine.profile).pass_env, *mine.pass_env):
        if name not in passed:
            found.append(f"pass_env = {show(name)}: a variable of the host")
    calls, known = mine.syscalls, other.syscalls
    found += [f"syscalls.allow = {show(name)}" for name in calls.allow if name not in known.allow]
    found += [f"without syscalls.deny = {show(name)}" for name in known.deny if name not in calls.deny]
    if mine.toolchain is not False and other.toolchain is False:
        found.append("toolchain: the installs that commands belong to")
    found += [f"toolchain = {show(name)}" for name in _installs(mine) if name not in _installs(other)]
    if mine.delegate and not other.delegate:
        found.append("delegate = true: sandboxes that the program asks for")
    found += [f"accept = {show(c.value)}: without that wall" for c in mine.accept if c not in other.accept]
    ours, theirs = limits(mine), limits(other)
    for name in Limits.__struct_fields__:
        asked, had = getattr(ours, name), getattr(theirs, name)
        if (math.inf if asked is None else asked) > (math.inf if had is None else had):
            words = "none" if asked is None else limit_text(name, asked)
            found.append(f"limits.{name}: {words} where {limit_text(name, had)} is allowed")
    if other.required(Control.LIMITS_TASKS) and not mine.required(Control.LIMITS_TASKS):
        found.append("without limits.tasks being required")
    found += _reuse(mine.reuse, other.reuse)
    if other.backend != "auto" and not _backends(mine) <= _backends(other):
        found.append(f"backend = {show(mine.backend)} where {show(other.backend)} is asked for")
    return found


def _reuse(mine: Reuse | None, other: Reuse | None) -> list[str]:
    if mine is None:
        return []
    if other is None:
        return ["reuse: sandboxes that other runs have used"]
    found = []
    for name in Reuse.__struct_fields__:
        asked, had = getattr(mine, name), getattr(other, name)
        if asked > had:
            texts = [str(value) if name == "requests" else f'"{time_text(value)}"' for value in (asked, had)]
            found.append(f"reuse.{name}: {texts[0]} where {texts[1]} is allowed")
    return found


def _backends(policy: Policy) -> set[str]:
    return {policy.backend} if isinstance(policy.backend, str) else set(policy.backend)


def _installs(policy: Policy) -> tuple[str, ...]:
    return () if isinstance(policy.toolchain, bool) else policy.toolchain


def _files(mine: Files, other: Files) -> list[str]:
    found: dict[str, int] = {}
    named = {*mine.access, *mine.protected, *mine.denied, *other.access, *other.protected, *other.denied}
    for path in sorted(named):
        asked, had = mine.at(path), other.at(path)
        if asked > had:
            above = os.path.dirname(path)
            # A tree that was reported stands for everything in it.
            while above not in found and above != os.path.dirname(above):
                above = os.path.dirname(above)
            if found.get(above) != asked:
                found[path] = asked
    return [f"{WORDS[access]} {path.removeprefix('./')}" for path, access in found.items()]
