"""Paths of a policy: how they become absolute, and what they name.

A relative path keeps the directory that it is relative to, see `path_lookup`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from stockade.linux.path_lookup import Lookup, covers
from stockade.policy.values import literal

#: The sandbox has its own: nothing of the host appears in them.
OWN = ("/proc", "/sys", "/dev")
#: Trees of the system: never writable, at any depth.
SYSTEM = ("/etc", "/usr", "/boot", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", *OWN)

#: The access that each mode of a workspace gives.
MODES: dict[str, Literal["read", "overlay", "write"]] = {"ro": "read", "overlay": "overlay", "rw": "write"}


class NamedPath(msgspec.Struct, frozen=True):
    """One path that a policy names, and its lookup."""

    clause: str
    """The clause of the policy, such as `read = "./data"`."""
    access: str
    lookup: Lookup
    key: str
    """The key of a policy that would name it: `read`, `write` or `workspace`."""


def real(lookup: Lookup, path: str) -> str:
    """Return the real name of a policy's path, in a policy's spelling, with its ? if it has one."""
    return literal(lookup.name) + ("?" if path.endswith("?") else "")


def places(named: Iterable[NamedPath], workspace: str) -> tuple[tuple[str, str], ...]:
    """Return the paths of the workspace that the policy names, relative to it, each with its clause.

    Also those that do not exist yet, and the links on the way: a later commit might put a link there.
    """
    found: dict[str, str] = {}
    for one in named:
        for name in (one.lookup.name, *(link.at for link in one.lookup.links)):
            if covers(workspace, name) and name != workspace:
                found.setdefault(name[len(workspace) :].lstrip("/"), one.clause)
    return tuple(sorted(found.items()))
