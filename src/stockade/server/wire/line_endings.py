"""The text of output events: one line each, with its line ending or without.

Since version 1.1.1 of its Python SDK the contract says that joined texts give the output back byte for byte.
Clients before that, and those in other languages, expect lines without endings and join them themselves.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping

#: A line that is longer than this is several texts. JSON spends up to six bytes on one, and some clients read
#: no more than 4 MiB at once.
LONGEST_TEXT = 1 << 19
#: The key among a sandbox's extensions that says `keep` or `cut`, whatever the client is.
EXTENSION = "stockade.line-endings"

_SDK = re.compile(r"\bOpenSandbox-Python-SDK/(\d+)\.(\d+)\.(\d+)(\.?(?:dev|a|b|rc)\d*)?")
_OWN = re.compile(r"\bstockade/", re.IGNORECASE)
_FIRST_THAT_KEEPS = (1, 1, 1)


class LineRule(enum.StrEnum):
    """Whether texts keep their line endings."""

    KEEP = "keep"
    CUT = "cut"


def line_rule(user_agent: str, extensions: Mapping[str, str], configured: str = "auto") -> LineRule:
    """Decide for one request: by the sandbox's extensions, the configuration, or the client's version."""
    for choice in (extensions.get(EXTENSION, ""), configured):
        if choice in (LineRule.KEEP, LineRule.CUT):
            return LineRule(choice)
    return LineRule.KEEP if _keeps(user_agent) else LineRule.CUT


def _keeps(user_agent: str) -> bool:
    if _OWN.search(user_agent):
        return True
    found = _SDK.search(user_agent)
    if found is None:
        return False
    version = tuple(int(number[:9]) for number in found.group(1, 2, 3))
    # A pre-release comes before its release.
    return version > _FIRST_THAT_KEEPS if found.group(4) else version >= _FIRST_THAT_KEEPS


class LineSplitter:
    """Turns the bytes of one stream into texts, which do not depend on how reads cut the bytes."""

    def __init__(self, rule: LineRule) -> None:
        self._cuts = rule is LineRule.CUT
        #: A line without its ending; only `\r` may be there, because `\n` can follow.
        self._pending = b""

    def feed(self, data: bytes) -> list[str]:
        """Return the texts of the lines that are complete; a line that is too long comes in pieces."""
        lines = (self._pending + data).splitlines(keepends=True)
        self._pending = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        texts = self._texts(lines)
        # Four bytes more than a piece: the cut never depends on bytes that have not arrived.
        while len(self._pending) > LONGEST_TEXT + 4:
            end = _character_end(self._pending, LONGEST_TEXT)
            texts.append(_text(self._pending[:end]))
            self._pending = self._pending[end:]
        return texts

    def rest(self) -> list[str]:
        """Return what is left at the end of the stream: a line without its ending, or with a bare `\\r`."""
        lines, self._pending = self._pending.splitlines(keepends=True), b""
        return self._texts(lines)

    def _texts(self, lines: list[bytes]) -> list[str]:
        """Return the texts of lines, each with its ending, but for the last one of a stream."""
        texts: list[str] = []
        for line in lines:
            # A line has only one ending, so this cuts no more than that.
            body, start = line.rstrip(b"\r\n"), 0
            while len(body) - start > LONGEST_TEXT:
                end = _character_end(body, start + LONGEST_TEXT)
                texts.append(_text(body[start:end]))
                start = end
            # Clients that join lines need something for an empty one.
            texts.append((_text(body[start:]) or "\n") if self._cuts else _text(line[start:]))
        return texts


def _character_end(data: bytes, at: int) -> int:
    """Return the nearest place from `at` back that is not inside a character."""
    for back in range(4):
        if data[at - back] & 0xC0 != 0x80:
            return at - back
    return at


def _text(data: bytes) -> str:
    return str(data, "utf-8", "replace")
