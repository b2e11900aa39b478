"""The log of a state directory: every receipt, each naming the one before.

SQLite in WAL mode. A receipt is appended in one transaction that takes the
write lock first: the one before is looked up, the statement completed and
signed, and written, so that processes and threads make one chain whatever
their order. A process that is killed leaves its receipt in the log or not,
and never half. By default a loss of power can take the last receipts away;
with `receipts.fsync` it cannot.

Nothing is ever updated or deleted, and triggers see to it. What is searched
for lies apart from the statements, so that a long log is quick to look
through; no index is kept, so that appending to it costs the same.
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
from stockade.errors import NotFoundError, ReceiptError
from stockade.receipt import crypto, keys
from stockade.receipt.settings import Settings, settings
from stockade.receipt.statement import (
    NOTHING,
    Predicate,
    Receipt,
    Signature,
    Statement,
    canonical,
    digest,
    to_sign,
)

if TYPE_CHECKING:
    import sqlite3
else:
    try:
        import _sqlite3 as sqlite3  # without what makes dates of columns
    except ImportError:
        import sqlite3

FILE = "receipts.db"
#: Room that is held for the receipt of a program that has filled the disk, and how much.
RESERVE, ROOM = "receipts.reserve", 64 << 10
VERSION = 2
LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
#: How long to wait for the process that appends just now.
PATIENCE = 30.0
#: The agents as they stand, each with the place of the event that made it so (`stockade.agents.registry`).
AGENTS = """CREATE TABLE agents (
        name TEXT NOT NULL PRIMARY KEY, category TEXT NOT NULL, policy TEXT NOT NULL, hash TEXT NOT NULL,
        enabled INTEGER NOT NULL, place INTEGER NOT NULL
    ) WITHOUT ROWID"""
#: How long a WAL may be left behind. Whoever opens the log next reads all of it, and adds to it.
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
PROTECTION = "".join(
    f"CREATE TRIGGER {table}_{verb} BEFORE {verb} ON {table} BEGIN SELECT RAISE(ABORT, 'append only'); END;"
    for table in ("chain", "receipts", "statements", "cosignatures")
    for verb in ("UPDATE", "DELETE")
)
#: By the version of the log from which each leads to the next.
UPGRADES = {1: AGENTS}
#: Nobody else writes from then on.
BEGIN = "BEGIN IMMEDIATE"
#: What else is written in the transaction of a receipt, given its place.
Besides = Callable[["sqlite3.Connection", int], object]


class Link(msgspec.Struct, frozen=True):
    """The place that a receipt takes in its chain, and the key that signs it."""

    chain: str
    sequence: int
    previous: str
    key: str


class Row(msgspec.Struct, frozen=True):
    """What the log says about a receipt without looking at it."""

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


class Entry(msgspec.Struct, frozen=True):
    """One place of the log: the receipt there, and what is noted of it for searching."""

    place: int
    receipt: Receipt
    row: Row


class Filter(msgspec.Struct, frozen=True):
    """Which receipts are asked for. Times are as receipts write them."""

    agent: str | None = None
    outcome: str | None = None
    since: str = ""
    until: str = ""

    def where(self) -> tuple[str, list[str]]:
        """As SQL, with its values."""
        asked = [
            ("agent = ?", self.agent),
            ("outcome = ?", self.outcome),
            ("started >= ?", self.since or None),
            ("started < ?", self.until or None),
        ]
        said = [(words, value) for words, value in asked if value is not None]
        return " AND ".join(words for words, _ in said) or "1", [value for _, value in said]


class _Told:
    """For a `with` statement: what goes wrong with a log is said in our own words."""

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
        if isinstance(error, OSError):
            raise ReceiptError(
                f"no receipt can be kept in {log.home}: {error.strerror}", failure="not-made"
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
        #: The room that was held has been given up.
        self._spent = False
        self.id = ""

    def ready(self) -> None:
        """Do what can be done before there is a receipt: open the log, and load or make the key."""
        if self._open is not None:
            if self._spent:  # the next program that fills the disk is to have its receipt as well
                self._spent = not _hold_room(f"{self.home}/{RESERVE}")
            return
        with self._lock, _Told(self):
            self._connection()
            keys.signer(self.home, self.settings)

    def append(self, write: Callable[[Link], Statement], besides: Besides = lambda *_: None) -> Receipt:
        """Sign the statement for the next place and put it there: all of it and what is besides, or nothing.

        Both are called with the write lock held, `besides` first: what it raises leaves all as it was.
        """
        with self._lock, _Told(self):
            try:
                return self._appended(write, besides)
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode in LOCKED or not self._make_room():
                    raise
                return self._appended(write, besides)

    def look(self, words: str, values: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
        """What the log answers to a question in SQL."""
        with self._lock, _Told(self):
            return self._connection().execute(words, values).fetchall()

    def _make_room(self) -> bool:
        """Give up the room that is held; whether there was any."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self.home}/{RESERVE}")
            self._spent = True
            return True
        return False

    def _appended(
        self,
        write: Callable[[Link], Statement],
        besides: Besides = lambda *_: None,
        second: crypto.Signer | None = None,
    ) -> Receipt:
        # What is written counts when this is left; what is raised takes it back.
        with self._connection() as connection:
            connection.execute(BEGIN)
            return self._written(connection, write, besides, second)

    def _written(
        self,
        connection: sqlite3.Connection,
        write: Callable[[Link], Statement],
        besides: Besides,
        second: crypto.Signer | None,
    ) -> Receipt:
        signer = keys.signer(self.home, self.settings)
        last = connection.execute("SELECT sequence, hash FROM receipts ORDER BY sequence DESC LIMIT 1")
        sequence, previous = last.fetchone() or (0, NOTHING)
        besides(connection, sequence + 1)
        statement = write(Link(self.id, sequence + 1, previous, signer.id))
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
        """Keep the further signatures of a receipt that is in the log."""
        with self._lock, _Told(self):
            connection = self._connection()
            sequence = receipt.predicate.sequence
            for other in receipt.signatures[1:]:
                connection.execute(
                    "INSERT OR IGNORE INTO cosignatures VALUES (?, ?, ?)", (sequence, other.keyid, other.sig)
                )

    def rotate(self, passphrase: bytes | None = None) -> str:
        """Let a new key sign from now on, between two receipts, and return its id.

        The old key signs a record that names the new one, which signs that too. Where the old one cannot be
        used any more (its passphrase is lost, its file damaged), there is no such record.
        """
        with self._lock, _Told(self):
            self._connection()
            try:
                keys.signer(self.home, self.settings)
                vouches = True
            except ReceiptError:
                vouches = False
            new, put = keys.replacement(self.home, passphrase)
            if vouches:
                from stockade.receipt import making

                self._appended(lambda link: making.rotation(link, new.public), second=new)
            # Afterwards: killed in between, the old key goes on, and the new one is vouched for in vain.
            put()
            return new.id

    def rows(self, asked: Filter | None = None, *, newest: int | None = None) -> list[Row]:
        """What is in the log, the oldest first; at most the `newest` so many."""
        words, values = (asked or Filter()).where()
        limit = "" if newest is None else f" LIMIT {newest}"
        with self._lock, _Told(self):
            found = self._connection().execute(
                f"SELECT * FROM receipts WHERE {words} ORDER BY sequence DESC{limit}", values
            )
            return [Row(*row) for row in found][::-1]

    def exists(self) -> bool:
        """Whether anything was ever logged here."""
        return any(os.path.lexists(path) for path in self._files)

    def get(self, sequence: int) -> Receipt:
        """The receipt at a place."""
        for one in self.all(first=sequence, last=sequence):
            return one.receipt
        raise NotFoundError(f"there is no receipt {sequence}", hint="`stockade receipts list` lists them")

    def find(self, id: str) -> Receipt:
        """The receipt with an id, or at a place; "last" is the last one."""
        if id == "last":
            rows = self.rows(newest=1)
            if not rows:
                raise NotFoundError("there are no receipts yet", hint="every run makes one")
            return self.get(rows[0].sequence)
        number, _, hash = id.partition("-")
        if not is_id(id):
            raise NotFoundError(
                f"{id!r} is neither a file nor the id of a receipt", hint="`stockade receipts list`"
            )
        found = self.get(int(number))
        if not found.hash.startswith(hash):
            raise NotFoundError(f"receipt {number} is {found.id}, not {id}", hint="`stockade receipts list`")
        return found

    def all(self, *, first: int = 1, last: int | None = None) -> Iterator[Entry]:
        """What is in the log from one place to another, in order, as it stands there."""
        end = (1 << 62) if last is None else last
        while True:
            with self._lock, _Told(self):
                entries = self._batch(first, end)
            for entry in entries:
                yield entry
                first = entry.place + 1
            if not entries:
                return

    def _batch(self, first: int, last: int) -> list[Entry]:
        """A few receipts: the lock is not held while they are looked at."""
        found = []
        connection = self._connection()
        rows = connection.execute(
            "SELECT statements.*, receipts.* FROM statements LEFT JOIN receipts USING (sequence)"
            " WHERE sequence BETWEEN ? AND ? ORDER BY sequence LIMIT 200",
            (first, last),
        ).fetchall()
        for place, key, signature, payload, *row in rows:
            if not isinstance(payload, bytes) or not isinstance(signature, bytes):
                raise ReceiptError(f"in place {place} is no receipt", failure="damaged")
            others = connection.execute(
                "SELECT key, signature FROM cosignatures WHERE sequence = ? ORDER BY key", (place,)
            )
            signatures = (Signature(key, signature), *(Signature(*other) for other in others))
            found.append(Entry(place, Receipt(payload, signatures), Row(*row)))
        return found

    def _connection(self) -> sqlite3.Connection:
        """The open log; opened again where somebody has removed it under this process."""
        if self._open is not None and self._file == _identity(self.path):
            return self._open
        self.close()
        state.ensure(self.home)
        # Looked for first: a log that others make meanwhile is there before they are.
        beside = [path for path in self._files[1:] if os.path.lexists(path)]
        if not os.path.lexists(self.path):
            if beside:  # SQLite would take them for the new log's, and write what is in them into it
                raise ReceiptError(
                    f"{self.path} is gone, and {' and '.join(beside)} of it not",
                    failure="damaged",
                    hint=f"the last receipts may be there: put it back, or {self.aside}",
                )
            _make(self.path)
        self._file = _identity(self.path)
        connection = sqlite3.connect(
            self.path, timeout=PATIENCE, isolation_level=None, check_same_thread=False
        )
        try:
            version = _upgraded(connection)
            if version != VERSION:
                raise ReceiptError(
                    f"{self.path} was written by another version of Stockade (schema {version})",
                    failure="damaged",
                    hint="upgrade Stockade, or set STOCKADE_HOME to another directory",
                )
            # NORMAL: whole after a loss of power, perhaps without the last receipts.
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
        """What SQLite keeps the log in: the last receipts are in the second until there is time."""
        return [self.path, f"{self.path}-wal", f"{self.path}-shm"]

    @property
    def aside(self) -> str:
        """What to do with a log that cannot be used."""
        return f"move {', '.join(self._files)} aside together, and keep them: they may be evidence"

    def close(self) -> None:
        """Let go of the log; the next use opens it again."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def hold_still(self) -> bool:
        """Close the log and let nobody open it until `go_on`; False where it is in use for too long."""
        if not self._lock.acquire(timeout=PATIENCE):
            return False
        self.close()
        return True

    def go_on(self) -> None:
        self._lock.release()

    def abandon(self) -> None:
        """Leave the log as a killed process would, which costs nothing and leaves nothing undone.

        Closing it would wait twice for the disk. And a forked child must not touch what is its parent's.
        """
        if self._open is not None:
            import ctypes

            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._open))
            self._open = None

    def leave(self) -> None:
        """At the end of the process: abandon the log, or close it where too much would be left behind."""
        if not self._lock.acquire(blocking=False):
            return self.abandon()
        with contextlib.suppress(OSError, sqlite3.Error):
            if self._open is not None and os.stat(f"{self.path}-wal").st_size > LEFT:
                self.close()
        self._lock.release()
        self.abandon()


def is_id(text: str) -> bool:
    """Whether a word has the form of a receipt's id: "last", its place, or that and the start of its hash."""
    number, _, hash = text.partition("-")
    numbered = number.isascii() and number.isdigit() and len(number) < 19
    return text == "last" or (numbered and not hash.strip("0123456789abcdef"))


def row_of(said: Predicate, hash: str) -> Row:
    """What is noted of a receipt, to find it by."""
    who = said.who
    return Row(
        said.sequence, hash, said.started, who.agent, who.category, who.action, said.ending.outcome,
        said.command.program,
    )  # fmt: skip


def _make(path: str) -> None:
    """Make an empty log, aside and then in its place: nobody sees half of one, and the first is kept."""
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


def _upgraded(connection: sqlite3.Connection) -> int:
    """Bring an older log up to date, and return which version it is."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version not in UPGRADES:
        return int(version)
    with connection:  # all of it, or nothing
        connection.execute(BEGIN)
        (version,) = connection.execute("PRAGMA user_version").fetchone()  # another process may be faster
        for step in range(version, VERSION):
            connection.execute(UPGRADES[step])
        connection.execute(f"PRAGMA user_version = {max(version, VERSION)}")
    return max(int(version), VERSION)


def _hold_room(path: str) -> bool:
    """Hold room for a receipt; whether it is held. Where there is none left, the next run will say so."""
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


#: By the state directory.
_chains: dict[str, Chain] = {}


def of(home: str) -> Chain:
    """This process's hold on the log of a state directory."""
    found = _chains.get(home)
    if found is None:
        found = _chains.setdefault(home, Chain(home))
    return found


def shutdown() -> None:
    """Close every log. The next receipt opens its own again."""
    while _chains:
        _chains.popitem()[1].close()


def _leave() -> None:
    while _chains:
        _chains.popitem()[1].leave()


#: The logs that a thread holds still while it forks.
_still: dict[int, list[Chain]] = {}


def _before_fork() -> None:
    """Nothing of SQLite's crosses a fork: a child would take its parent's locks for its own, for ever."""
    _still[threading.get_ident()] = [one for one in list(_chains.values()) if one.hold_still()]


def _after_fork() -> None:
    for one in _still.pop(threading.get_ident(), ()):
        one.go_on()


def _after_fork_in_child() -> None:
    _after_fork()
    _still.clear()
    while _chains:
        _chains.popitem()[1].abandon()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
atexit.register(_leave)
