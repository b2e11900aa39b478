"""Who cuts off the beginning of the log by himself cannot make it look pruned."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

from stockade import ReceiptError
from stockade.agents import registry
from stockade.receipt import builder, chain, database, ed25519, keys, prune
from stockade.receipt.statement import Removal, canonical, digest, to_sign
from stockade.receipt.tail import row_of
from stockade.receipt.verify import check_log
from support.made_receipts import append, log

THIEF = ed25519.Signer(bytes(range(32)))
OLD = "2026-01-01T00:00:00.000000Z"
NOTHING_KEPT = digest(b"")


def whole(home: Path) -> int:
    return check_log(log(home), {key.id: key.public for key in keys.known(str(home))})


def refused(home: Path, *failures: str) -> str:
    """Check that the log is refused for one of these reasons, and return the sentence."""
    with pytest.raises(ReceiptError) as caught:
        whole(home)
    assert caught.value.failure in failures, caught.value
    return caught.value.message


def change(home: Path, *statements: str, values: tuple[object, ...] = ()) -> None:
    """Write to the log as an attacker can who has the file."""
    chain.shutdown()
    with contextlib.closing(sqlite3.connect(home / chain.FILE, isolation_level=None)) as connection:
        for table in database.PLACED:
            for verb in ("INSERT", "UPDATE", "DELETE"):
                connection.execute(f"DROP TRIGGER IF EXISTS {table}_{verb}")
        for words in statements:
            connection.execute(words, values if "?" in words else ())


def cut(home: Path, place: str) -> None:
    """Delete receipts by hand."""
    change(home, *(f"DELETE FROM {table} WHERE sequence {place}" for table in database.PLACED))


def copy(home: Path, tmp_path: Path) -> Path:
    """A copy of the log as it is now."""
    chain.shutdown()
    with contextlib.closing(sqlite3.connect(home / chain.FILE)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    return Path(shutil.copy(home / chain.FILE, tmp_path / f"copy-{time.monotonic_ns()}.db"))


def put(home: Path, file: Path, places: str) -> None:
    """Put receipts of a copy into the log."""
    change(home)
    with contextlib.closing(sqlite3.connect(home / chain.FILE, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS other", (str(file),))
        for table in database.PLACED:
            connection.execute(f"INSERT OR REPLACE INTO {table} SELECT * FROM other.{table} WHERE {places}")


@pytest.fixture
def home(stockade_home: Path) -> Path:
    """A log of six receipts, of which the first four are old."""
    for number in range(6):
        append(stockade_home, started=OLD if number < 4 else "")
    return stockade_home


def pruned(home: Path, before: float = 1770000000.0) -> None:
    old = prune.find(log(home), before)
    assert old is not None
    prune.remove(log(home), old)


def forge(home: Path, through: int, signer: ed25519.Signer, named: str = "") -> None:
    """Append a checkpoint of one's own making that explains what is missing."""
    rows = log(home).rows()
    removed = log(home).get(through + 1).predicate.previous
    link = chain.ChainLink(log(home).id, rows[-1].sequence + 1, rows[-1].hash, named or signer.id)
    statement = builder.checkpoint(link, Removal(through, removed, through, NOTHING_KEPT))
    payload = canonical(statement)
    row = row_of(statement.predicate, digest(payload))
    change(
        home,
        "INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
        values=(
            row.sequence,
            row.hash,
            row.started,
            row.agent,
            row.category,
            row.action,
            row.outcome,
            row.program,
        ),
    )
    change(
        home,
        "INSERT INTO statements VALUES (?, ?, ?, ?)",
        values=(link.sequence, named or signer.id, signer.sign(to_sign(payload)), payload),
    )


def test_a_beginning_that_was_cut_off_by_hand_is_missed(home: Path) -> None:
    cut(home, "<= 4")
    assert "receipt 1 is missing" in refused(home, "missing-link")


@pytest.mark.parametrize("claims", [False, True])
def test_a_checkpoint_of_another_key_explains_nothing(home: Path, claims: bool) -> None:
    own = keys.find(str(home), "").id
    cut(home, "<= 4")
    forge(home, 4, THIEF, own if claims else "")
    refused(home, "unknown-key", "signature")


def test_who_has_the_key_can_say_what_he_likes(home: Path) -> None:
    """The control of what is tried above: nothing but the key is missing."""
    seed = ed25519.read_private((home / "keys/signing.pem").read_bytes(), lambda: b"", "")
    cut(home, "<= 4")
    forge(home, 4, ed25519.Signer(seed))
    assert whole(home) == 3


def test_a_checkpoint_of_a_key_that_was_replaced_explains_nothing(home: Path) -> None:
    """A copy of the old private key is worth nothing once the new one has signed."""
    seed = ed25519.read_private((home / "keys/signing.pem").read_bytes(), lambda: b"", "")
    log(home).rotate()
    append(home)
    cut(home, "<= 4")
    forge(home, 4, ed25519.Signer(seed))
    assert "which another key has replaced" in refused(home, "unknown-key")


def test_more_cannot_be_cut_off_than_the_checkpoint_says(home: Path) -> None:
    pruned(home)
    assert whole(home) == 3
    cut(home, "= 5")
    assert "does not explain it" in refused(home, "missing-link")


def test_a_checkpoint_that_was_taken_away_is_missed(home: Path) -> None:
    pruned(home)
    cut(home, "= 7")
    assert "receipt 1 is missing" in refused(home, "missing-link")
    append(home)
    refused(home, "missing-link")


def test_a_checkpoint_that_was_edited_is_refused(home: Path) -> None:
    pruned(home)
    edit = "UPDATE statements SET payload = cast(replace(payload, ?, ?) AS BLOB) WHERE sequence = 7"
    change(home, edit, values=('"through":4', '"through":5'))
    refused(home, "signature")


def test_a_checkpoint_does_not_count_twice(home: Path) -> None:
    pruned(home)
    append(home)
    for table in ("receipts", "statements"):
        columns = {"receipts": "hash, started, agent, category, action, outcome, program"}.get(
            table, "key, signature, payload"
        )
        change(home, f"INSERT INTO {table} SELECT 9, {columns} FROM {table} WHERE sequence = 7")
    refused(home, "swapped")


def test_a_newer_checkpoint_does_not_fit_an_older_log(home: Path, tmp_path: Path) -> None:
    before = copy(home, tmp_path)
    append(home)
    pruned(home)
    after = copy(home, tmp_path)
    chain.shutdown()
    for name in (chain.FILE, f"{chain.FILE}-wal", f"{chain.FILE}-shm"):
        (home / name).unlink(missing_ok=True)
    shutil.copy(before, home / chain.FILE)
    assert whole(home) == 6
    put(home, after, "sequence = 8")
    refused(home, "missing-link")
    cut(home, "<= 4")
    refused(home, "missing-link")
    cut(home, "< 8")
    refused(home, "missing-link")


def test_an_older_checkpoint_does_not_explain_a_later_cut(home: Path, tmp_path: Path) -> None:
    pruned(home)
    first = copy(home, tmp_path)
    for _ in range(3):
        append(home)
    pruned(home, time.time() + 1)
    assert whole(home) == 1
    put(home, first, "sequence = 7")
    refused(home, "missing-link")


def test_a_receipt_that_was_removed_does_not_come_back_alone(home: Path, tmp_path: Path) -> None:
    before = copy(home, tmp_path)
    pruned(home)
    put(home, before, "sequence = 2")
    refused(home, "missing-link")
    put(home, before, "sequence <= 4")
    assert whole(home) == 7, "all of them are the whole chain again"


def test_records_that_stay_can_neither_be_taken_away_nor_exchanged(home: Path, tmp_path: Path) -> None:
    registry.add(str(home), "coder")
    log(home).rotate()
    registry.switch(str(home), "coder", enabled=False, reason="a test")
    registry.switch(str(home), "coder", enabled=True, reason="")
    before = copy(home, tmp_path)
    pruned(home, time.time() + 1)
    assert [row.sequence for row in log(home).rows()] == [8, 10, 11]
    cut(home, "= 10")
    refused(home, "missing-link")
    put(home, before, "sequence = 9")
    refused(home, "missing-link")


def test_a_switch_that_was_taken_back_does_not_come_back(home: Path, tmp_path: Path) -> None:
    """Neither by its old row alone nor together with the event that it names."""
    registry.add(str(home), "coder")
    registry.switch(str(home), "coder", enabled=False, reason="a test")
    off = copy(home, tmp_path)
    registry.remove(str(home), "coder")
    append(home)
    pruned(home, time.time() + 1)
    change(home)
    with contextlib.closing(sqlite3.connect(home / chain.FILE, isolation_level=None)) as connection:
        connection.execute("ATTACH ? AS other", (str(off),))
        connection.execute("INSERT INTO agents SELECT * FROM other.agents")
    with pytest.raises(ReceiptError, match="which does not exist"):
        registry.find(str(home), "coder")
    put(home, off, "sequence = 8")
    with pytest.raises(ReceiptError, match="is not its latest event"):
        registry.find(str(home), "coder")
