"""Profiles: the named starting points of a policy, one TOML file each.

A profile says which trees of the system and which entries of /etc are
visible, what the environment starts with, and which limits hold when the
policy writes none. A path that ends in ? is shown only if it exists.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.policy.model import PROFILES, Limits
from stockade.policy.values import FrozenMap, nearest

#: Where the files are: beside this one, in a checkout as in an installed package.
DIRECTORY = os.path.join(os.path.dirname(__file__), "profiles")


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile, including everything that it inherits from the one it extends."""

    name: str
    description: str
    extends: str = ""
    system: tuple[str, ...] = ()
    """Trees of the system, read-only at their own path; a link such as /bin stays a link."""
    etc: tuple[str, ...] = ()
    """Entries of the host's /etc, read-only."""
    read: tuple[str, ...] = ()
    """Further paths, read-only, written as a policy's `read`."""
    env: Mapping[str, str] = FrozenMap()
    pass_env: tuple[str, ...] = ()
    searches_path: bool = False
    """Whether the visible directories of the user's PATH are searched for commands too."""
    limits: Limits = Limits()


def names() -> tuple[str, ...]:
    """The names of all profiles."""
    return PROFILES


def source(name: str) -> str:
    """The text of a profile's file."""
    if name not in PROFILES:
        raise PolicyError(f"there is no profile {name!r}", hint=nearest(name, PROFILES))
    with open(os.path.join(DIRECTORY, f"{name}.toml"), encoding="utf-8") as file:
        return file.read()


@functools.cache
def profile(name: str) -> Profile:
    """Load a profile; its file is read once per process."""
    text = source(name)
    table = _parse_plain(text)
    if table is None:
        import tomllib

        table = tomllib.loads(text)
    limits = table.pop("limits", {})
    if table.get("extends"):
        base = profile(table["extends"])
        for key in ("system", "etc", "read", "pass_env"):
            table[key] = [*getattr(base, key), *table.get(key, ())]
        table.setdefault("searches_path", base.searches_path)
        table["env"] = {**base.env, **table.get("env", {})}
        limits = {key: getattr(base.limits, key) for key in Limits.__struct_fields__} | limits
    for key in ("system", "etc", "read", "pass_env"):
        table[key] = tuple(table.get(key, ()))
    table |= {"name": name, "env": FrozenMap(table.get("env", {})), "limits": Limits(**limits)}
    return Profile(**table)


def _parse_plain(text: str) -> dict[str, Any] | None:
    """Parse a file of plain keys, tables and lists without tomllib, whose import takes longer than the rest.

    Returns None for any other file; then tomllib reads it.
    """
    found: dict[str, Any] = {}
    table = found
    pending = ""
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if line.startswith("[") and line.endswith("]") and not pending:
            table = found.setdefault(line[1:-1], {})
            continue
        pending += line
        key, equals, value = pending.partition(" = ")
        if value.startswith("[") and not value.endswith("]"):
            continue
        pending = ""
        try:
            table[key] = msgspec.json.decode(value.replace(",]", "]"))
        except msgspec.DecodeError:
            return None
        if not equals or not key.replace("_", "").isalnum():
            return None
    return None if pending else found
