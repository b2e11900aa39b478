"""What every operation of a plan has: words, a clause, what must be seen afterwards, and its record."""

from __future__ import annotations

import struct
from typing import ClassVar

import msgspec

READONLY, NOSUID, NODEV, NOEXEC = 1, 2, 4, 8

_RECORD = struct.Struct("=IIQQ")


class Op(msgspec.Struct, frozen=True, kw_only=True, tag=str.lower):
    """One operation. `clause` is the part of the policy it serves."""

    kind: ClassVar[int]
    clause: str = "always"

    def numbers(self) -> tuple[int, int]:
        """The two numbers of its record."""
        return 0, 0

    def data(self) -> bytes:
        """The strings and the blob of its record."""
        return b""

    def describe(self) -> str:
        """What it does, in words."""
        raise TypeError(f"{type(self).__name__} does not describe itself")

    def mounts(self) -> dict[str, tuple[int, str]]:
        """Mount point → attributes and file system type (empty: any) to be seen afterwards."""
        return {}

    def record(self) -> bytes:
        data = self.data()
        size = _RECORD.size + len(data) + 7 & ~7
        return _RECORD.pack(self.kind, size, *self.numbers()) + data.ljust(size - _RECORD.size, b"\0")


def text(*parts: str) -> bytes:
    """Strings as a record holds them. File names need not be UTF-8."""
    return b"".join(part.encode("utf-8", "surrogateescape") + b"\0" for part in parts)
