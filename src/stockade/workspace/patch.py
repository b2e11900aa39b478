"""Patches as git writes them, so that `git apply` makes the same changes elsewhere."""

from __future__ import annotations

import base64
import hashlib
import stat
import zlib
from typing import TYPE_CHECKING

from stockade.errors import SetupError
from stockade.workspace.lines import unified

if TYPE_CHECKING:
    from stockade.workspace.diff import Contents, Pair, Side

_ESCAPES = {7: b"a", 8: b"b", 9: b"t", 10: b"n", 11: b"v", 12: b"f", 13: b"r", 34: b'"', 92: b"\\"}
NOTHING = b"0" * 40


def section(pair: Pair, contents: Contents) -> bytes:
    """The part of a patch for one path, or nothing if git has no word for it."""
    from stockade.workspace.diff import binary_content

    side = pair.new or pair.old
    if side is None or side.type not in ("file", "link"):
        return b""
    before, after = contents
    if before is None or after is None:
        raise SetupError(
            f"{side.path} is too large for a patch, or cannot be read", stage="diff", hint="name other paths"
        )
    old_name, new_name = ((one or side).path for one in (pair.old, pair.new))
    lines = [b"diff --git %s %s" % (quoted(f"a/{old_name}"), quoted(f"b/{new_name}"))]
    lines += _modes(pair)
    if pair.kind == "renamed":
        lines += [b"similarity index 100%"]
        lines += [b"rename from " + quoted(old_name), b"rename to " + quoted(new_name)]
    if before == after and pair.old is not None and pair.new is not None:
        # git has two modes only: one that it cannot tell from the other is no change to it.
        return b"\n".join(lines) + b"\n" if len(lines) > 1 else b""
    index = b"index %s..%s" % (_blob(before, pair.old), _blob(after, pair.new))
    lines.append(index + (b" " + _mode(pair.new) if pair.new is not None and _same_mode(pair) else b""))
    body = b""
    if binary_content(before) or binary_content(after):
        body = b"GIT binary patch\n" + _literal(after) + _literal(before)
    elif before != after:
        old = _label(f"a/{old_name}") if pair.old else b"/dev/null"
        new = _label(f"b/{new_name}") if pair.new else b"/dev/null"
        body = b"--- %s\n+++ %s\n" % (old, new) + unified(before, after)[0]
    return b"\n".join(lines) + b"\n" + body


def _modes(pair: Pair) -> list[bytes]:
    if pair.old is None:
        return [b"new file mode " + _mode(pair.new)]
    if pair.new is None:
        return [b"deleted file mode " + _mode(pair.old)]
    if _same_mode(pair):
        return []
    return [b"old mode " + _mode(pair.old), b"new mode " + _mode(pair.new)]


def _same_mode(pair: Pair) -> bool:
    return pair.old is not None and pair.new is not None and _mode(pair.old) == _mode(pair.new)


def _mode(side: Side | None) -> bytes:
    assert side is not None
    if stat.S_ISLNK(side.info.st_mode):
        return b"120000"
    return b"100755" if side.info.st_mode & stat.S_IXUSR else b"100644"


def _blob(data: bytes, side: Side | None) -> bytes:
    """The name that git gives to the content: with it, git checks a binary file before it replaces it."""
    if side is None:
        return NOTHING
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest().encode()


def _literal(data: bytes) -> bytes:
    packed = zlib.compress(data)
    lines = []
    for at in range(0, len(packed), 52):
        piece = packed[at : at + 52]
        # The first letter counts the bytes of the line: A to Z are 1 to 26, a to z 27 to 52.
        count = chr(len(piece) + (64 if len(piece) <= 26 else 70)).encode()
        lines.append(count + base64.b85encode(piece, pad=True))
    return b"literal %d\n" % len(data) + b"\n".join(lines) + b"\n\n"


def _label(path: str) -> bytes:
    """A name in the lines before the hunks, where a tab ends one with a blank in it."""
    name = quoted(path)
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name


def quoted(path: str) -> bytes:
    """A name as git writes it: in quotes and with escapes if it has anything unusual in it."""
    name = path.encode("utf-8", "surrogateescape")
    if all(32 <= byte < 127 and byte not in b'"\\' for byte in name):
        return name
    escaped = bytearray()
    for byte in name:
        if byte in _ESCAPES:
            escaped += b"\\" + _ESCAPES[byte]
        elif 32 <= byte < 127:
            escaped.append(byte)
        else:
            escaped += b"\\%03o" % byte
    return b'"' + bytes(escaped) + b'"'
