"""Entries of ours in the settings of other programs: JSON or TOML files that belong to the user.

Everything else in such a file stays. A file that cannot be read as what it should be is an error and is left
alone, and so is one that a link stands for: the link may come from a project that the user does not trust.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from stockade.errors import ConflictError, PolicyError
from stockade.policy.values import render

#: The largest file of settings that is read.
LARGEST = 8 << 20


def with_json_entry(path: str, keys: Sequence[str], value: object) -> str | None:
    """Return the text of a JSON file with `value` below the keys; None if it has it already."""
    table = _json(path)
    inner = _descend(path, table, keys[:-1])
    found = inner.get(keys[-1])
    if found == value:
        return None
    if found is not None:
        raise _taken(path, ".".join(keys))
    inner[keys[-1]] = value
    return json_text(table)


def with_json_item(path: str, keys: Sequence[str], item: object) -> str | None:
    """Return the text of a JSON file with `item` in the list below the keys; None if it has it already."""
    table = _json(path)
    inner = _descend(path, table, keys[:-1])
    found = inner.setdefault(keys[-1], [])
    if not isinstance(found, list):
        raise _wrong(path, f"{keys[-1]!r} in it is not a list")
    if item in found:
        return None
    found.append(item)
    return json_text(table)


def _descend(path: str, table: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    for key in keys:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise _wrong(path, f"{key!r} in it is not an object")
    return table


def with_toml_table(path: str, keys: Sequence[str], value: Mapping[str, Any]) -> str | None:
    """Return the text of a TOML file with a table at its end; None if it has it already."""
    before = read(path) or ""
    found: Any = _toml(path, before)
    for key in keys:
        if not isinstance(found, dict):
            raise _wrong(path, f"what it has for {key!r} is not in a table")
        found = found.get(key, {} if key != keys[-1] else None)
    if found == value:
        return None
    if found is not None:
        raise _taken(path, ".".join(keys))
    text = (before.rstrip("\n") + "\n\n" if before.strip() else "") + toml_table(keys, value)
    _toml(path, text)  # a table that is written in one line cannot be continued
    return text


def _toml(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise _wrong(path, f"it is not TOML that a table can follow: {error}") from None


def toml_table(keys: Sequence[str], value: Mapping[str, Any]) -> str:
    """Return a table as TOML."""
    lines = [f"[{'.'.join(keys)}]", *(f"{key} = {render(one)}" for key, one in value.items())]
    return "\n".join(lines) + "\n"


def json_text(value: object) -> str:
    """Return JSON as people write settings."""
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _json(path: str) -> dict[str, Any]:
    text = read(path)
    if text is None or not text.strip():
        return {}
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, f"it is not plain JSON: {error}") from None
    if not isinstance(table, dict):
        raise _wrong(path, "it is not a JSON object")
    return table


def read(path: str) -> str | None:
    """Return the text of a file of settings, or None if there is none."""
    _refuse_links(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise _wrong(path, "it is not a file")
        data = stream.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise _wrong(path, f"it is larger than {LARGEST >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _wrong(path, "it is not UTF-8") from None


def write(path: str, text: str) -> None:
    """Replace a file of settings atomically; it keeps its permission bits."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _refuse_links(path)
    mode = 0o600
    with contextlib.suppress(FileNotFoundError):
        found = os.lstat(path).st_mode
        if not stat.S_ISREG(found):
            raise _wrong(path, "it is not a file")
        mode = stat.S_IMODE(found)
    part = f"{path}.{os.urandom(6).hex()}.new"
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as stream:
            os.fchmod(descriptor, mode)
            stream.write(text)
            stream.flush()
            os.fsync(descriptor)
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def _refuse_links(path: str) -> None:
    """Refuse a file, or its directory, that is a link."""
    for one in (path, os.path.dirname(path)):
        if os.path.islink(one):
            raise _wrong(path, f"{one} is a link to {os.readlink(one)}")


def _wrong(path: str, why: str) -> PolicyError:
    return PolicyError(
        f"{path} cannot be changed: {why}", hint="it is as it was; add the lines above by hand"
    )


def _taken(path: str, key: str) -> ConflictError:
    return ConflictError(
        f"{path} has another {key} already", hint="remove it there, or choose another name: --name NAME"
    )
