"""The log of receipts: one chain, whoever appends and whenever he is killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from stockade import NotFoundError, ReceiptError
from stockade.receipt import chain, keys
from stockade.receipt.statement import NOTHING, Statement
from stockade.receipt.verify import check_log
from support.made_receipts import append, log, statement
from support.paths import ROOT

SCRIPT = str(ROOT / "tests/support/made_receipts.py")


def known(home: Path) -> dict[str, bytes]:
    return {key.id: key.public for key in keys.known(str(home))}


def whole(home: Path) -> int:
    """How many receipts the log has; fails where it is not one chain."""
    return check_log(log(home), known(home))


def appender(home: Path, count: int, name: str) -> subprocess.Popen[str]:
    command = [sys.executable, SCRIPT, str(home), str(count), name]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


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


def test_processes_and_threads_make_one_chain(stockade_home: Path) -> None:
    """They all begin with nothing there: the log and the key are made once."""
    others = [appender(stockade_home, 25, f"process {n}") for n in range(3)]
    threads = [
        threading.Thread(target=lambda: [append(stockade_home, "threads") for _ in range(25)])
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [line for process in others for line in process.communicate()[0].splitlines()]
    assert all(process.returncode == 0 for process in others)
    assert whole(stockade_home) == 125
    assert len(known(stockade_home)) == 1
    there = {f"{row.sequence} {row.hash}" for row in log(stockade_home).rows()}
    assert len(told) == 75 and set(told) <= there


def test_killed_at_any_moment_it_stays_one_chain_with_all_that_was_told(stockade_home: Path) -> None:
    dice = random.Random(4)
    told = set()
    for turn in range(6):
        victim, witness = appender(stockade_home, 10_000, "victim"), appender(stockade_home, 5, "witness")
        assert victim.stdout is not None
        told.add(victim.stdout.readline().strip())
        time.sleep(dice.random() * 0.02)
        victim.send_signal(signal.SIGKILL)
        # The last line may be cut off in the middle.
        told |= set(victim.communicate()[0].splitlines(keepends=False)[:-1])
        told |= set(witness.communicate()[0].splitlines())
        assert witness.returncode == 0, turn
    count = whole(stockade_home)
    there = {f"{row.sequence} {row.hash}" for row in log(stockade_home).rows()}
    assert told <= there and len(there) == count >= len(told)


def test_processes_that_end_leave_no_ever_longer_wal(stockade_home: Path) -> None:
    wal = stockade_home / f"{chain.FILE}-wal"
    lengths = []
    for _ in range(5):
        appender(stockade_home, 40, "one").communicate()
        lengths.append(wal.stat().st_size if wal.exists() else 0)
    assert min(lengths) == 0, lengths
    assert max(lengths) <= chain.LEFT, lengths
    assert whole(stockade_home) == 200


def test_a_failure_on_the_way_leaves_no_trace(stockade_home: Path) -> None:
    append(stockade_home)

    def failing(link: chain.Link) -> Statement:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        log(stockade_home).append(failing)
    assert append(stockade_home).predicate.sequence == 2
    assert whole(stockade_home) == 2


def test_a_forked_child_appends_by_itself(stockade_home: Path) -> None:
    append(stockade_home)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            append(stockade_home, "child")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    append(stockade_home, "parent")
    assert [row.agent for row in log(stockade_home).rows()] == ["", "child", "parent"]
    assert whole(stockade_home) == 3


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
    connection = log(stockade_home)._connection()
    with pytest.raises(sqlite3.IntegrityError, match="append only"):
        connection.execute(f"DELETE FROM {table}")
    with pytest.raises(sqlite3.IntegrityError, match="append only"):
        connection.execute(f"UPDATE {table} SET rowid = rowid + 1")


def vandal(home: Path, *statements: str) -> None:
    """Change the log as an owner can who means it."""
    connection = log(home)._connection()
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
    forged = statement(chain.Link(old.chain, 2, old.previous, old.key), outcome="denied")
    signer = keys.signer(str(stockade_home), place.settings)
    payload = chain.canonical(forged)
    row = chain.row_of(forged.predicate, chain.digest(payload))
    vandal(
        stockade_home, "DELETE FROM statements WHERE sequence = 2", "DELETE FROM receipts WHERE sequence = 2"
    )
    connection = place._connection()
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
    log(stockade_home)._connection().execute("PRAGMA user_version = 7")
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


def test_no_log_is_begun_beside_what_is_left_of_another(stockade_home: Path) -> None:
    """As a process that ends leaves it, the last receipts are beside the log, and SQLite replays them."""
    appender(stockade_home, 3, "a").communicate()
    database, *beside = (stockade_home / f"{chain.FILE}{end}" for end in ("", "-wal", "-shm"))
    aside = stockade_home.parent
    database.rename(aside / database.name)
    for file in beside:
        for look in (append, whole):
            with pytest.raises(ReceiptError, match="is gone") as caught:
                look(stockade_home)
            assert caught.value.failure == "damaged"
            assert all(str(name) in caught.value.hint for name in (database, *beside))
        assert log(stockade_home).exists() and not database.exists()
        file.rename(aside / file.name)
    append(stockade_home)
    assert whole(stockade_home) == 1
    with contextlib.closing(sqlite3.connect(aside / database.name)) as old:
        assert old.execute("SELECT count(*) FROM receipts").fetchone() == (3,)


def test_a_child_that_is_forked_while_a_receipt_is_written_can_make_its_own(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "PATIENCE", 5.0)
    append(stockade_home)
    within, forking = threading.Event(), threading.Event()
    os.register_at_fork(before=forking.set)  # is called before the log's own

    def slowly(link: chain.Link) -> Statement:
        within.set()
        forking.wait(10)
        return statement(link)

    writer = threading.Thread(target=lambda: log(stockade_home).append(slowly))
    writer.start()
    within.wait()
    child = os.fork()
    if not child:
        try:
            append(stockade_home, "child")
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    writer.join()
    append(stockade_home)
    assert (status, whole(stockade_home)) == (0, 4)


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
    def synchronous() -> int:
        (level,) = log(stockade_home)._connection().execute("PRAGMA synchronous").fetchone()
        return int(level)

    assert synchronous() == 1
    chain.shutdown()
    (tmp_path / "stockade").mkdir()
    (tmp_path / "stockade/config.toml").write_text("[receipts]\nfsync = true\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert synchronous() == 2
