"""Long sequences on the disk: a program decides how long they get, and our memory is bounded.

A short sequence stays in memory. A longer one continues in an unnamed file,
which only this process can read and which disappears with it.
"""

from __future__ import annotations

import marshal
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, cast, overload

import msgspec

Item = TypeVar("Item")

#: How many bytes of items to keep in memory once there is a file, and to read from the disk at a time.
PIECE = 1 << 18
#: How many bytes of items to keep in memory before there is a file.
SHORT = 1 << 20


class Spool(Sequence[Item], Generic[Item]):
    """A sequence to append to. It encodes items when they are added and decodes them when they are read."""

    def __init__(self, encode: Callable[[Item], bytes], decode: Callable[[bytes], Item]) -> None:
        self._encode = encode
        self._decode = decode
        #: Where each item ends.
        self._ends = array("Q", [0])
        self._tail = bytearray()
        self._written = 0
        self._file = -1

    def append(self, item: Item) -> None:
        """Add an item."""
        self.append_encoded(self._encode(item))

    def extend(self, items: Iterable[Item]) -> None:
        """Add items one after the other."""
        for item in items:
            self.append_encoded(self._encode(item))

    def append_encoded(self, data: bytes) -> None:
        """Add an item in its encoded form."""
        self._tail += data
        self._ends.append(self._ends[-1] + len(data))
        if len(self._tail) > (PIECE if self._file >= 0 else SHORT):
            self._spill()

    def _spill(self) -> None:
        if self._file < 0:
            import tempfile
            import weakref

            with tempfile.TemporaryFile(prefix="stockade-") as made:
                self._file = os.dup(made.fileno())
            weakref.finalize(self, os.close, self._file)
        left = memoryview(self._tail)
        while left:
            count = os.pwrite(self._file, left, self._written)
            self._written += count
            left = left[count:]
        self._tail = bytearray()

    def encoded(self, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        """Iterate over the items in their encoded form."""
        ends, last = self._ends, len(self) if stop is None else stop
        while start < last:
            end = start + 1
            while end < last and ends[end + 1] - ends[start] <= PIECE:
                end += 1
            data, base = self._bytes(ends[start], ends[end]), ends[start]
            for at in range(start, end):
                yield data[ends[at] - base : ends[at + 1] - base]
            start = end

    def _bytes(self, start: int, end: int) -> bytes:
        data = b""
        while start < min(end, self._written):
            piece = os.pread(self._file, min(end, self._written) - start, start)
            if not piece:
                raise OSError(f"a temporary file ended before its byte {end}")
            data, start = data + piece, start + len(piece)
        return data + bytes(self._tail[start - self._written : end - self._written]) if start < end else data

    def __iter__(self) -> Iterator[Item]:
        return map(self._decode, self.encoded())

    def __reversed__(self) -> Iterator[Item]:
        stop = len(self)
        while stop:
            start = stop - 1
            while start and self._ends[stop] - self._ends[start - 1] <= PIECE:
                start -= 1
            yield from map(self._decode, reversed(list(self.encoded(start, stop))))
            stop = start

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, at: int) -> Item: ...
    @overload
    def __getitem__(self, at: slice) -> list[Item]: ...
    def __getitem__(self, at: int | slice) -> Item | list[Item]:
        if isinstance(at, slice):
            start, stop, step = at.indices(len(self))
            if step != 1:
                return [self[one] for one in range(start, stop, step)]
            return list(map(self._decode, self.encoded(start, stop)))
        if not -len(self) <= at < len(self):
            raise IndexError(at)
        at %= len(self)
        return self._decode(self._bytes(self._ends[at], self._ends[at + 1]))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Spool | tuple | list):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{len(self)} items>"

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)

    def settled(self) -> Sequence[Item]:
        """Return the items as a tuple if there are few, else this spool."""
        return tuple(self) if self._file < 0 else self


def spool(kind: type[Item]) -> Spool[Item]:
    """Return an empty spool of structs or plain tuples that hold text, bytes, numbers and tuples of those."""
    # File names may not be UTF-8: marshal can represent them, JSON and MessagePack cannot.
    if not issubclass(kind, msgspec.Struct):
        return Spool(cast("Callable[[Item], bytes]", marshal.dumps), marshal.loads)
    fields, made = cast("Callable[[Item], Any]", msgspec.structs.astuple), cast("Callable[..., Item]", kind)
    return Spool(lambda item: marshal.dumps(fields(item)), lambda data: made(*marshal.loads(data)))
