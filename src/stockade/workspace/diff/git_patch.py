"""Patches in git's format, so that `git apply` makes the same changes elsewhere."""

from __future__ import annotations

import base64
import hashlib
import stat
import zlib
from typing import TYPE_CHECKING

from stockade.errors import SetupError
from stockade.workspace.diff.line_diff import Effort, has_many_lines, unified

if TYPE_CHECKING:
    from stockade.workspace.diff.diff import Contents, Pair, Side

_ESCAPES = {7: b"a", 8: b"b", 9: b"t", 10: b"n", 11: b"v", 12: b"f", 13: b"r", 34: b'"', 92: b"\\"}
NOTHING = b"0" * 40


def section(pair: Pair, contents: Contents, effort: Effort) -> bytes:
    """Return the part of a patch for one path, or nothing if git cannot represent it."""
    from stockade.workspace.diff.diff import binary_content

    side = pair.new or pair.old
    if side is None or side.type not in ("file", "link"):
        return b""
    before, after = contents
    if before is None or after is None:
        raise SetupError(
            f"{side.path} is too large for a patch, or unreadable", stage="diff", hint="name other paths"
        )
    old_name, new_name = ((one or side).path for one in (pair.old, pair.new))
    lines = [b"diff --git %s %s" % (quoted(f"a/{old_name}"), quoted(f"b/{new_name}"))]
    lines += _modes(pair)
    if pair.kind == "renamed":
        lines += [b"similarity index 100%"]
        lines += [b"rename from " + quoted(old_name), b"rename to " + quoted(new_name)]
    if before == after and pair.old is not None and pair.new is not None:
        # git knows two modes only: a change between modes that it treats as the same is no change.
        return b"\n".join(lines) + b"\n" if len(lines) > 1 else b""
    index = b"index %s..%s" % (_blob(before, pair.old), _blob(after, pair.new))
    lines.append(index + (b" " + _mode(pair.new) if pair.new is not None and _same_mode(pair) else b""))
    body = b""
    if binary_content(before) or binary_content(after) or has_many_lines(before, after):
        body = b"GIT binary patch\n" + _literal(after) + _literal(before)
    elif before != after:
        old = _label(f"a/{old_name}") if pair.old else b"/dev/null"
        new = _label(f"b/{new_name}") if pair.new else b"/dev/null"
        body = b"--- %s\n+++ %s\n" % (old, new) + unified(before, after, effort)[0]
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
    """Return git's name for the content: git checks a binary file by it before replacing the file."""
    if side is None:
        return NOTHING
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest().encode()


def _literal(data: bytes) -> bytes:
    packed = zlib.compress(data)
    lines = bytearray(b"literal %d\n" % len(data))
    for at in range(0, len(packed), 52):
        piece = packed[at : at + 52]
        # The first letter counts the bytes of the line: A to Z are 1 to 26, a to z 27 to 52.
        count = chr(len(piece) + (64 if len(piece) <= 26 else 70)).encode()
        lines += count + base64.b85encode(piece, pad=True) + b"\n"
    return bytes(lines) + b"\n"


def _label(path: str) -> bytes:
    """Return a name for the lines before the hunks, where a tab must follow a name with a space."""
    name = quoted(path)
    return name + b"\t" if b" " in name and not name.startswith(b'"') else name


def quoted(path: str) -> bytes:
    """Return a name as git writes it: in quotes and with escapes if it has unusual characters."""
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
