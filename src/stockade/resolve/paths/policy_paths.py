"""Paths of a policy: how they become absolute, and what they name.

A relative path keeps the directory that it is relative to, see `path_lookup`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from stockade.errors import PolicyError
from stockade.linux.path_lookup import Lookup, counted, covers
from stockade.policy.values import literal, show

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


def expand(path: str, clause: str, *, home: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Make a path absolute: replace ~ and $VARIABLE ($$ is a $); a relative path is relative to `cwd`."""
    found = _substitute_variables(path, clause, environ) if "$" in path else path
    if path.startswith("~"):
        found = home + found[1:]
    if "\0" in found:
        raise PolicyError(f"{clause}: has a NUL byte in it")
    if found.startswith("/"):
        return found
    if not cwd:
        raise PolicyError(
            f"{clause}: is relative, and the current directory was removed", hint="write an absolute path"
        )
    return counted(found, cwd)


def _substitute_variables(path: str, clause: str, environ: Mapping[str, str]) -> str:
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
            raise PolicyError(
                f"{clause}: ${name} is not an absolute path but {show(value)}",
                hint=f"set ${name} to an absolute path",
            )
        done += value
    return done + rest


def real(lookup: Lookup, path: str) -> str:
    """The real name of a policy's path, written as a policy's path, with its ? if it has one."""
    return literal(lookup.name) + ("?" if path.endswith("?") else "")


def places(named: Iterable[NamedPath], workspace: str) -> tuple[tuple[str, str], ...]:
    """The paths of the workspace that the policy names, relative to it, each with its clause.

    Also those that do not exist yet, and the links on the way: a later commit might put a link there.
    """
    found: dict[str, str] = {}
    for one in named:
        for name in (one.lookup.name, *(link.at for link in one.lookup.links)):
            if covers(workspace, name) and name != workspace:
                found.setdefault(name[len(workspace) :].lstrip("/"), one.clause)
    return tuple(sorted(found.items()))
