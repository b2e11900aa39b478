"""The file with the records of one supervisor's living sandboxes.

The supervisor keeps the file open, and other processes read it meanwhile. No file is made or removed for a
sandbox: its start is one or two writes, and its end is one. The file is a row of slots, and a slot never
moves:

    pages, mark, frame, frame ...

A frame is a length, a checksum, a number and a record. Each sandbox gets a number of its own. A change
appends a frame with the same number, and the last complete one counts, so a reader sees the record before or
after the change, whatever ends the writer. Frames with another number are left over from an earlier sandbox.
A slot is free if its first length is 0.

A record that outgrows its slot gets another one, further back, before the first is freed: whoever reads the
file from its beginning meets the record at least once. The higher number counts. Few records change more than
once, so they do not travel far.

The mark is the id of a sandbox that `stockade kill` has named. If the slot has another sandbox by then, the
mark is not its id and says nothing.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
import time
from binascii import crc32
from collections.abc import Iterator

import msgspec

FILE = "sandboxes"
PAGE = 4096
#: The most pages of a slot. A command and a path are bounded, also if JSON escapes every character.
MOST_PAGES = 32
#: Bytes that a record may grow with its first change: the hashes of the policy and of the plan, and a PID.
GROWTH = 256
#: Pauses of a millisecond in one reading of the file, for records that are just being written.
PAUSES = 20

#: Pages and mark.
_HEAD = struct.Struct("<I4x64s")
_MARK = 8
_LONGEST_ID = _HEAD.size - _MARK
#: Length, checksum and number come before a record.
_FRAME = struct.Struct("<IIQ")
_FREE = bytes(_FRAME.size)


class Slot:
    """A slot of the supervisor's own file: its place, its pages, its sandbox's number, where it is empty."""

    __slots__ = ("at", "end", "number", "pages")

    def __init__(self, at: int, pages: int, number: int) -> None:
        self.at = at
        self.pages = pages
        self.number = number
        self.end = at + _HEAD.size


class RecordFile:
    """The supervisor's own file. Its threads may use it at the same time, each for its own slots."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._lock = threading.Lock()
        #: The places of free slots, by their pages.
        self._free: dict[int, list[int]] = {}
        self._length = 0
        self._number = 0

    @property
    def is_gone(self) -> bool:
        """Whether the file was removed, so that no other process can see it."""
        return not os.fstat(self._file).st_nlink

    def add(self, record: bytes, *, behind: int = -1) -> Slot:
        """Write the record of a new sandbox, all of it or nothing, to a slot behind a place."""
        pages = -(-(_HEAD.size + 2 * (_FRAME.size + len(record)) + GROWTH) // PAGE)
        if pages > MOST_PAGES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        slot = self._take(pages, behind)
        try:
            self._append(slot, record)
        except BaseException:
            self.free(slot)
            raise
        return slot

    def change(self, slot: Slot, record: bytes, id: str) -> Slot:
        """Replace a record, and return its slot from now on. If this fails, the old record counts."""
        if slot.end + _FRAME.size + len(record) <= slot.at + slot.pages * PAGE:
            self._append(slot, record)
            return slot
        other = self.add(record, behind=slot.at)
        clear(self._file, slot.at)
        # After the slot was cleared: a process that marks it later sees that it must mark the other.
        if self.is_marked(slot, id):
            mark(self._file, other.at, id)
        self._free[slot.pages].append(slot.at)
        return other

    def free(self, slot: Slot) -> None:
        """Remove a record."""
        clear(self._file, slot.at)
        self._free[slot.pages].append(slot.at)

    def is_marked(self, slot: Slot, id: str) -> bool:
        """Whether `stockade kill` has named this sandbox."""
        return os.pread(self._file, _LONGEST_ID, slot.at + _MARK).rstrip(b"\0") == id.encode()

    def _take(self, pages: int, behind: int) -> Slot:
        with self._lock:
            self._number += 1
            free = self._free.setdefault(pages, [])
            for index in range(len(free) - 1, -1, -1):
                if free[index] > behind:
                    return Slot(free.pop(index), pages, self._number)
            # Under the lock: a reader needs the pages of each slot to find the next one.
            _write(self._file, _HEAD.pack(pages, b"") + _FREE, self._length)
            slot = Slot(self._length, pages, self._number)
            self._length += pages * PAGE
            return slot

    def _append(self, slot: Slot, record: bytes) -> None:
        before = _FRAME.pack(len(record), _checksum(record, slot.number), slot.number)
        _write(self._file, before + record, slot.end)
        slot.end += _FRAME.size + len(record)


class StoredBytes(msgspec.Struct, frozen=True):
    """The last complete record in a slot, and the number of its sandbox."""

    at: int
    number: int
    record: bytes


def read(file: int) -> tuple[list[StoredBytes], bool]:
    """Return the records in the file of any supervisor, and whether it is damaged."""
    found: list[StoredBytes] = []
    damaged, pauses = False, PAUSES
    for at, pages in _slots(file):
        while (frame := _last_frame(os.pread(file, pages * PAGE, at))) is None and pauses:
            pauses -= 1
            time.sleep(0.001)
        if frame is None:
            damaged = True
        elif frame[1]:
            found.append(StoredBytes(at, *frame))
    return found, damaged


def _slots(file: int) -> Iterator[tuple[int, int]]:
    """Yield the place and the pages of each slot; 0 pages if they cannot be, and nothing after it."""
    at = 0
    while len(head := os.pread(file, _HEAD.size, at)) == _HEAD.size:
        pages: int = _HEAD.unpack(head)[0]
        if not 0 < pages <= MOST_PAGES:
            yield at, 0
            return
        yield at, pages
        at += pages * PAGE


def _last_frame(slot: bytes) -> tuple[int, bytes] | None:
    """Return the number and the record of the last complete frame; no record if the slot is free.

    None if the first frame is not complete: it is just being written, or damaged.
    """
    at, found = _HEAD.size, None
    while at + _FRAME.size <= len(slot):
        length, checksum, number = _FRAME.unpack_from(slot, at)
        at += _FRAME.size
        record = slot[at : at + length]
        if found is None and not length:
            return 0, b""
        if len(record) < length or _checksum(record, number) != checksum or found not in (None, number):
            break
        found, last = number, record
        at += length
    return None if found is None else (found, last)


def clear(file: int, at: int) -> None:
    """Make the slot at a place free."""
    _write(file, _FREE, at + _HEAD.size)


def mark(file: int, at: int, id: str) -> None:
    """Leave the id of a sandbox in the slot at a place, for its supervisor."""
    _write(file, id.encode().ljust(_LONGEST_ID, b"\0"), at + _MARK)


def _checksum(record: bytes, number: int) -> int:
    return crc32(record, number & 0xFFFFFFFF)


def _write(file: int, data: bytes, at: int) -> None:
    if os.pwrite(file, data, at) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
