"""The newest receipts of a log, in a file beside its database.

A run appends its receipt here: one write, without SQLite. Whoever reads the log first moves the receipts into
the database, and so does a run that finds the file long. The file begins with its start: the chain, and the
last receipt in the database. Then come frames, each with one receipt, its length and its checksum. The length
stands at the end of a frame too, so that the last receipt is found without reading the others.

All processes take turns by a lock on the file, which is never renamed or replaced. An empty file says
nothing: the database then knows the last receipt. These rules keep the two consistent, also after SIGKILL and
a loss of power:

- Receipts enter the database after the file is on the disk, and leave the file after the database is.
- A receipt is written to the database directly only while the file is empty, on the disk too.
- A process that is killed while it writes leaves an incomplete frame. Nobody got that receipt, so the next
  process removes the frame. After another boot any frame may be damaged; those before the first one count.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import time
from binascii import crc32
from collections.abc import Iterator

import msgspec

from stockade.errors import ReceiptError
from stockade.linux.boot import boot_id
from stockade.receipt.statement import Predicate, Signature

#: The first bytes of the file; another format gets another number.
MAGIC = b"receipts tail 1\n"
#: Length and checksum come before a body, the length again after it.
_BEFORE, _AFTER = struct.Struct("<II"), struct.Struct("<I")
#: The most bytes of the start.
_MOST_START = 1024
#: From this length on the receipts are moved into the database.
LONG = 1 << 20
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class TailStart(msgspec.Struct, frozen=True, array_like=True):
    """What the file begins with: the chain, the last receipt in the database and its file, the boot."""

    chain: str
    sequence: int
    hash: str
    database: tuple[int, int]
    boot: str
    #: Random, so that a process notices that another one emptied the file and began it again.
    turn: bytes


class ChainRow(msgspec.Struct, frozen=True, array_like=True):
    """The columns by which the log can be searched for a receipt."""

    sequence: int
    hash: str
    started: str
    agent: str
    category: str
    action: str
    outcome: str
    program: str

    @property
    def id(self) -> str:
        return f"{self.sequence}-{self.hash[:12]}"


class NewReceipt(msgspec.Struct, frozen=True, array_like=True):
    """A receipt with all that the database will have of it, and the hash of the one before."""

    row: ChainRow
    previous: str
    #: Empty for a receipt that a head signs.
    signatures: tuple[Signature, ...]
    payload: bytes
    #: How many receipts, from this one back, no head has signed.
    unsigned: int = 0

    @property
    def place(self) -> LastReceipt:
        return LastReceipt(self.row.sequence, self.row.hash, self.unsigned)


class LastReceipt(msgspec.Struct, frozen=True):
    """The place and the hash of the last receipt, and how many receipts from it back no head has signed."""

    sequence: int
    hash: str
    unsigned: int = 0


class ReceiptTail:
    """The file of one log, as this process holds it open. Callers hold `locked` around all but `close`."""

    def __init__(self, path: str) -> None:
        self.path = path
        #: The bytes of the file: since it was locked, nobody else changes them.
        self.length = 0
        self._file = -1
        self._start: TailStart | None = None
        #: The raw start, and the length and the last receipt of the file when this process wrote to it.
        self._raw = b""
        self._length = 0
        self._last = LastReceipt(0, "")
        #: Where the complete frames end, after `receipts`.
        self._end = 0

    @contextlib.contextmanager
    def locked(self, patience: float) -> Iterator[None]:
        """Hold the file, which is made if it is missing, against other processes."""
        late = time.monotonic() + patience
        while True:
            self._open()
            self._take(late)
            if self._is_in_place():
                break
            self.close()
        try:
            yield
        finally:
            if self._file >= 0:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _open(self) -> None:
        if self._file < 0:
            self._file = os.open(self.path, _FLAGS | os.O_CREAT, 0o600)

    def _take(self, late: float) -> None:
        pause = 0.0001
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= late:
                    raise ReceiptError(
                        f"{self.path} is locked",
                        failure="not-made",
                        hint="another process holds it: `stockade ps` lists those that run sandboxes",
                    ) from None
            time.sleep(pause)
            pause = min(pause * 2, 0.005)

    def _is_in_place(self) -> bool:
        """Whether the open file is the one at the path: a user may have moved or removed it."""
        try:
            there = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        found = os.fstat(self._file)
        self.length = found.st_size
        return os.path.samestat(there, found)

    def close(self) -> None:
        """Close the file, which frees the lock if this process holds it."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._raw = -1, b""

    @property
    def is_open(self) -> bool:
        return self._file >= 0

    @property
    def is_long(self) -> bool:
        """Whether its receipts are to be moved into the database."""
        return self.is_open and self.length >= LONG

    def has_receipts(self) -> bool:
        """Whether anything, perhaps an incomplete receipt, follows the start."""
        return self.start() is not None and self.length > len(self._raw)

    def start(self) -> TailStart | None:
        """Return what the file begins with; None if it is empty."""
        raw = os.pread(self._file, _MOST_START, 0)
        if self._raw and raw.startswith(self._raw):
            return self._start
        self._raw, self._length, self._start = b"", 0, None
        body = _frame(raw, len(MAGIC)) if raw.startswith(MAGIC) else None
        if body is None:
            # Otherwise a process was killed, or the power failed, before the start was complete.
            if len(raw) == _MOST_START and raw.strip(b"\0"):
                raise self._damaged()
            return None
        self._start = msgspec.msgpack.decode(body, type=TailStart)
        self._raw = raw[: len(MAGIC) + _size(body)]
        return self._start

    def last(self) -> LastReceipt | None:
        """Return the last receipt; None if the end of the file is not a frame."""
        assert self._start is not None
        if self._length == self.length:
            return self._last
        if self.length == len(self._raw):
            return LastReceipt(self._start.sequence, self._start.hash)
        body = self._body_before(self.length)
        return None if body is None else _decode(body).place

    def newest(self, count: int) -> list[NewReceipt]:
        """Return the last receipts of a file that ends with a frame."""
        found: list[NewReceipt] = []
        end = self.length
        while len(found) < count:
            body = self._body_before(end)
            if body is None:
                raise self._damaged()
            found.append(_decode(body))
            end -= _size(body)
        return found[::-1]

    def _body_before(self, end: int) -> bytes | None:
        """Return the body of the frame that ends at a place, if one does."""
        (size,) = _AFTER.unpack(os.pread(self._file, _AFTER.size, end - _AFTER.size))
        at = end - size - _BEFORE.size - _AFTER.size
        if at < len(self._raw):
            return None
        body = _frame(os.pread(self._file, end - at, at), 0)
        return None if body is None or len(body) != size else body

    def receipts(self) -> list[NewReceipt]:
        """Return all receipts, without an incomplete one at the end."""
        assert self._start is not None
        at, data, found = len(self._raw), self._read_all(), []
        while at < len(data):
            body = _frame(data, at)
            if body is None:
                # A killed process leaves a frame that is cut off, and it is the last one.
                cut_off = _is_cut_off(data, at) and self._body_before(len(data)) is None
                if self._start.boot == boot_id() and not cut_off:
                    raise self._damaged()
                break
            found.append(_decode(body))
            at += _size(body)
        self._end = at
        return found

    def cut(self) -> None:
        """Remove what `receipts` did not return: an incomplete receipt."""
        os.ftruncate(self._file, self._end)
        self.length = self._end

    def begin(self, start: TailStart, *, sync: bool) -> None:
        """Empty the file and write its start."""
        self.clear()
        raw = MAGIC + _framed(msgspec.msgpack.encode(start))
        self._write(raw, sync=sync)
        self._start, self._raw, self._length = start, raw, len(raw)
        self._last = LastReceipt(start.sequence, start.hash)

    def append(self, one: NewReceipt, *, sync: bool) -> None:
        """Add a receipt: all of it, or nothing."""
        self._write(_framed(msgspec.msgpack.encode(one)), sync=sync)
        self._last = one.place

    def clear(self, *, sync: bool = False) -> None:
        """Empty the file."""
        os.ftruncate(self._file, 0)
        self._raw, self._start, self.length, self._length = b"", None, 0, 0
        if sync:
            os.fsync(self._file)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fdatasync(self._file)

    def _write(self, data: bytes, *, sync: bool) -> None:
        try:
            if os.pwrite(self._file, data, self.length) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fdatasync(self._file)
        except OSError:
            os.ftruncate(self._file, self.length)
            raise
        self.length += len(data)
        self._length = self.length

    def _read_all(self) -> bytes:
        data = b""
        while part := os.pread(self._file, 1 << 20, len(data)):
            data += part
        return data

    def _damaged(self) -> ReceiptError:
        return ReceiptError(
            f"{self.path} is damaged",
            failure="damaged",
            hint="move it and the files of the log aside together, and keep them: they may be evidence",
        )


def row_of(predicate: Predicate, hash: str) -> ChainRow:
    """Return the columns for searching of a receipt."""
    who = predicate.who
    return ChainRow(
        predicate.sequence, hash, predicate.started, who.agent, who.category, who.action,
        predicate.ending.outcome, predicate.command.program,
    )  # fmt: skip


def _framed(body: bytes) -> bytes:
    return _BEFORE.pack(len(body), crc32(body)) + body + _AFTER.pack(len(body))


def _frame(data: bytes, at: int) -> bytes | None:
    """Return the body of the frame at a place; None if there is no complete one."""
    if len(data) < at + _BEFORE.size:
        return None
    size, checksum = _BEFORE.unpack_from(data, at)
    end = at + _BEFORE.size + size
    body = data[at + _BEFORE.size : end]
    whole = size and data[end : end + _AFTER.size] == _AFTER.pack(size) and crc32(body) == checksum
    return body if whole else None


def _size(body: bytes) -> int:
    return _BEFORE.size + len(body) + _AFTER.size


def _decode(body: bytes) -> NewReceipt:
    return msgspec.msgpack.decode(body, type=NewReceipt)


def _is_cut_off(data: bytes, at: int) -> bool:
    """Whether the file ends within the frame at a place."""
    if len(data) < at + _BEFORE.size:
        return True
    size: int = _BEFORE.unpack_from(data, at)[0]
    return len(data) < at + _BEFORE.size + size + _AFTER.size
