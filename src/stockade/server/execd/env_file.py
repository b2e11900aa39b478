"""The file that `EXECD_ENVS` names: variables that later commands and sessions have, too.

Programs inside append to it, and a hostile one can write anything. So parsing never fails: what is not an
entry is skipped, and the size of the result is bounded whatever the entries refer to.

    K='anything, verbatim, also
    over several lines'
    K="a\\ttab, \\"quotes\\" and $NAME"
    K=plain
"""

from __future__ import annotations

import re
from collections.abc import Mapping

#: How many bytes of the file count, and how many its values may have together: `$NAME` multiplies.
MOST_BYTES = 1 << 20
#: How many bytes of values are expanded, also of those that do not count, and what each line counts: the
#: program that writes the file must not keep the supervisor busy. What follows after that is ignored.
MOST_WORK, LINE = 4 << 20, 64
#: The kernel takes no longer variable.
MOST_VALUE = (128 << 10) - 1
#: How many variables the file can set.
MOST_NAMES = 4096

_ENTRY = re.compile(r"[ \t]*(?:export[ \t]+)?([A-Za-z_][A-Za-z0-9_]*)=")
_SINGLE = re.compile(r"'([^']*+)'")
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_INNER = re.compile(r"\\(.)|\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))", re.DOTALL)
_NAMES = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_ESCAPES = {"\\": "\\", '"': '"', "n": "\n", "r": "\r", "t": "\t"}


def parse_env_file(content: bytes, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the file sets; the last entry for a name wins.

    >>> parse_env_file(b"A='x y'\\nB=\\"$A\\\\t$HOME\\"\\n", {"HOME": "/root"})
    {'A': 'x y', 'B': 'x y\\t/root'}
    """
    text = content[:MOST_BYTES].decode("utf-8", "surrogateescape")
    found: dict[str, str] = {}
    room, work, at = MOST_BYTES, MOST_WORK, 0
    while at < len(text) and work > 0:
        work -= LINE
        entry = _ENTRY.match(text, at)
        raw, at = (None, _next_line(text, at)) if entry is None else _value(text, entry.end())
        if entry is None or raw is None or (entry[1] not in found and len(found) == MOST_NAMES):
            continue
        value = raw.expanded(found, environ)
        size = len(value.encode("utf-8", "surrogateescape"))
        work -= size
        if size > min(MOST_VALUE, room) or "\0" in value:
            continue
        room -= size
        found[entry[1]] = value
    return found


class _Quotation:
    """A value as the file writes it, with what its quotation marks mean."""

    def __init__(self, text: str, pattern: re.Pattern[str] | None) -> None:
        self._text, self._pattern = text, pattern

    def expanded(self, *tables: Mapping[str, str]) -> str:
        """Return the value; a name that no table has is empty. A value that grows too long stays cut."""
        if self._pattern is None:
            return self._text
        parts: list[str] = []
        room, at = MOST_VALUE + 1, 0
        for found in self._pattern.finditer(self._text):
            parts += [self._text[at : found.start()], _meaning(found, tables)]
            room -= len(parts[-1]) + len(parts[-2])
            at = found.end()
            if room <= 0:
                break
        return "".join([*parts, self._text[at:]])


def _meaning(found: re.Match[str], tables: tuple[Mapping[str, str], ...]) -> str:
    """Return what an escape or a `$NAME` stands for."""
    if found.re is _INNER and found[1] is not None:
        return _ESCAPES.get(found[1], found[0])
    name = next(group for group in reversed(found.groups()) if group is not None)
    return next((table[name] for table in tables if name in table), "")


def _value(text: str, at: int) -> tuple[_Quotation | None, int]:
    """Return the value that begins at `at`, and where the next line begins; None for an open quotation."""
    for mark, whole, inner in (("'", _SINGLE, None), ('"', _DOUBLE, _INNER)):
        if text.startswith(mark, at):
            found = whole.match(text, at)
            if found is None:
                return None, _next_line(text, at)
            return _Quotation(found[1], inner), _next_line(text, found.end())
    after = _next_line(text, at)
    return _Quotation(text[at:after].strip(), _NAMES), after


def _next_line(text: str, at: int) -> int:
    end = text.find("\n", at)
    return len(text) if end < 0 else end + 1


def expand(text: str, environ: Mapping[str, str]) -> str:
    """Expand `~` at the beginning of a path, and `$NAME` anywhere in it.

    >>> expand("~/$PROJECT", {"HOME": "/root", "PROJECT": "x"})
    '/root/x'
    """
    home = environ.get("HOME", "/")
    if text == "~" or text.startswith("~/"):
        return home + _Quotation(text[1:], _NAMES).expanded(environ)
    return _Quotation(text, _NAMES).expanded(environ)
