"""Profiles: the named starting points of a policy, one TOML file each.

A profile says which trees of the system are visible, which entries of /etc,
what the environment starts with and which limits hold when the policy writes
none. Paths that end in ? are taken where they exist.
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
    """A profile with everything it takes over from the one it extends."""

    name: str
    description: str
    extends: str = ""
    system: tuple[str, ...] = ()
    """Trees of the system, read-only at their own path; a link such as /bin stays one."""
    etc: tuple[str, ...] = ()
    """Entries below /etc taken from the host, read-only."""
    read: tuple[str, ...] = ()
    """Further paths, read-only, written as a policy's `read`."""
    env: Mapping[str, str] = FrozenMap()
    pass_env: tuple[str, ...] = ()
    searches_path: bool = False
    """Whether commands are looked for in the caller's PATH too, as far as it is shown."""
    limits: Limits = Limits()


def names() -> tuple[str, ...]:
    """The profiles there are."""
    return PROFILES


def source(name: str) -> str:
    """The text of a profile's file."""
    if name not in PROFILES:
        raise PolicyError(f"there is no profile {name!r}", hint=nearest(name, PROFILES))
    with open(os.path.join(DIRECTORY, f"{name}.toml"), encoding="utf-8") as file:
        return file.read()


@functools.cache
def profile(name: str) -> Profile:
    """One profile; the file is read once per process."""
    text = source(name)
    table = _plain(text)
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


def _plain(text: str) -> dict[str, Any] | None:
    """A file of plain keys, tables and lists, read without tomllib: that takes longer to load than all else.

    None where there is anything that is not plain; then tomllib reads it.
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
