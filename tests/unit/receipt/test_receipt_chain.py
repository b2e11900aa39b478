"""The log of receipts: one chain, whoever appends and whenever he is killed."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from stockade import NotFoundError, ReceiptError
from stockade.receipt import chain, keys
from stockade.receipt.statement import NOTHING, Statement, digest
from stockade.receipt.tail import row_of
from stockade.receipt.verify import check_log
from support.made_receipts import append, log, statement


def known(home: Path) -> dict[str, bytes]:
    return {key.id: key.public for key in keys.known(str(home))}


def whole(home: Path) -> int:
    """How many receipts the log has; fails where it is not one chain."""
    return check_log(log(home), known(home))


def test_each_receipt_names_the_one_before(stockade_home: Path) -> None:
    receipts = [append(stockade_home) for _ in range(3)]
    said = [receipt.predicate for receipt in receipts]
    assert [one.sequence for one in said] == [1, 2, 3]
    assert [one.previous for one in said] == [NOTHING, receipts[0].hash, receipts[1].hash]
    assert len({one.chain for one in said}) == 1
    assert whole(stockade_home) == 3
    assert log(stockade_home).get(2) == receipts[1]


def test_the_log_is_private_and_in_wal_mode(stockade_home: Path) -> None:
    append(stockade_home)
    assert (stockade_home / chain.FILE).stat().st_mode & 0o777 == 0o600
    with sqlite3.connect(stockade_home / chain.FILE) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_room_that_was_given_up_is_held_again(stockade_home: Path) -> None:
    """Else only the first program that fills the disk would have a receipt."""
    append(stockade_home)
    held, room = log(stockade_home), stockade_home / chain.RESERVE
    for _ in range(2):
        assert room.stat().st_size == chain.ROOM
        assert held._make_room() and not room.exists()
        held.ready()
    assert room.stat().st_size == chain.ROOM


def test_a_failure_on_the_way_leaves_no_trace(stockade_home: Path) -> None:
    append(stockade_home)

    def failing(link: chain.ChainLink) -> Statement:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log(stockade_home).append(failing)
    assert append(stockade_home).predicate.sequence == 2
    assert whole(stockade_home) == 2


def test_a_log_that_was_removed_is_begun_anew(stockade_home: Path) -> None:
    first = append(stockade_home)
    for file in stockade_home.glob("receipts.db*"):
        file.unlink()
    second = append(stockade_home)
    assert second.predicate.sequence == 1 and second.predicate.chain != first.predicate.chain
    assert whole(stockade_home) == 1


@pytest.mark.parametrize("table", ["receipts", "statements", "chain"])
def test_nothing_is_changed_or_deleted_by_accident(table: str, stockade_home: Path) -> None:
    append(stockade_home)
    connection = log(stockade_home).connection()
    with pytest.raises(sqlite3.IntegrityError, match="append only"):
        connection.execute(f"DELETE FROM {table}")
    with pytest.raises(sqlite3.IntegrityError, match="append only"):
        connection.execute(f"UPDATE {table} SET rowid = rowid + 1")


def vandal(home: Path, *statements: str) -> None:
    """Change the log as an owner can who means it."""
    connection = log(home).connection()
    for table in ("receipts", "statements"):
        for verb in ("UPDATE", "DELETE"):
            connection.execute(f"DROP TRIGGER IF EXISTS {table}_{verb}")
    for words in statements:
        connection.execute(words)


DAMAGE = {
    "a payload was changed": (
        [
            "UPDATE statements SET payload = cast(replace(payload, 'exited', 'denied') AS BLOB)"
            " WHERE sequence = 2"
        ],
        "signature",
    ),
    "a payload is no bytes": (["UPDATE statements SET payload = 'text' WHERE sequence = 2"], "damaged"),
    "a signature was changed": (
        ["UPDATE statements SET signature = zeroblob(64) WHERE sequence = 2"],
        "signature",
    ),
    "a receipt was taken out": (
        ["DELETE FROM statements WHERE sequence = 2", "DELETE FROM receipts WHERE sequence = 2"],
        "missing-link",
    ),
    "the first was taken out": (
        ["DELETE FROM statements WHERE sequence = 1", "DELETE FROM receipts WHERE sequence = 1"],
        "missing-link",
    ),
    "one stands in the place of another": (
        [
            "UPDATE statements SET (payload, signature) = (SELECT payload, signature FROM statements"
            " WHERE sequence = 1) WHERE sequence = 2"
        ],
        "swapped",
    ),
    "two changed places": (
        [
            "UPDATE statements SET sequence = 99 WHERE sequence = 1",
            "UPDATE statements SET sequence = 1 WHERE sequence = 2",
            "UPDATE statements SET sequence = 2 WHERE sequence = 99",
        ],
        "swapped",
    ),
    "what is noted of one was changed": (
        ["UPDATE receipts SET outcome = 'denied' WHERE sequence = 2"],
        "damaged",
    ),
    "the last statement was taken away": (["DELETE FROM statements WHERE sequence = 3"], "missing-link"),
    "another key": (["UPDATE statements SET key = '" + "ab" * 32 + "' WHERE sequence = 2"], "unknown-key"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_was_done_to_a_log_is_named(what: str, stockade_home: Path) -> None:
    for _ in range(3):
        append(stockade_home)
    assert whole(stockade_home) == 3
    damage, failure = DAMAGE[what]
    vandal(stockade_home, *damage)
    with pytest.raises(ReceiptError) as caught:
        whole(stockade_home)
    assert caught.value.failure == failure, caught.value


def test_a_receipt_signed_again_by_its_owner_breaks_the_chain(stockade_home: Path) -> None:
    """The key alone is not enough to rewrite the past: the next receipt names what was there."""
    for _ in range(3):
        append(stockade_home)
    place = log(stockade_home)
    old = place.get(2).predicate
    forged = statement(chain.ChainLink(old.chain, 2, old.previous, old.key), outcome="denied")
    signer = keys.signer(str(stockade_home), place.settings)
    payload = chain.canonical(forged)
    row = row_of(forged.predicate, digest(payload))
    vandal(
        stockade_home, "DELETE FROM statements WHERE sequence = 2", "DELETE FROM receipts WHERE sequence = 2"
    )
    connection = place.connection()
    signed = signer.sign(chain.to_sign(payload))
    connection.execute("INSERT INTO statements VALUES (2, ?, ?, ?)", (signer.id, signed, payload))
    connection.execute(
        "INSERT INTO receipts VALUES (?, ?, ?, ?, ?, ?, ?, ?)", chain.msgspec.structs.astuple(row)
    )
    with pytest.raises(ReceiptError) as caught:
        whole(stockade_home)
    assert caught.value.failure == "broken-link"


def test_a_log_of_another_version_or_in_ruins_is_refused(stockade_home: Path) -> None:
    append(stockade_home)
    log(stockade_home).connection().execute("PRAGMA user_version = 7")
    chain.shutdown()
    with pytest.raises(ReceiptError, match="another version") as caught:
        append(stockade_home)
    assert caught.value.failure == "damaged"
    chain.shutdown()
    for file in stockade_home.glob("receipts.db*"):
        file.unlink()
    (stockade_home / chain.FILE).write_bytes(b"not a database at all" * 500)
    with pytest.raises(ReceiptError, match="damaged") as caught:
        append(stockade_home)
    assert caught.value.failure == "damaged"


def test_what_is_looked_for_is_found(stockade_home: Path) -> None:
    append(stockade_home, "a", started="2026-05-01T12:00:00.000000Z")
    append(stockade_home, "b", "timed-out", started="2026-05-02T12:00:00.000000Z")
    append(stockade_home, "a", "timed-out", started="2026-05-03T12:00:00.000000Z")
    place = log(stockade_home)

    def found(**asked: str) -> list[int]:
        return [row.sequence for row in place.rows(chain.Filter(**asked))]

    assert found() == [1, 2, 3]
    assert found(agent="a") == [1, 3]
    assert found(agent="a", outcome="timed-out") == [3]
    assert found(since="2026-05-02") == [2, 3]
    assert found(until="2026-05-02") == [1]
    assert [row.sequence for row in place.rows(newest=1)] == [3]
    last = place.find("last")
    assert place.find("3") == place.find(last.id) == last
    for id in ("4", "3-beef", "x", "", "9" * 30):
        with pytest.raises(NotFoundError):
            place.find(id)


def test_fsync_is_asked_for_in_the_settings(
    stockade_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[int] = []
    monkeypatch.setattr(os, "fdatasync", waits.append)
    append(stockade_home)
    assert not waits
    chain.shutdown()
    waits.clear()
    (tmp_path / "stockade").mkdir()
    (tmp_path / "stockade/config.toml").write_text("[receipts]\nfsync = true\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    append(stockade_home)
    assert len(waits) == 2  # the start of the file, and the receipt
