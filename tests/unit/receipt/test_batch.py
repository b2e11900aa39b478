"""Receipts that a head signs together: when, by whom, and what verifies before and after."""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import pytest

from stockade import ReceiptError, verify
from stockade.receipt import batch, chain, keys, prune, tail
from stockade.receipt.statement import SIGNED, Receipt
from stockade.receipt.verify import ChainCheck, check_log
from support.made_receipts import append, log, public, statement


def whole(home: Path) -> int:
    """How many receipts the log has; fails if it is not one chain."""
    return check_log(log(home), {key.id: key.public for key in keys.known(str(home))})


def kinds(home: Path) -> str:
    """The receipts of the log in order: b in a batch, H its head, s signed on its own."""
    letters = [
        "H" if one.row.action == SIGNED else "s" if one.receipt.signatures else "b" for one in log(home).all()
    ]
    return "".join(letters)


def killed(home: Path, count: int) -> None:
    """As a process leaves the log that makes receipts and is killed before it signs them."""
    for _ in range(count):
        append(home, batched=True)
    chain._chains.pop(str(home)).close()


@pytest.fixture(autouse=True)
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "LONGEST", 1000.0)


def test_a_receipt_is_not_signed_until_its_head_is(stockade_home: Path) -> None:
    receipts = [append(stockade_home, batched=True) for _ in range(3)]
    assert [one.predicate.sequence for one in receipts] == [1, 2, 3] and not any(
        one.signatures for one in receipts
    )
    with pytest.raises(ReceiptError, match="not signed yet") as caught:
        verify(receipts[1], public(stockade_home))
    assert caught.value.failure == "unsigned"
    found = log(stockade_home).get(2)  # whoever reads the log signs first
    assert found.payload == receipts[1].payload and found.head is not None
    assert verify(found, public(stockade_home)).id == receipts[1].id
    assert found.head.predicate.event is not None
    assert found.head.predicate.event.signed == tuple(one.hash for one in receipts)
    assert kinds(stockade_home) == "bbbH" and whole(stockade_home) == 4


def test_an_exported_receipt_has_its_proof_with_it(stockade_home: Path) -> None:
    append(stockade_home, batched=True)
    key = public(stockade_home)
    exported = log(stockade_home).get(1).encode()
    assert verify(exported, key).predicate.sequence == 1
    assert Receipt.decode(exported).encode() == exported
    chain.shutdown()
    alone = Receipt(Receipt.decode(exported).payload, ())
    with pytest.raises(ReceiptError) as caught:
        verify(alone.encode(), key)
    assert caught.value.failure == "unsigned"


def test_a_head_is_signed_after_so_many_before_anything_signed_and_at_the_end(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "MOST", 4)
    for _ in range(9):
        append(stockade_home, batched=True)
    append(stockade_home)
    append(stockade_home, batched=True)
    log(stockade_home).rotate()
    append(stockade_home, batched=True)
    log(stockade_home).sign()  # as at the end of the process
    assert kinds(stockade_home) == "bbbbHbbbbHbHsbHsbH"
    assert whole(stockade_home) == 18
    own = {key.id: key.public for key in keys.known(str(stockade_home))}
    for sequence in (1, 9, 11, 14, 17):
        found = log(stockade_home).get(sequence)
        maker = own[found.predicate.key]
        assert verify(found, maker).predicate.sequence == sequence


def test_a_process_that_idles_signs_after_a_while(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "LONGEST", 0.05)
    append(stockade_home, batched=True)
    path = f"{stockade_home}/{chain.FILE}-tail"
    deadline = time.monotonic() + 30
    while SIGNED.encode() not in Path(path).read_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert SIGNED.encode() in Path(path).read_bytes()
    append(stockade_home, batched=True)
    assert kinds(stockade_home) == "bHbH"


def test_what_a_killed_process_left_is_signed_as_found(stockade_home: Path) -> None:
    append(stockade_home)
    killed(stockade_home, 3)
    chain.shutdown()
    log(stockade_home).ready()
    assert b'"found":[' in (stockade_home / f"{chain.FILE}-tail").read_bytes()
    found = log(stockade_home).get(3)
    assert found.head is not None and found.head.predicate.event is not None
    assert found.hash in found.head.predicate.event.found and not found.head.predicate.event.signed
    verify(found, public(stockade_home))
    assert kinds(stockade_home) == "sbbbH" and whole(stockade_home) == 5


def test_two_processes_share_a_batch_and_each_vouches_for_its_own(stockade_home: Path) -> None:
    mine = append(stockade_home, batched=True)
    other = chain.Chain(str(stockade_home))
    other.append(statement, batched=True)
    also = append(stockade_home, batched=True)
    head = log(stockade_home).get(1).head
    assert head is not None and head.predicate.event is not None
    assert head.predicate.event.signed == (mine.hash, also.hash) and len(head.predicate.event.found) == 1
    assert kinds(stockade_home) == "bbbH" and whole(stockade_home) == 4
    other.close()


@pytest.mark.parametrize("end", [1, 40, -5, -1])
def test_a_receipt_that_was_cut_off_is_removed_and_those_before_it_are_signed(
    stockade_home: Path, end: int
) -> None:
    killed(stockade_home, 2)
    path = stockade_home / f"{chain.FILE}-tail"
    whole_two = path.stat().st_size
    killed(stockade_home, 1)
    three = path.stat().st_size
    os.truncate(path, whole_two + end if end > 0 else three + end)
    assert whole(stockade_home) == 3 and kinds(stockade_home) == "bbH"
    assert append(stockade_home, batched=True).predicate.sequence == 4


def test_after_a_loss_of_power_what_the_disk_has_is_signed(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(stockade_home, 1)
    path = stockade_home / f"{chain.FILE}-tail"
    length = path.stat().st_size
    killed(stockade_home, 1)  # opening the log signs the first one
    data = bytearray(path.read_bytes())
    data[length + 500] ^= 1
    path.write_bytes(data)
    monkeypatch.setattr(tail, "boot_id", lambda: "another")
    monkeypatch.setattr(chain, "boot_id", lambda: "another")
    assert whole(stockade_home) == 2 and kinds(stockade_home) == "bH"


def test_receipts_are_signed_before_they_enter_the_database(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "LONG", 8192)
    for _ in range(20):
        append(stockade_home, batched=True)
    words = "SELECT sequence, length(signature) FROM statements ORDER BY sequence"
    moved = log(stockade_home)._connect().execute(words).fetchall()
    assert moved and moved[-1][1] == 64
    assert whole(stockade_home) > 20


def test_a_lost_key_does_not_lose_the_receipts_that_wait_for_it(stockade_home: Path) -> None:
    killed(stockade_home, 1)
    (stockade_home / "keys/signing.pem").write_text("damaged")
    chain.shutdown()
    new = log(stockade_home).rotate()
    found = log(stockade_home).get(1)
    assert found.head is not None and found.head.predicate.key == new != found.predicate.key
    verify(found, public(stockade_home))


def test_pruning_takes_heads_with_their_receipts_and_a_batch_may_be_cut(stockade_home: Path) -> None:
    for month in ("01", "02", "03"):
        append(stockade_home, started=f"2026-{month}-01T00:00:00.000000Z", batched=True)
    append(stockade_home, started="2026-04-01T00:00:00.000000Z")
    before = time.mktime((2026, 2, 15, 0, 0, 0, 0, 0, 0))
    old = prune.find(log(stockade_home), before)
    assert old is not None and old.through == 2
    prune.remove(log(stockade_home), old)
    assert kinds(stockade_home) == "bHss"
    verify(log(stockade_home).get(3), public(stockade_home))
    assert whole(stockade_home) == 4
    old = prune.find(log(stockade_home), time.time() + 60)
    assert old is not None
    prune.remove(log(stockade_home), old)
    assert kinds(stockade_home) == "s" and whole(stockade_home) == 1


def test_a_chain_that_ends_before_the_head_is_not_verified(stockade_home: Path) -> None:
    for _ in range(2):
        append(stockade_home, batched=True)
    lines = [one.receipt for one in log(stockade_home).all()]
    known = {key.id: key.public for key in keys.known(str(stockade_home))}
    walk = ChainCheck(known, whole=False)
    for one in lines[:2]:
        walk.step(one)
    with pytest.raises(ReceiptError) as caught:
        walk.end()
    assert caught.value.failure == "unsigned"
    walk.step(lines[2])
    assert walk.end() == 3


def test_a_second_key_cannot_sign_a_receipt_of_a_batch_but_its_head(stockade_home: Path) -> None:
    append(stockade_home, batched=True)
    append(stockade_home.parent / "other")
    second = (stockade_home.parent / "other/keys/signing.pem").read_bytes()
    found = log(stockade_home).get(1)
    with pytest.raises(ReceiptError, match="no signature of its own"):
        found.cosigned(second)
    assert found.head is not None
    cosigned = Receipt(found.payload, (), found.head.cosigned(second))
    verify(cosigned, [public(stockade_home), public(stockade_home.parent / "other")])


def test_reading_what_was_found_is_refused_if_it_is_not_of_the_chain(stockade_home: Path) -> None:
    killed(stockade_home, 1)
    path = stockade_home / f"{chain.FILE}-tail"
    other = tail.ReceiptTail(str(path))
    with other.locked(1):
        assert other.start() is not None
        (one,) = other.newest(1)
        start = other.start()
        assert start is not None
        payload = one.payload.replace(b'"program":"true"', b'"program":"fals"')
        other.begin(start, sync=False)
        other.append(msgspec.structs.replace(one, payload=payload), sync=False)
    other.close()
    with pytest.raises(ReceiptError, match="is not what was appended") as caught:
        log(stockade_home).ready()
    assert caught.value.failure == "damaged"
