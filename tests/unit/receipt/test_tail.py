"""The newest receipts, in a file beside the database: whenever a process is killed or the power fails."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stockade import ReceiptError
from stockade.receipt import chain, database, keys, tail
from stockade.receipt.verify import check_log
from support.made_receipts import append, log


def whole(home: Path) -> int:
    """How many receipts the log has; fails if it is not one chain."""
    return check_log(log(home), {key.id: key.public for key in keys.known(str(home))})


def newest(home: Path) -> Path:
    return home / f"{chain.FILE}-tail"


def in_database(home: Path) -> int:
    with contextlib.closing(sqlite3.connect(home / chain.FILE)) as connection:
        (count,) = connection.execute("SELECT count(*) FROM receipts").fetchone()
        return int(count)


def test_a_receipt_waits_beside_the_database_until_the_log_is_read(stockade_home: Path) -> None:
    for _ in range(3):
        append(stockade_home)
    assert in_database(stockade_home) == 0
    assert newest(stockade_home).stat().st_mode & 0o777 == 0o600
    assert whole(stockade_home) == 3
    assert in_database(stockade_home) == 3
    assert newest(stockade_home).stat().st_size < 1024
    assert append(stockade_home).predicate.sequence == 4
    assert whole(stockade_home) == 4


def test_a_long_file_is_moved_into_the_database(stockade_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "LONG", 8192)
    lengths = []
    for _ in range(20):
        append(stockade_home)
        lengths.append(newest(stockade_home).stat().st_size)
    assert max(lengths) < 3 * 8192 and in_database(stockade_home) >= 10
    assert whole(stockade_home) == 20


def test_a_receipt_of_which_a_killed_process_wrote_a_part_never_was(stockade_home: Path) -> None:
    append(stockade_home)
    short = newest(stockade_home).stat().st_size
    second = append(stockade_home)
    data = newest(stockade_home).read_bytes()
    for end in (short + 1, short + 7, short + 8, short + 9, (short + len(data)) // 2, len(data) - 1):
        newest(stockade_home).write_bytes(data[:end])
        again = append(stockade_home)
        assert (again.predicate.sequence, again.predicate.previous) == (2, second.predicate.previous), end
        assert whole(stockade_home) == 2
        with log(stockade_home).connection() as connection:  # back to the first, for the next turn
            for table in database.PLACED:
                connection.execute(f"DROP TRIGGER IF EXISTS {table}_DELETE")
                connection.execute(f"DELETE FROM {table}")


@pytest.mark.parametrize("part", [b"", tail.MAGIC, tail.MAGIC[:5], tail.MAGIC + b"\x40", b"\0" * 4096])
def test_a_file_without_a_start_says_nothing(part: bytes, stockade_home: Path) -> None:
    """As a process leaves it that is killed while it begins the file, and the power that fails then."""
    append(stockade_home)
    assert whole(stockade_home) == 1
    newest(stockade_home).write_bytes(part)
    assert append(stockade_home).predicate.sequence == 2
    assert whole(stockade_home) == 2


def test_receipts_that_were_moved_by_a_killed_process_are_not_moved_twice(stockade_home: Path) -> None:
    for _ in range(3):
        append(stockade_home)
    data = newest(stockade_home).read_bytes()
    assert whole(stockade_home) == 3
    newest(stockade_home).write_bytes(data)
    assert append(stockade_home).predicate.sequence == 4
    assert whole(stockade_home) == 4


def test_a_damaged_receipt_is_refused_and_after_another_boot_the_end(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have got a later page before an earlier one when the power failed."""
    append(stockade_home)
    length = newest(stockade_home).stat().st_size
    for _ in range(2):
        append(stockade_home)
    data = bytearray(newest(stockade_home).read_bytes())
    data[length + 500] ^= 1
    newest(stockade_home).write_bytes(data)
    with pytest.raises(ReceiptError, match="is damaged") as caught:
        whole(stockade_home)
    assert caught.value.failure == "damaged"
    monkeypatch.setattr(tail, "boot_id", lambda: "another")
    monkeypatch.setattr(chain, "boot_id", lambda: "another")
    assert append(stockade_home).predicate.sequence == 2
    assert whole(stockade_home) == 2


def test_receipts_are_on_the_disk_before_they_enter_the_database(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the database could have more than the file after a loss of power, and the chain fork."""
    for _ in range(2):
        append(stockade_home)
    seen = []
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda file: (seen.append(in_database(stockade_home)), real(file)))
    assert whole(stockade_home) == 2 and seen == [0]
    (level,) = log(stockade_home).connection().execute("PRAGMA synchronous").fetchone()
    assert level == 2


def test_a_database_of_another_moment_is_refused(stockade_home: Path) -> None:
    append(stockade_home)
    chain.shutdown()
    with contextlib.closing(sqlite3.connect(stockade_home / chain.FILE)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    old = (stockade_home / chain.FILE).read_bytes()
    for _ in range(2):
        append(stockade_home)
    assert whole(stockade_home) == 3
    append(stockade_home)
    log(stockade_home).close()
    for name in (chain.FILE, f"{chain.FILE}-wal", f"{chain.FILE}-shm"):
        (stockade_home / name).unlink(missing_ok=True)
    (stockade_home / chain.FILE).write_bytes(old)
    with pytest.raises(ReceiptError, match="lacks receipts"):
        whole(stockade_home)


def test_an_older_version_cannot_append_to_the_database(stockade_home: Path) -> None:
    """One that still runs would not know of the newest receipts, and the chain would fork."""
    append(stockade_home)
    connection = log(stockade_home).connection()
    with pytest.raises(sqlite3.IntegrityError, match="newer version"):
        connection.execute("INSERT INTO receipts VALUES (2, '', '', '', '', '', '', '')")


def test_a_log_of_the_version_before_is_upgraded(stockade_home: Path) -> None:
    append(stockade_home)
    chain.shutdown()
    with contextlib.closing(sqlite3.connect(stockade_home / chain.FILE)) as connection, connection:
        connection.execute("DROP TRIGGER receipts_INSERT")
        connection.execute("PRAGMA user_version = 3")
    newest(stockade_home).unlink()
    assert append(stockade_home).predicate.sequence == 2
    connection = log(stockade_home).connection()
    assert connection.execute("PRAGMA user_version").fetchone() == (database.VERSION,)
    assert whole(stockade_home) == 2


@settings(max_examples=20, deadline=None)
@given(place=st.integers(0, 10_000), value=st.integers(0, 255), cut=st.booleans())
def test_whatever_happens_to_a_byte_the_log_is_a_chain_or_refused(
    place: int, value: int, cut: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = tmp_path_factory.mktemp("state")
    for _ in range(3):
        append(home)
    data = bytearray(newest(home).read_bytes())
    place %= len(data)
    data[place] = value
    newest(home).write_bytes(data[: place + 1] if cut else data)
    try:
        append(home)
        assert 1 <= whole(home) <= 4
    except ReceiptError as error:
        assert error.failure == "damaged", error
    finally:
        log(home).close()
