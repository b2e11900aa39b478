"""The log of a state directory: every receipt, each naming the one before.

A receipt is appended in one turn: the process takes the lock of the file of the newest receipts
(`stockade.receipt.tail`), looks up the previous receipt, completes and signs the statement, and writes it. So
all processes and threads make one chain. A process that is killed leaves its whole receipt in the log, or
none. A power failure can lose the last receipts; with `receipts.fsync` it cannot.

Everything that reads the log reads its database (`stockade.receipt.database`), after it has moved the newest
receipts there. A run does not load SQLite.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from stockade import state
from stockade.errors import NotFoundError, ReceiptError, StockadeError
from stockade.linux.boot import boot_id
from stockade.receipt import ed25519, keys
from stockade.receipt.statement import (
    NOTHING,
    Receipt,
    Signature,
    Statement,
    canonical,
    checked_signatures,
    digest,
    to_sign,
)
from stockade.receipt.tail import ChainRow, LastReceipt, NewReceipt, ReceiptTail, TailStart, row_of
from stockade.resolve.receipt_settings import Settings, settings

if TYPE_CHECKING:
    import sqlite3

    from stockade.receipt.batch import HeadTimer

FILE = "receipts.db"
#: A file that reserves room for the receipt of a program that fills the disk, and its size.
RESERVE, ROOM = "receipts.reserve", 64 << 10
#: How many seconds to wait for another process that is appending.
PATIENCE = 30.0
#: The largest WAL that a process leaves behind: the next one that opens the log reads all of it.
LEFT = 1 << 20
#: Writes something else in the transaction of a receipt, given its place.
Besides = Callable[["sqlite3.Connection", int], object]
Write = Callable[["ChainLink"], Statement]
T = TypeVar("T")


class ChainLink(msgspec.Struct, frozen=True):
    """The place of a receipt in its chain, and the key that signs it."""

    chain: str
    sequence: int
    previous: str
    key: str


class ChainEntry(msgspec.Struct, frozen=True):
    """One place of the log: the receipt there, and its columns for searching."""

    place: int
    receipt: Receipt
    row: ChainRow


class Filter(msgspec.Struct, frozen=True):
    """Which receipts to list. Times are in the form in which receipts write them."""

    agent: str | None = None
    outcome: str | None = None
    since: str = ""
    until: str = ""

    def where(self) -> tuple[str, list[str]]:
        """Return the condition in SQL, and its values."""
        asked = [
            ("agent = ?", self.agent),
            ("outcome = ?", self.outcome),
            ("started >= ?", self.since or None),
            ("started < ?", self.until or None),
        ]
        used = [(words, value) for words, value in asked if value is not None]
        return " AND ".join(words for words, _ in used) or "1", [value for _, value in used]


class _LogErrors:
    """A context manager that turns SQLite's errors about a log into a ReceiptError."""

    def __init__(self, log: Chain) -> None:
        self._log = log

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None or isinstance(error, StockadeError):
            return
        from stockade.receipt import database

        log = self._log
        hint = "free some space, or set STOCKADE_HOME to a directory elsewhere"
        if isinstance(error, database.OperationalError):
            if error.sqlite_errorcode in database.LOCKED:
                hint = "another process holds it: `stockade ps` lists those that run sandboxes"
            raise ReceiptError(f"{log.path}: {error}", failure="not-made", hint=hint) from None
        if isinstance(error, database.Error | TypeError | msgspec.MsgspecError):
            raise ReceiptError(
                f"{log.path} is damaged: {error}",
                failure="damaged",
                hint=f"to begin a new log, {log.aside}",
            ) from None
        if isinstance(error, OSError):
            raise ReceiptError(
                f"cannot keep receipts in {log.home}: {error.strerror}", failure="not-made", hint=hint
            ) from None


class Chain:
    """The log of one state directory, as this process holds it open."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.path = f"{home}/{FILE}"
        self.settings: Settings = settings()
        self._lock = threading.Lock()
        self._tail = ReceiptTail(f"{self.path}-tail")
        self._open: sqlite3.Connection | None = None
        self._file = (0, 0)
        #: Whether the reserved room has been used, or has not been looked at.
        self._spent = True
        self._is_ready = False
        #: The hashes of receipts that this process made and no head has signed.
        self._unsigned: set[str] = set()
        self._timer: HeadTimer | None = None
        self.id = ""

    def ready(self) -> None:
        """Prepare for a receipt: reserve room, load or make the key, and keep the newest receipts few."""
        if not self._is_ready or self._tail.is_long:
            with self._lock, _LogErrors(self), self._turn():
                # A process that was killed may have left receipts that it had not signed.
                self._last() if self._is_ready else self._last_signed()
                keys.signer(self.home, self.settings)
            self._is_ready = True
        if self._spent:  # the next program that fills the disk needs a receipt as well
            self._spent = not _hold_room(f"{self.home}/{RESERVE}")

    def append(self, write: Write, besides: Besides | None = None, *, batched: bool = False) -> Receipt:
        """Sign the statement that `write` makes for the next place, and add it with what `besides` writes.

        The log gets all of it or nothing. Both are called with the log locked, `besides` first: if it raises,
        the log stays as it was. If `batched`, a later head signs the receipt (`stockade.receipt.batch`).
        """
        with self._lock, _LogErrors(self), self._turn():
            if batched:
                return self._with_room(lambda: self._append_unsigned(write))
            if besides is None:
                return self._with_room(lambda: self._append(write))
            return self._with_room(lambda: self._append_in_transaction(write, besides))

    def _append(self, write: Write, second: ed25519.Signer | None = None) -> Receipt:
        """Append to the newest receipts, in a turn."""
        new = self._make_next(self._last_signed(), write, second)
        self._tail.append(new, sync=self.settings.fsync)
        return Receipt(new.payload, new.signatures)

    def _append_unsigned(self, write: Write) -> Receipt:
        """Append a receipt that a head signs later, in a turn."""
        from stockade.receipt import batch

        last = self._last()
        if last.unsigned >= batch.MOST:
            last = self._last_signed()
        new = self._make_next(last, write, signed=False)
        self._tail.append(new, sync=self.settings.fsync)
        self._unsigned.add(new.row.hash)
        self._timer = self._timer or batch.HeadTimer(self.sign)
        self._timer.start()
        return Receipt(new.payload, ())

    def _last_signed(self) -> LastReceipt:
        """Return the last receipt, in a turn, after a head if the one before it is not signed."""
        last = self._last()
        return self._append_head(self._tail.newest(last.unsigned)).place if last.unsigned else last

    def _append_head(self, waiting: list[NewReceipt]) -> NewReceipt:
        """Sign the last receipts of the file, in a turn."""
        from stockade.receipt import batch, builder

        signed, found = batch.hashes(self.id, waiting, self._unsigned)
        head = self._make_next(waiting[-1].place, lambda link: builder.head(link, signed, found))
        self._tail.append(head, sync=self.settings.fsync)
        self._unsigned.clear()
        return head

    def sign(self) -> None:
        """Sign the receipts of this process that no head has signed. If that fails, the next reader does."""
        with contextlib.suppress(StockadeError), self._lock, _LogErrors(self):
            if self._unsigned and os.path.lexists(self._tail.path):
                with self._turn():
                    self._last_signed()
            self._unsigned.clear()

    def _append_in_transaction(self, write: Write, besides: Besides) -> Receipt:
        """Append to the database, in a turn: nothing else writes there meanwhile."""
        from stockade.receipt import database

        last = self._settle()
        # Otherwise a process, or this one after a loss of power, would take the older receipt for the last.
        self._tail.clear(sync=True)
        # Leaving the block commits; an exception rolls back.
        with self._connect() as connection:
            connection.execute(database.BEGIN)
            besides(connection, last.sequence + 1)
            new = self._make_next(last, write)
            database.insert(connection, new)
        return Receipt(new.payload, new.signatures)

    def _make_next(
        self, last: LastReceipt, write: Write, second: ed25519.Signer | None = None, *, signed: bool = True
    ) -> NewReceipt:
        signer = keys.signer(self.home, self.settings)
        statement = write(ChainLink(self.id, last.sequence + 1, last.hash, signer.id))
        payload = canonical(statement)
        row = row_of(statement.predicate, digest(payload))
        signatures = self._signatures(payload, signer, second) if signed else ()
        return NewReceipt(row, last.hash, signatures, payload, 0 if signed else last.unsigned + 1)

    def _signatures(
        self, payload: bytes, signer: ed25519.Signer, second: ed25519.Signer | None
    ) -> tuple[Signature, ...]:
        signed = to_sign(payload)
        also = {one.id: one for one in (keys.cosigner(self.settings), second) if one is not None}
        also.pop(signer.id, None)
        signatures = [Signature(signer.id, signer.sign(signed))]
        signatures += [Signature(id, also[id].sign(signed)) for id in sorted(also)]
        return tuple(signatures)

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that locks the log; the log exists then."""
        if not self._tail.is_open and not os.path.lexists(self._tail.path):
            self._connect()
        return self._tail.locked(PATIENCE)

    def _last(self) -> LastReceipt:
        """Return the last receipt, in a turn."""
        start = self._tail.start()
        known = start is not None and (start.boot, start.database) == (boot_id(), _identity(self.path))
        last = self._tail.last() if known and not self._tail.is_long else None
        if last is None or start is None:
            return self._settle()
        self.id = start.chain
        return last

    def _settle(self) -> LastReceipt:
        """Move the newest receipts, all signed, into the database, in a turn, and return the last one."""
        from stockade.receipt import database

        connection, start = self._connect(), self._tail.start()
        newest = [] if start is None else self._tail.receipts()
        if newest and not newest[-1].signatures:
            from stockade.receipt import batch

            self._tail.cut()
            newest.append(self._append_head(batch.unsigned_end(newest)))
        if newest:
            self._tail.sync()
        with connection:
            connection.execute(database.BEGIN)
            last = database.last(connection) or (0, NOTHING)
            for one in newest:
                if (one.row.sequence - 1, one.previous) == last:
                    database.insert(connection, one)
                    last = one.row.sequence, one.row.hash
                elif not database.has(connection, one.row.sequence, one.row.hash):
                    raise self._parted()  # otherwise a process was killed after it had moved this one
        if start is not None and (start.chain != self.id or start.sequence > last[0]):
            raise self._parted()
        begun = TailStart(self.id, *last, _identity(self.path), boot_id(), os.urandom(8))
        self._tail.begin(begun, sync=self.settings.fsync)
        return LastReceipt(*last)

    def _parted(self) -> ReceiptError:
        return ReceiptError(
            f"{self.path} lacks receipts that came before those in {self._tail.path}",
            failure="damaged",
            hint=f"restore both from one moment, or {self.aside}",
        )

    def _with_room(self, step: Callable[[], T]) -> T:
        """Return what `step` returns; if the disk is full, give up the reserved room and try once more."""
        try:
            return step()
        except Exception as error:
            if not _lacks_room(error) or not self._make_room():
                raise
        return step()

    def shrink(self) -> None:
        """Give the room of removed receipts back to the file system."""
        with self._lock, _LogErrors(self):
            connection = self.connection()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @property
    def size(self) -> int:
        """The bytes of its files."""
        files = (path for path in self._files if not path.endswith("-shm") and os.path.lexists(path))
        return sum(os.stat(path).st_size for path in files)

    def look(self, words: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a query in SQL and return its rows."""
        with self._lock, _LogErrors(self):
            return self.connection().execute(words, values).fetchall()

    def _make_room(self) -> bool:
        """Free the reserved room, and return whether there was any."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self.home}/{RESERVE}")
            self._spent = True
            return True
        return False

    def cosign(self, receipt: Receipt) -> None:
        """Add the further signatures of a receipt to the log, which has the receipt already."""
        with self._lock, _LogErrors(self):
            connection = self.connection()
            sequence = receipt.predicate.sequence
            for other in receipt.signatures[1:]:
                connection.execute(
                    "INSERT OR IGNORE INTO cosignatures VALUES (?, ?, ?)", (sequence, other.keyid, other.sig)
                )

    def rotate(self, passphrase: bytes | None = None) -> str:
        """Make a new key that signs from the next receipt on, and return its id.

        The old key signs a record that names the new key, and the new key signs that record too. If the old
        key cannot be used any more (its passphrase is lost, its file damaged), there is no such record.
        """
        with self._lock, _LogErrors(self), self._turn():
            try:
                keys.signer(self.home, self.settings)
                vouches = True
            except ReceiptError:
                vouches = False
            new, install = keys.replacement(self.home, passphrase)
            if vouches:
                from stockade.receipt import builder

                self._append(lambda link: builder.rotation(link, new.public), second=new)
            # Last: if the process is killed before this, the old key goes on and the record has no effect.
            install()
            return new.id

    def rows(self, asked: Filter | None = None, *, newest: int | None = None) -> list[ChainRow]:
        """Return the rows of the log, oldest first; with `newest`, only so many of the newest."""
        words, values = (asked or Filter()).where()
        limit = "" if newest is None else f" LIMIT {newest}"
        with self._lock, _LogErrors(self):
            found = self.connection().execute(
                f"SELECT * FROM receipts WHERE {words} ORDER BY sequence DESC{limit}", values
            )
            return [ChainRow(*row) for row in found][::-1]

    def exists(self) -> bool:
        """Whether there is a log, or a part of one."""
        return any(os.path.lexists(path) for path in self._files)

    def get(self, sequence: int) -> Receipt:
        """Return the receipt at a place."""
        for one in self.all(first=sequence, last=sequence):
            return one.receipt if one.receipt.signatures else self._with_head(one.receipt, sequence)
        raise NotFoundError(
            f"there is no receipt {sequence}",
            hint="`stockade receipts list` lists them, and `stockade verify --chain` says which were pruned",
        )

    def _with_head(self, receipt: Receipt, sequence: int) -> Receipt:
        """Return a receipt that a head signs, with that head."""
        from stockade.receipt import database

        with self._lock, _LogErrors(self):
            place = database.head_after(self.connection(), sequence)
        head = None if place is None else next(self.all(first=place, last=place)).receipt
        return Receipt(receipt.payload, (), head)

    def find(self, id: str) -> Receipt:
        """Return the receipt with an id, or at a place; "last" is the last one."""
        if id == "last":
            rows = self.rows(newest=1)
            if not rows:
                raise NotFoundError("there are no receipts yet", hint="every run makes one")
            return self.get(rows[0].sequence)
        number, _, hash = id.partition("-")
        if not is_id(id):
            raise NotFoundError(
                f"{id!r} is neither a file nor the id of a receipt",
                hint="`stockade receipts list` lists the ids",
            )
        receipt = self.get(int(number))
        if not receipt.hash.startswith(hash):
            raise NotFoundError(
                f"receipt {number} is {receipt.id}, not {id}", hint="`stockade receipts list` lists the ids"
            )
        return receipt

    def all(self, *, first: int = 1, last: int | None = None) -> Iterator[ChainEntry]:
        """Yield the entries of the log from one place to another, in order and unchecked."""
        end = (1 << 62) if last is None else last
        while True:
            with self._lock, _LogErrors(self):
                entries = self._batch(first, end)
            for entry in entries:
                yield entry
                first = entry.place + 1
            if not entries:
                return

    def _batch(self, first: int, last: int) -> list[ChainEntry]:
        """Return a few receipts, so that the lock is not held while the caller looks at them."""
        entries = []
        connection = self.connection()
        rows = connection.execute(
            "SELECT statements.*, receipts.* FROM statements LEFT JOIN receipts USING (sequence)"
            " WHERE sequence BETWEEN ? AND ? ORDER BY sequence LIMIT 200",
            (first, last),
        ).fetchall()
        for place, key, signature, payload, *row in rows:
            if not isinstance(payload, bytes) or not isinstance(signature, bytes):
                raise ReceiptError(f"the log has no receipt at place {place}", failure="damaged")
            others = connection.execute(
                "SELECT key, signature FROM cosignatures WHERE sequence = ? ORDER BY key", (place,)
            )
            own = (Signature(key, signature),) if signature else ()
            signatures = (*own, *(Signature(*other) for other in others))
            receipt = Receipt(payload, checked_signatures(signatures))
            entries.append(ChainEntry(place, receipt, ChainRow(*row)))
        return entries

    def connection(self) -> sqlite3.Connection:
        """Return the database, with all receipts in it."""
        with self._turn():
            if self._tail.has_receipts():
                self._settle()
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        """Return the database as it is; open it again if its file was replaced or removed."""
        if self._open is not None and self._file == _identity(self.path):
            return self._open
        from stockade.receipt import database

        self._close_database()
        state.ensure(self.home)
        # Looked for before the log: another process that makes one makes the log before these.
        beside = [path for path in self._files[1:] if os.path.lexists(path)]
        if not os.path.lexists(self.path):
            if beside and beside != self._empty_tail():  # SQLite would replay the others into the new log
                raise ReceiptError(
                    f"{self.path} is gone, but {' and '.join(beside)} are still there",
                    failure="damaged",
                    hint=f"they may hold the last receipts: restore {FILE}, or {self.aside}",
                )
            database.make(self.path)
        self._file = _identity(self.path)
        self._open, self.id = database.connect(self.path, PATIENCE)
        self._spent = not _hold_room(f"{self.home}/{RESERVE}")
        return self._open

    def _empty_tail(self) -> list[str]:
        """Return the path of the newest receipts, if the file exists and there are none."""
        with contextlib.suppress(FileNotFoundError):
            return [] if os.stat(self._tail.path, follow_symlinks=False).st_size else [self._tail.path]
        return []

    @property
    def _files(self) -> list[str]:
        """The files of the log. SQLite keeps the last receipts that it has in the WAL until a checkpoint."""
        return [self.path, f"{self.path}-wal", f"{self.path}-shm", self._tail.path]

    @property
    def aside(self) -> str:
        """What a hint says about a log that cannot be used."""
        return f"move {', '.join(self._files)} aside together, and keep them: they may be evidence"

    def close(self) -> None:
        """Close the log; the next use opens it again."""
        self._tail.close()
        self._close_database()

    def _close_database(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def settle(self) -> None:
        """Move the newest receipts into the database, if this process has the log open."""
        if not self._tail.is_open and not self._unsigned:
            return
        with self._lock, _LogErrors(self), self._turn():
            self._settle()
            self._tail.clear()

    def close_for_fork(self) -> bool:
        """Close the log and block other threads until `unlock_after_fork`; False if it is in use too long."""
        if not self._lock.acquire(timeout=PATIENCE):
            return False
        self.close()
        return True

    def unlock_after_fork(self) -> None:
        self._lock.release()

    def abandon(self) -> None:
        """Drop the log without closing it, as a killed process would: that is safe and costs nothing.

        Closing would wait twice for the disk, and a forked child must not touch its parent's connection.
        """
        self._tail.close()
        if self._open is not None:
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._open))
            self._open = None

    def leave(self) -> None:
        """Abandon the log at the end of the process, or close it if its WAL is large."""
        if self._unsigned:
            self.sign()
        if self._open is None or not self._lock.acquire(blocking=False):
            return self.abandon()
        from stockade.receipt import database

        with contextlib.suppress(OSError, database.Error):
            if os.stat(f"{self.path}-wal").st_size > LEFT:
                self.close()
        self._lock.release()
        self.abandon()


def is_id(text: str) -> bool:
    """Whether a word has the form of a receipt's id: "last", a place, or a place and the start of a hash."""
    number, _, hash = text.partition("-")
    numbered = number.isascii() and number.isdigit() and len(number) < 19
    return text == "last" or (numbered and not hash.strip("0123456789abcdef"))


def _hold_room(path: str) -> bool:
    """Reserve room for a receipt, and return whether it is reserved. If not, the next run reports it."""
    with contextlib.suppress(OSError):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, ROOM)
        except OSError:
            os.unlink(path)
        finally:
            os.close(file)
    return os.path.lexists(path)


def _lacks_room(error: Exception) -> bool:
    """Whether an error may come from a full disk."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    database = sys.modules.get("stockade.receipt.database")
    if database is None or not isinstance(error, database.OperationalError):
        return False
    return error.sqlite_errorcode not in database.LOCKED


def _identity(path: str) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return info.st_dev, info.st_ino


#: By state directory.
_chains: dict[str, Chain] = {}


def of(home: str) -> Chain:
    """Return the log of a state directory, the same object for the whole process."""
    chain = _chains.get(home)
    if chain is None:
        chain = _chains.setdefault(home, Chain(home))
    return chain


def shutdown() -> None:
    """Move all receipts into their databases, and close every log. The next receipt opens its log again."""
    while _chains:
        log = _chains.popitem()[1]
        with contextlib.suppress(StockadeError, OSError):  # whoever reads the log next gets the error
            log.settle()
        log.close()


def _leave() -> None:
    while _chains:
        _chains.popitem()[1].leave()


#: The logs that a thread keeps closed while it forks, by thread.
_closed_for_fork: dict[int, list[Chain]] = {}


def _before_fork() -> None:
    """Close all logs: SQLite in a forked child would take its parent's locks for its own, for ever."""
    _closed_for_fork[threading.get_ident()] = [one for one in list(_chains.values()) if one.close_for_fork()]


def _after_fork() -> None:
    for one in _closed_for_fork.pop(threading.get_ident(), ()):
        one.unlock_after_fork()


def _after_fork_in_child() -> None:
    _after_fork()
    _closed_for_fork.clear()
    while _chains:
        _chains.popitem()[1].abandon()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
atexit.register(_leave)
