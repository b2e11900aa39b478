"""The log of a state directory: every receipt, each naming the one before.

It is SQLite in WAL mode. One transaction appends a receipt: it takes the write lock first, looks up the
previous receipt, completes and signs the statement, and writes it. So all processes and threads make one
chain. A process that is killed leaves its whole receipt in the log, or none. A power failure can lose the
last receipts; with `receipts.fsync` it cannot.

Triggers keep receipts from being updated or deleted. Only `stockade.receipt.prune` removes some, from the
beginning, in the transaction that appends a signed checkpoint. The columns to search lie apart from the
statements, so that a long log is quick to search; there is no index, so that appending always costs the same.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from stockade import state
from stockade.errors import NotFoundError, ReceiptError, StockadeError
from stockade.receipt import ed25519, keys
from stockade.receipt.statement import (
    NOTHING,
    Predicate,
    Receipt,
    Signature,
    Statement,
    canonical,
    checked_signatures,
    digest,
    to_sign,
)
from stockade.resolve.receipt_settings import Settings, settings

if TYPE_CHECKING:
    import sqlite3
else:
    try:
        import _sqlite3 as sqlite3  # without the date converters, which are slow to import
    except ImportError:
        import sqlite3

FILE = "receipts.db"
#: A file that reserves room for the receipt of a program that fills the disk, and its size.
RESERVE, ROOM = "receipts.reserve", 64 << 10
VERSION = 3
LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
#: How many seconds to wait for another process that is appending.
PATIENCE = 30.0
#: The current state of each agent, and the place of the event that set it (`stockade.agents.registry`).
AGENTS = """CREATE TABLE agents (
        name TEXT NOT NULL PRIMARY KEY, category TEXT NOT NULL, policy TEXT NOT NULL, hash TEXT NOT NULL,
        enabled INTEGER NOT NULL, place INTEGER NOT NULL
    ) WITHOUT ROWID"""
#: The largest WAL that a process leaves behind: the next one that opens the log reads all of it.
LEFT = 1 << 20
SCHEMA = f"""
    CREATE TABLE chain (id TEXT NOT NULL);
    CREATE TABLE receipts (
        sequence INTEGER PRIMARY KEY, hash TEXT NOT NULL, started TEXT NOT NULL, agent TEXT NOT NULL,
        category TEXT NOT NULL, action TEXT NOT NULL, outcome TEXT NOT NULL, program TEXT NOT NULL
    );
    CREATE TABLE statements (
        sequence INTEGER PRIMARY KEY, key TEXT NOT NULL, signature BLOB NOT NULL, payload BLOB NOT NULL
    );
    CREATE TABLE cosignatures (
        sequence INTEGER NOT NULL, key TEXT NOT NULL, signature BLOB NOT NULL, PRIMARY KEY (sequence, key)
    ) WITHOUT ROWID;
    {AGENTS};
    PRAGMA user_version = {VERSION};
"""
#: The tables that have a receipt's place.
PLACED = ("receipts", "statements", "cosignatures")


def trigger(table: str, verb: str) -> str:
    """Return the SQL that keeps the rows of a table from being updated or deleted."""
    abort = "SELECT RAISE(ABORT, 'append only')"
    return f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table} BEGIN {abort}; END;"


PROTECTION = "".join(trigger(table, verb) for table in ("chain", *PLACED) for verb in ("UPDATE", "DELETE"))
#: The SQL that upgrades a log of this version to the next. Version 2 cannot read checkpoints.
UPGRADES = {1: AGENTS, 2: "SELECT 1"}
#: Takes the write lock at once.
BEGIN = "BEGIN IMMEDIATE"
#: Writes something else in the transaction of a receipt, given its place.
Besides = Callable[["sqlite3.Connection", int], object]


class ChainLink(msgspec.Struct, frozen=True):
    """The place of a receipt in its chain, and the key that signs it."""

    chain: str
    sequence: int
    previous: str
    key: str


class ChainRow(msgspec.Struct, frozen=True):
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
        log = self._log
        if isinstance(error, sqlite3.OperationalError):
            hint = "free some space, or set STOCKADE_HOME to a directory elsewhere"
            if error.sqlite_errorcode in LOCKED:
                hint = "another process holds it: `stockade ps` lists those that run sandboxes"
            raise ReceiptError(f"{log.path}: {error}", failure="not-made", hint=hint) from None
        if isinstance(error, sqlite3.Error | TypeError):
            raise ReceiptError(
                f"{log.path} is damaged: {error}",
                failure="damaged",
                hint=f"to begin a new log, {log.aside}",
            ) from None
        if isinstance(error, OSError) and not isinstance(error, StockadeError):
            raise ReceiptError(
                f"cannot keep receipts in {log.home}: {error.strerror}", failure="not-made"
            ) from None


class Chain:
    """The log of one state directory, as this process holds it open."""

    def __init__(self, home: str) -> None:
        self.home = home
        self.path = f"{home}/{FILE}"
        self.settings: Settings = settings()
        self._lock = threading.Lock()
        self._open: sqlite3.Connection | None = None
        self._file = (0, 0)
        #: Whether the reserved room has been used.
        self._spent = False
        self.id = ""

    def ready(self) -> None:
        """Prepare for a receipt: open the log, and load or make the key."""
        if self._open is not None:
            if self._spent:  # the next program that fills the disk needs a receipt as well
                self._spent = not _hold_room(f"{self.home}/{RESERVE}")
            return
        with self._lock, _LogErrors(self):
            self.connection()
            keys.signer(self.home, self.settings)

    def append(self, write: Callable[[ChainLink], Statement], besides: Besides = lambda *_: None) -> Receipt:
        """Sign the statement that `write` makes for the next place, and add it with what `besides` writes.

        The log gets all of it or nothing. Both are called with the write lock held, `besides` first: if it
        raises, the log stays as it was.
        """
        with self._lock, _LogErrors(self):
            try:
                return self._append_in_transaction(write, besides)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode in LOCKED or not self._make_room():
                    raise
                return self._append_in_transaction(write, besides)

    def shrink(self) -> None:
        """Give the room of removed receipts back to the file system."""
        with self._lock, _LogErrors(self):
            connection = self.connection()
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return sum(os.stat(path).st_size for path in self._files[:2] if os.path.lexists(path))

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

    def _append_in_transaction(
        self,
        write: Callable[[ChainLink], Statement],
        besides: Besides = lambda *_: None,
        second: ed25519.Signer | None = None,
    ) -> Receipt:
        # Leaving the block commits; an exception rolls back.
        with self.connection() as connection:
            connection.execute(BEGIN)
            return self._insert_next(connection, write, besides, second)

    def _insert_next(
        self,
        connection: sqlite3.Connection,
        write: Callable[[ChainLink], Statement],
        besides: Besides,
        second: ed25519.Signer | None,
    ) -> Receipt:
        signer = keys.signer(self.home, self.settings)
        last = connection.execute("SELECT sequence, hash FROM receipts ORDER BY sequence DESC LIMIT 1")
        sequence, previous = last.fetchone() or (0, NOTHING)
        besides(connection, sequence + 1)
        statement = write(ChainLink(self.id, sequence + 1, previous, signer.id))
        payload = canonical(statement)
        signed = to_sign(payload)
        also = {one.id: one for one in (keys.cosigner(self.settings), second) if one is not None}
        also.pop(signer.id, None)
        signatures = [Signature(signer.id, signer.sign(signed))]
        signatures += [Signature(id, also[id].sign(signed)) for id in sorted(also)]
        row = row_of(statement.predicate, digest(payload))
        connection.execute(
            "INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", msgspec.structs.astuple(row)
        )
        first = signatures[0]
        connection.execute(
            "INSERT INTO statements VALUES (?, ?, ?, ?)", (sequence + 1, first.keyid, first.sig, payload)
        )
        for other in signatures[1:]:
            connection.execute(
                "INSERT INTO cosignatures VALUES (?, ?, ?)", (sequence + 1, other.keyid, other.sig)
            )
        return Receipt(payload, tuple(signatures))

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
        with self._lock, _LogErrors(self):
            self.connection()
            try:
                keys.signer(self.home, self.settings)
                vouches = True
            except ReceiptError:
                vouches = False
            new, install = keys.replacement(self.home, passphrase)
            if vouches:
                from stockade.receipt import builder

                self._append_in_transaction(lambda link: builder.rotation(link, new.public), second=new)
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
            return one.receipt
        raise NotFoundError(
            f"there is no receipt {sequence}",
            hint="`stockade receipts list` lists them, and `stockade verify --chain` says which were pruned",
        )

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
            signatures = (Signature(key, signature), *(Signature(*other) for other in others))
            receipt = Receipt(payload, checked_signatures(signatures))
            entries.append(ChainEntry(place, receipt, ChainRow(*row)))
        return entries

    def connection(self) -> sqlite3.Connection:
        """Return the open log; open it again if its file was replaced or removed."""
        if self._open is not None and self._file == _identity(self.path):
            return self._open
        self.close()
        state.ensure(self.home)
        # Looked for before the log: another process that makes one makes the log before these.
        beside = [path for path in self._files[1:] if os.path.lexists(path)]
        if not os.path.lexists(self.path):
            if beside:  # SQLite would replay them into the new log
                raise ReceiptError(
                    f"{self.path} is gone, but {' and '.join(beside)} are still there",
                    failure="damaged",
                    hint=f"they may hold the last receipts: restore {FILE}, or {self.aside}",
                )
            _make_log(self.path)
        self._file = _identity(self.path)
        connection = sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        try:
            version = _upgrade(connection)
            if version != VERSION:
                raise ReceiptError(
                    f"{self.path} was written by another version of Stockade (schema {version})",
                    failure="damaged",
                    hint="upgrade Stockade, or set STOCKADE_HOME to another directory",
                )
            # NORMAL: a power failure leaves the log intact, perhaps without the last receipts.
            connection.execute(f"PRAGMA synchronous = {'FULL' if self.settings.fsync else 'NORMAL'}")
            (self.id,) = connection.execute("SELECT id FROM chain").fetchone()
        except BaseException:
            connection.close()
            raise
        self._open = connection
        _hold_room(f"{self.home}/{RESERVE}")
        return connection

    @property
    def _files(self) -> list[str]:
        """The files of the log: SQLite keeps the last receipts in the WAL until a checkpoint."""
        return [self.path, f"{self.path}-wal", f"{self.path}-shm"]

    @property
    def aside(self) -> str:
        """What a hint says about a log that cannot be used."""
        return f"move {', '.join(self._files)} aside together, and keep them: they may be evidence"

    def close(self) -> None:
        """Close the log; the next use opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

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
        if self._open is not None:
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._open))
            self._open = None

    def leave(self) -> None:
        """Abandon the log at the end of the process, or close it if its WAL is large."""
        if not self._lock.acquire(blocking=False):
            return self.abandon()
        with contextlib.suppress(OSError, sqlite3.Error):
            if self._open is not None and os.stat(f"{self.path}-wal").st_size > LEFT:
                self.close()
        self._lock.release()
        self.abandon()


def is_id(text: str) -> bool:
    """Whether a word has the form of a receipt's id: "last", a place, or a place and the start of a hash."""
    number, _, hash = text.partition("-")
    numbered = number.isascii() and number.isdigit() and len(number) < 19
    return text == "last" or (numbered and not hash.strip("0123456789abcdef"))


def row_of(predicate: Predicate, hash: str) -> ChainRow:
    """Return the columns for searching of a receipt."""
    who = predicate.who
    return ChainRow(
        predicate.sequence, hash, predicate.started, who.agent, who.category, who.action,
        predicate.ending.outcome, predicate.command.program,
    )  # fmt: skip


def _make_log(path: str) -> None:
    """Make an empty log under another name and link it: no process sees half of one, and the first wins."""
    part = f"{path}.{os.urandom(6).hex()}"
    os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        with contextlib.closing(sqlite3.connect(part, isolation_level=None)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.executescript(f"{BEGIN};{SCHEMA}{PROTECTION}")  # one wait for the disk, not ten
            connection.execute("INSERT INTO chain VALUES (?)", (os.urandom(16).hex(),))
            connection.commit()
        with contextlib.suppress(FileExistsError):
            os.link(part, path)
    finally:
        os.unlink(part)


def _upgrade(connection: sqlite3.Connection) -> int:
    """Upgrade an older log, and return its version."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in UPGRADES:
        return int(version)
    with connection:  # all of it, or nothing
        connection.execute(BEGIN)
        (version,) = connection.execute("PRAGMA user_version").fetchone()  # another process may have upgraded
        for step in range(version, VERSION):
            connection.execute(UPGRADES[step])
        connection.execute(f"PRAGMA user_version = {max(version, VERSION)}")
    return max(int(version), VERSION)


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
    """Close every log. The next receipt opens its log again."""
    while _chains:
        _chains.popitem()[1].close()


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
