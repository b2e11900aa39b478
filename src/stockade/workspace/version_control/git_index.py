"""Git's index: the files that it names, and their content.

A program may have written it, so the parser is strict. It refuses everything that git might interpret
differently: a name whose end does not match its length, padding that is not zero, an extension that changes
the meaning of entries. It supports versions 2 and 3 of the format, with SHA-1.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import NamedTuple

#: A larger index is not read.
LARGEST = 16 << 20
#: An entry: times and numbers of the file, its mode, its owner and size, the digest, flags, the name.
MODE, AFTER_MODE, DIGEST, FLAGS, NAME = 24, 28, 40, 60, 62
#: Flags: two more bytes of flags follow; the length of the name, or the maximum if it is longer.
EXTENDED, LENGTH = 0x4000, 0x0FFF
CHECKSUM = 20
#: Extensions that git can rebuild from the entries and the files.
CACHES = (b"TREE", b"UNTR", b"FSMN", b"EOIE", b"IEOT")


class IndexEntry(NamedTuple):
    """One file that the index names, without git's notes about the file on the disk."""

    name: bytes
    mode: bytes
    digest: bytes
    flags: bytes


class NotReadError(ValueError):
    """The bytes are not an index that this parser supports."""


def entries(index: bytes) -> Iterator[IndexEntry]:
    """Yield the files that an index names, then check what follows; `NotReadError` at the first doubt."""
    place = 12
    for _ in range(_count(index)):
        flags = int.from_bytes(index[place + FLAGS : place + NAME], "big")
        start = place + NAME + (2 if flags & EXTENDED else 0)
        end = index.find(b"\0", start)
        after = place + ((end - place + 8) & ~7)
        if end < 0 or min(end - start, LENGTH) != flags & LENGTH or index[end:after].strip(b"\0"):
            raise NotReadError
        place, at = after, place
        if place > len(index) - CHECKSUM or end == start:
            raise NotReadError
        yield IndexEntry(
            index[start:end],
            index[at + MODE : at + AFTER_MODE],
            index[at + DIGEST : at + FLAGS],
            index[at + FLAGS : start],
        )
    if any(name[:1].islower() for name, _ in _extensions(index, place)):
        raise NotReadError  # git too refuses unknown ones with a small letter: they change what entries mean


def _count(index: bytes) -> int:
    if index[:8] not in (b"DIRC\0\0\0\2", b"DIRC\0\0\0\3") or len(index) > LARGEST:
        raise NotReadError
    return int.from_bytes(index[8:12], "big")


def _extensions(index: bytes, place: int) -> list[tuple[bytes, bytes]]:
    found = []
    while place < len(index) - CHECKSUM:
        name, size = index[place : place + 4], int.from_bytes(index[place + 4 : place + 8], "big")
        found.append((name, index[place + 8 : place + 8 + size]))
        place += 8 + size
    if place != len(index) - CHECKSUM:
        raise NotReadError
    return found


def same_files(one: bytes, other: bytes) -> bool:
    """Return whether two indexes differ only in git's notes for finding changed files faster.

    `git status` writes such notes. An index that cannot be parsed equals no other.
    """
    try:
        if any(a != b for a, b in zip_longest(entries(one), entries(other))):
            return False
        return _lasting_extensions(one) == _lasting_extensions(other)
    except NotReadError:
        return False


def _lasting_extensions(index: bytes) -> list[tuple[bytes, bytes]]:
    """Return the extensions that git could not rebuild."""
    place = 12
    for one in entries(index):
        place += (NAME + len(one.flags) - 2 + len(one.name) + 8) & ~7
    return [(name, data) for name, data in _extensions(index, place) if name not in CACHES]
