"""TOML in and out, and where in it a mistake is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from stockade.errors import PolicyError
from stockade.policy.model import Policy
from stockade.policy.values import Invalid, literal, render

#: The table of a pyproject.toml that is ours.
SECTION = ("tool", "stockade")


def parse(text: str, *, base: str | None = None, name: str = "", section: tuple[str, ...] = ()) -> Policy:
    """The policy that `text` writes.

    >>> parse('workspace = "src"', base="/project").workspace.path
    '/project/src'
    """
    return Policy(**anchored(clauses(text, base=base, name=name, section=section), base))


def clauses(
    text: str, *, base: str | None = None, name: str = "", section: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The clauses that `text` writes and no others, checked, their relative paths counted from `base`.

    `section` is where in the text they are. The result is for laying over another policy.
    """
    table: Any = decode(text, name)
    for part in section:
        table = table.get(part, {}) if isinstance(table, dict) else {}
    if not isinstance(table, dict):
        raise PolicyError(f"{name}: {'.'.join(section)} must be a table")
    try:
        return written(table, base)
    except Invalid as error:
        raise located(error, text, name, section) from None


def written(table: dict[str, Any], base: str | None) -> dict[str, Any]:
    """The clauses of a decoded table, checked, their relative paths counted from `base`."""
    if isinstance(table.get("workspace"), str):
        table = {**table, "workspace": {"path": table["workspace"]}}
    checked = Policy(**table).table(full=True)
    found = {
        key: {part: value[part] for part in table[key] if part in value} if isinstance(value, dict) else value
        for key, value in checked.items()
        if key in table
    }
    if base is not None:
        for key in ("read", "write", "deny", "exec"):
            if key in found:
                found[key] = [rebase(path, base) for path in found[key]]
        if "path" in found.get("workspace", ()):
            found["workspace"]["path"] = rebase(found["workspace"]["path"], base)
    return found


def located(error: Invalid, text: str, name: str, section: tuple[str, ...]) -> PolicyError:
    """The error with the place in the text that it is about."""
    line = line_of(text, (*section, *error.key.split(".")), error.value)
    where = f"{name or 'line'}:{line}: " if line else f"{name}: " if name else ""
    return PolicyError(where + error.message, hint=error.hint)


def anchored(table: dict[str, Any], base: str | None) -> dict[str, Any]:
    """The clauses with a workspace path, if there is a workspace: the directory of the file."""
    if "workspace" in table:
        return {**table, "workspace": {"path": literal(base or "."), **table["workspace"]}}
    return table


def rebase(path: str, base: str) -> str:
    """A relative path counted from `base`; ~ and $ wait until the caller is known."""
    return path if path.startswith(("/", "~", "$")) else os.path.normpath(os.path.join(literal(base), path))


def decode(text: str, name: str) -> dict[str, Any]:
    """The tables of a TOML text."""
    import tomllib

    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise PolicyError(
            f"{name or 'the policy'} is not TOML: {error or 'nested too deeply'}",
            hint='text is written in quotes, lists in brackets: read = ["/opt/data"]',
        ) from None


def write(table: Mapping[str, Any]) -> str:
    """A policy's clauses as TOML: plain keys first, then the tables."""
    nested = [name for name, value in table.items() if isinstance(value, Mapping) and name != "env"]
    lines = [f"{name} = {render(value)}" for name, value in table.items() if name not in nested]
    for name in nested:
        lines += ["", f"[{name}]", *(f"{key} = {render(value)}" for key, value in table[name].items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def line_of(text: str, key: tuple[str, ...], value: object) -> int:
    """The line that writes the key, or its item `value` where a list spans lines; 0 if it is not found.

    Reads lines, not TOML: it serves messages only.
    """
    lines = text.splitlines()
    table: tuple[str, ...] = ()
    found = 0
    for number, line in enumerate(lines, 1):
        bare = line.strip()
        if bare.startswith("["):
            table = names = _names(bare.partition("]")[0].strip("["))
        elif "=" in bare and not bare.startswith("#"):
            names = table + _names(bare.partition("=")[0])
        else:
            continue
        if names[: len(key)] == key:
            found = number
            break
        # An inline table holds the key on the line of its parent.
        if names == key[: len(names)] and not found and not bare.startswith("["):
            found = number
    if found and isinstance(value, str) and value and "]" not in lines[found - 1]:
        for number in range(found, len(lines)):
            if value in lines[number]:
                return number + 1
            if "]" in lines[number]:
                break
    return found


def _names(dotted: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))
