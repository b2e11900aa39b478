"""The database of a log: SQLite in WAL mode, in which receipts are searched.

Triggers keep receipts from being updated or deleted. Only `stockade.receipt.prune` removes some, from the
beginning, in the transaction that appends a signed checkpoint. The columns to search lie apart from the
statements, so that a long log is quick to search; there is no index, so that inserting always costs the same.

A commit is on the disk when it returns: what has entered the database leaves the file of the newest receipts
(`stockade.receipt.tail`).
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import ReceiptError
from stockade.receipt.statement import RECORDED, SIGNED, Signature
from stockade.receipt.tail import NewReceipt

if TYPE_CHECKING:
    import sqlite3
else:
    try:
        import _sqlite3 as sqlite3  # without the date converters, which are slow to import
    except ImportError:
        import sqlite3

VERSION = 4
Error, OperationalError = sqlite3.Error, sqlite3.OperationalError
LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
#: The current state of each agent, and the place of the event that set it (`stockade.agents.registry`).
AGENTS = """CREATE TABLE agents (
        name TEXT NOT NULL PRIMARY KEY, category TEXT NOT NULL, policy TEXT NOT NULL, hash TEXT NOT NULL,
        enabled INTEGER NOT NULL, place INTEGER NOT NULL
    ) WITHOUT ROWID"""
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
#: Keeps an older version, which does not know the file of the newest receipts, from appending here: it writes
#: the row of a receipt before its statement.
STATEMENT_FIRST = """CREATE TRIGGER receipts_INSERT BEFORE INSERT ON receipts
    WHEN NOT EXISTS (SELECT 1 FROM statements WHERE sequence = NEW.sequence)
    BEGIN SELECT RAISE(ABORT, 'this log was upgraded by a newer version of Stockade'); END;"""
PROTECTION += STATEMENT_FIRST
#: The SQL that upgrades a log of this version to the next. Version 2 cannot read checkpoints.
UPGRADES = {1: AGENTS, 2: "SELECT 1", 3: STATEMENT_FIRST}
#: Takes the write lock at once.
BEGIN = "BEGIN IMMEDIATE"


def connect(path: str, patience: float) -> tuple[sqlite3.Connection, str]:
    """Open a log, which is upgraded if it is older, and return it with the id of its chain."""
    connection = sqlite3.connect(path, timeout=patience, isolation_level=None, check_same_thread=False)
    try:
        version = _upgrade(connection)
        if version != VERSION:
            raise ReceiptError(
                f"{path} was written by another version of Stockade (schema {version})",
                failure="damaged",
                hint="upgrade Stockade, or set STOCKADE_HOME to another directory",
            )
        connection.execute("PRAGMA synchronous = FULL")
        (id,) = connection.execute("SELECT id FROM chain").fetchone()
        return connection, id
    except BaseException:
        connection.close()
        raise


def make(path: str) -> None:
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


def insert(connection: sqlite3.Connection, one: NewReceipt) -> None:
    """Insert a receipt and its columns for searching; the caller holds a transaction."""
    place, (first, *others) = one.row.sequence, one.signatures or (Signature("", b""),)
    statement = (place, first.keyid, first.sig, one.payload)
    connection.execute("INSERT INTO statements VALUES (?, ?, ?, ?)", statement)
    row = msgspec.structs.astuple(one.row)
    connection.execute("INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    for other in others:
        connection.execute("INSERT INTO cosignatures VALUES (?, ?, ?)", (place, other.keyid, other.sig))


def head_after(connection: sqlite3.Connection, sequence: int) -> int | None:
    """Return the place of the first head after a place, if there is one."""
    words = "SELECT sequence FROM receipts WHERE sequence > ? AND action = ? AND outcome = ?"
    found = connection.execute(f"{words} ORDER BY sequence LIMIT 1", (sequence, SIGNED, RECORDED)).fetchone()
    return None if found is None else int(found[0])


def last(connection: sqlite3.Connection) -> tuple[int, str] | None:
    """Return the place and the hash of the last receipt, if there is one."""
    found = connection.execute("SELECT sequence, hash FROM receipts ORDER BY sequence DESC LIMIT 1")
    return found.fetchone()  # type: ignore[no-any-return]


def has(connection: sqlite3.Connection, sequence: int, hash: str) -> bool:
    """Whether the receipt at a place is the one with this hash."""
    found = connection.execute("SELECT hash FROM receipts WHERE sequence = ?", (sequence,))
    return found.fetchone() == (hash,)  # type: ignore[no-any-return]
