"""The words of a command and its variables, as callers write them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from stockade.errors import PolicyError


def words(cmd: Sequence[str]) -> list[str]:
    """The words of a command, or why they are none."""
    if isinstance(cmd, str | bytes):
        raise PolicyError(f"the command {cmd!r} is one string", hint='write a list: ["sh", "-c", "..."]')
    argv = [os.fsdecode(word) for word in cmd]
    if not argv:
        raise PolicyError("there is no command to run", hint="stockade run -- COMMAND ...")
    if any("\0" in word for word in argv):
        raise PolicyError("the command has a NUL byte in it")
    return argv


def variables(env: Mapping[str, str] | None) -> Mapping[str, str]:
    """What a caller adds to the environment, or why that cannot be."""
    for name, value in (env or {}).items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise PolicyError(
                f"env: {name!r} cannot be set", hint="names are not empty and have no = in them"
            )
    return env or {}
