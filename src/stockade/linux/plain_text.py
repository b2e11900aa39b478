"""Text for records: bounded, without control characters, times in UTC."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import lru_cache

MOST_COMMAND = 4096


def bounded(command: Sequence[str], room: int = MOST_COMMAND) -> tuple[str, ...]:
    """The words of a command that fit into `room` characters, as text that JSON can hold."""
    kept: list[str] = []
    for word in command:
        if len(word) >= room:
            return (*kept, f"{text(word[:room])}…")
        kept.append(text(word))
        room -= len(word) + 1
    return tuple(kept)


def text(words: str) -> str:
    """A file name or an argument as text that JSON can hold."""
    return words if words.isascii() else os.fsencode(words).decode("utf-8", "replace")


@lru_cache(maxsize=8)
def utc(seconds: int) -> str:
    """A time as text that sorts like the time."""
    # Cached: many runs end in the same second.
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
