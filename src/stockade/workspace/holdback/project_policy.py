"""The policy in a pyproject.toml: a program that writes it chooses how the next run is confined.

A commit holds back a stockade.toml by its name. Programs often edit a pyproject.toml, so a commit holds it
back only if its table for Stockade differs from the host's.
"""

from __future__ import annotations

import contextlib
import os
import stat
from typing import Any

from stockade.errors import PolicyError
from stockade.linux import dirwalk
from stockade.policy.toml import SECTION, decode
from stockade.workspace.diff.layer_walk import FileStat, PathDifference

NAME = "pyproject.toml"
#: No policy is read from a larger file.
LARGEST = 1 << 20


class _UnreadableError(Exception):
    """The file cannot be read or parsed, so it may contain any policy."""


def differs(root: int, upper: int, one: PathDifference) -> bool:
    """Return whether a change makes, changes or removes the policy in a pyproject.toml."""
    if one.name.lower() != NAME:
        return False
    try:
        return bool(_table(root, one, one.before, own=False) != _table(upper, one, one.after, own=True))
    except _UnreadableError:
        return True


def _table(tree: int, one: PathDifference, info: FileStat | None, *, own: bool) -> Any:
    """Return Stockade's table in the host's file or in the layer's; None without a table."""
    if info is None or not stat.S_ISREG(info.st_mode):
        return None
    data = b""
    try:
        with (
            dirwalk.listed(tree, one.directory, own=own) as directory,
            dirwalk.content(directory, one.name, own=own) as file,
        ):
            while len(data) <= LARGEST and (part := os.read(file, LARGEST + 1 - len(data))):
                data += part
    except OSError:
        raise _UnreadableError from None
    if b"stockade" not in data:
        return None
    if len(data) > LARGEST:
        raise _UnreadableError
    with contextlib.suppress(UnicodeDecodeError, PolicyError):
        table: Any = decode(data.decode(), NAME)
        for name in SECTION:
            table = table.get(name) if isinstance(table, dict) else None
        return table
    raise _UnreadableError
