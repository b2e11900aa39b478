"""Remove old receipts from the beginning of the log.

The chain stays verifiable: the transaction that removes receipts appends a checkpoint, a signed event of the
chain with the place and the hash of the last receipt that it removed. Some records stay, because others
depend on them: each rotation, by which a key vouches for the next, and the last event of each agent, which
its row in the registry names. The checkpoint has their digest: to take one away, exchange it or add one
breaks the chain.

The log must be whole before: a checkpoint must not vouch for what something else has changed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import ReceiptError
from stockade.linux.sha256 import Sha256Stream
from stockade.receipt import builder, keys
from stockade.receipt.builder import stamp
from stockade.receipt.chain import Chain
from stockade.receipt.database import PLACED, trigger
from stockade.receipt.statement import BEGUN, PRUNED, RECORDED, ROTATED, SIGNED, Receipt, Removal, kept_line
from stockade.receipt.verify import walk_log

if TYPE_CHECKING:
    import sqlite3

_EVENT = f"outcome = '{RECORDED}' AND action NOT IN ('{BEGUN}', '{PRUNED}', '{SIGNED}')"
#: The records that stay, wherever they are: rotations, and the last event of each agent.
_KEPT = f"""SELECT sequence FROM receipts WHERE {_EVENT} AND (agent = '' OR action = '{ROTATED}'
    OR sequence IN (SELECT MAX(sequence) FROM receipts WHERE {_EVENT} GROUP BY agent))"""


class Prunable(msgspec.Struct, frozen=True):
    """The receipts that can be removed: how many, the place and the hash of the last, and when it began."""

    count: int
    through: int
    hash: str
    started: str

    @property
    def id(self) -> str:
        return f"{self.through}-{self.hash[:12]}"


def find(log: Chain, before: float) -> Prunable | None:
    """Return the receipts at the beginning of the log whose runs began before a time, if there are any.

    A chain loses only its beginning: the first receipt that is not old enough ends the search. One that
    claims to be from the future, because the clock was wrong, does not.
    """
    stays = "SELECT MIN(sequence) FROM receipts WHERE started >= ? AND started <= ?"
    [(first,)] = log.look(f"{stays} AND sequence NOT IN ({_KEPT})", (stamp(before), stamp(time.time())))
    end = (1 << 62) if first is None else first
    old = f"FROM receipts WHERE sequence < ? AND sequence NOT IN ({_KEPT})"
    rows = log.look(f"SELECT sequence, hash, started {old} ORDER BY sequence DESC LIMIT 1", (end,))
    if not rows:
        return None
    through = rows[0][0]  # another process may have appended one since
    [(count,)] = log.look(f"SELECT COUNT(*) {old}", (through + 1,))
    return Prunable(count, *rows[0])


def remove(log: Chain, old: Prunable) -> Receipt:
    """Remove receipts, and return the checkpoint. Nothing is removed if the log is not whole."""
    walk_log(log, {key.id: key.public for key in keys.known(log.home)})
    removals: list[Removal] = []
    return log.append(
        lambda link: builder.checkpoint(link, removals[-1]),
        lambda connection, _: removals.append(_delete(connection, old)),
    )


def _delete(connection: sqlite3.Connection, old: Prunable) -> Removal:
    """Delete the rows of receipts, in a transaction, and return what the checkpoint says about it."""
    there = connection.execute("SELECT hash FROM receipts WHERE sequence = ?", (old.through,)).fetchone()
    if there != (old.hash,):
        raise ReceiptError(
            f"receipt {old.through} is not there any more: another process has pruned the log",
            failure="not-made",
            hint="look at `stockade receipts list`, and run it again if need be",
        )
    gone = connection.execute(
        f"SELECT sequence FROM receipts WHERE sequence <= ? AND sequence NOT IN ({_KEPT})", (old.through,)
    ).fetchall()
    # SQLite may be built to overwrite what it deletes, which needs as much room as is to become free.
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute("CREATE TEMP TABLE gone (sequence INTEGER PRIMARY KEY)")
    connection.executemany("INSERT INTO gone VALUES (?)", gone)
    for table in PLACED:
        connection.execute(f"DROP TRIGGER IF EXISTS {table}_DELETE")
        connection.execute(f"DELETE FROM {table} WHERE sequence IN gone")
        connection.execute(trigger(table, "DELETE"))
    connection.execute("DROP TABLE gone")
    kept = Sha256Stream()
    words = "SELECT sequence, hash FROM receipts WHERE sequence < ? ORDER BY sequence"
    for place, hash in connection.execute(words, (old.through,)):
        kept.update(kept_line(place, hash))
    return Removal(old.through, old.hash, len(gone), kept.hexdigest())
