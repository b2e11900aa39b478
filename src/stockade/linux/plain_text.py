"""Text for records and for people: bounded, without control characters, times in UTC."""

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


def clean(words: str) -> str:
    """Escape every character that a terminal would obey or not show.

    These are controls (C1 too), bidi overrides, invisible characters and lone surrogates, but not line ends
    and tabs.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _spelled(ord(c)) for c in words)


def clean_line(words: str) -> str:
    """Clean text as `clean` does, and keep it on one line: it must not fake a line of Stockade's."""
    return clean(words).replace("\n", "\\n").replace("\t", "\\t")


def _spelled(code: int) -> str:
    """Return the escape of a character; for a surrogate-escaped byte of a file name, that of the byte."""
    byte = code - 0xDC00 if 0xDC80 <= code <= 0xDCFF else code
    return f"\\x{byte:02x}" if byte < 0x100 else f"\\u{byte:04x}"
