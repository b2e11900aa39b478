"""MessagePack in pieces: maps and arrays of any length, read and written item by item."""

from __future__ import annotations

from typing import BinaryIO

#: How many bytes to read from the file at a time.
PIECE = 1 << 18
#: By first byte: the length of a value of fixed size, and the width of the size field of any other.
FIXED = {
    0xC0: 1, 0xC2: 1, 0xC3: 1, 0xCA: 5, 0xCB: 9, 0xCC: 2, 0xCD: 3, 0xCE: 5, 0xCF: 9, 0xD0: 2, 0xD1: 3,
    0xD2: 5, 0xD3: 9,
}  # fmt: skip
SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
ARRAYS, MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}


def array_head(count: int) -> bytes:
    """Return the first bytes of an array of that many items."""
    return b"\xdd" + count.to_bytes(4, "big")


def map_head(count: int) -> bytes:
    """Return the first bytes of a map of that many keys."""
    return b"\xdf" + count.to_bytes(4, "big")


class MsgpackReader:
    """Reads a file value by value. Invalid MessagePack, or a file that ends too early, is a `ValueError`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._buffer = b""
        self._at = 0

    def value(self) -> bytes:
        """Return the next whole value in its encoded form."""
        end = self._fill(whole=True)
        found, self._at = self._buffer[self._at : end], end
        return found

    def count(self) -> int:
        """Read the head of the next map or array and return its number of items or of key-value pairs."""
        end = self._fill(whole=False)
        head, self._at = self._buffer[self._at : end], end
        if head[0] in ARRAYS or head[0] in MAPS:
            return int.from_bytes(head[1:], "big")
        if 0x80 <= head[0] <= 0x9F:
            return head[0] & 15
        raise ValueError("neither a map nor an array")

    def _fill(self, *, whole: bool) -> int:
        """Fill the buffer up to the end of the next value, or of its head, and return that end."""
        while True:
            end = _end(self._buffer, self._at, whole=whole)
            if end <= len(self._buffer):
                return end
            piece = self._file.read(max(PIECE, end - len(self._buffer)))
            if not piece:
                raise ValueError("the data ends too early")
            self._buffer = self._buffer[self._at :] + piece
            self._at = 0


def _end(data: bytes, at: int, *, whole: bool) -> int:
    """Return the end of the value, or a lower bound of it if that is beyond the data."""
    left = 1
    while left:
        if at >= len(data):
            return at + 1
        left -= 1
        kind = data[at]
        width = SIZED.get(kind) or ARRAYS.get(kind) or MAPS.get(kind) or 0
        if at + 1 + width > len(data):
            return at + 1 + width
        size = int.from_bytes(data[at + 1 : at + 1 + width], "big")
        at += 1 + width
        if kind in SIZED:
            at += size
        elif kind in ARRAYS or kind in MAPS:
            left += size * (2 if kind in MAPS else 1) if whole else 0
        elif 0x80 <= kind <= 0x9F:
            left += (kind & 15) * (2 if kind <= 0x8F else 1) if whole else 0
        elif 0xA0 <= kind <= 0xBF:
            at += kind & 31
        elif 0x80 <= kind < 0xE0:
            if kind not in FIXED:
                raise ValueError(f"no MessagePack value begins with the byte {kind:#x}")
            at += FIXED[kind] - 1
    return at
