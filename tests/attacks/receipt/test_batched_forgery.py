"""Receipts of batches that an attacker made up: none verifies that no signed head lists."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from stockade import ReceiptError, verify
from stockade.receipt import chain, keys
from stockade.receipt.statement import Receipt
from stockade.receipt.verify import ChainCheck, check_log
from support.made_receipts import append, log, public


def failure(receipt: Receipt, key: bytes) -> str:
    with pytest.raises(ReceiptError) as caught:
        verify(receipt, key)
    return caught.value.failure


def test_a_receipt_without_its_own_head_never_verifies(stockade_home: Path) -> None:
    alone = append(stockade_home)
    one, two = (append(stockade_home, batched=True) for _ in range(2))
    key, head = public(stockade_home), log(stockade_home).get(2).head
    assert head is not None
    append(stockade_home, batched=True)
    later = log(stockade_home).get(5)
    assert later.head is not None
    verify(Receipt(two.payload, (), head), key)
    # Stripped of its head, of its signature, with a head that is not signed, or with another record.
    assert failure(one, key) == failure(Receipt(alone.payload, ()), key) == "unsigned"
    assert failure(Receipt(one.payload, (), Receipt(head.payload, ())), key) == "unsigned"
    assert failure(Receipt(one.payload, (), later.head), key) == "signature"
    assert failure(Receipt(later.payload, (), head), key) == "swapped"
    assert failure(Receipt(one.payload, (), alone), key) == "swapped"
    assert failure(Receipt(alone.payload, (), head), key) == "signature"
    # A changed receipt, and a head that was changed so that it lists it.
    changed = Receipt(one.payload.replace(b"exited", b"failed"), (), head)
    assert failure(changed, key) == "signature"
    forged = Receipt(head.payload.replace(one.hash.encode(), changed.hash.encode()), head.signatures)
    assert forged.payload != head.payload
    assert failure(Receipt(changed.payload, (), forged), key) == "signature"


def test_a_head_of_another_chain_proves_nothing(stockade_home: Path, tmp_path: Path) -> None:
    one = append(stockade_home, batched=True)
    append(tmp_path / "other")
    append(tmp_path / "other", batched=True)
    head = log(tmp_path / "other").get(2).head
    assert head is not None
    assert failure(Receipt(one.payload, (), head), public(tmp_path / "other")) == "swapped"


@pytest.mark.parametrize("how", ["changed", "stripped", "added"])
def test_a_log_in_which_a_batch_was_changed_is_not_whole(stockade_home: Path, how: str) -> None:
    append(stockade_home)
    for _ in range(3):
        append(stockade_home, batched=True)
    known = {key.id: key.public for key in keys.known(str(stockade_home))}
    assert check_log(log(stockade_home), known) == 5
    chain.shutdown()
    connection = sqlite3.connect(stockade_home / chain.FILE)
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    spoil = {
        "changed": "UPDATE statements SET payload = replace(payload, 'exited', 'failed') WHERE sequence = 4",
        "stripped": "UPDATE statements SET key = '', signature = x'' WHERE sequence = 5",
        "added": "UPDATE statements SET key = '', signature = x'' WHERE sequence = 1",
    }
    connection.execute(spoil[how])
    connection.execute("UPDATE statements SET payload = CAST(payload AS BLOB)")
    connection.commit()
    connection.close()
    with pytest.raises(ReceiptError) as caught:
        check_log(log(stockade_home), known)
    assert caught.value.failure in ("signature", "unsigned", "damaged")


def test_endless_receipts_without_a_head_are_refused_early(stockade_home: Path) -> None:
    one = append(stockade_home, batched=True)
    known = {key.id: key.public for key in keys.known(str(stockade_home))}
    walk = ChainCheck(known, whole=False)
    with pytest.raises(ReceiptError) as caught:
        for number in range(2, 1000):
            later = one.payload.replace(b'"sequence":1,', b'"sequence":%d,' % number)
            walk.step(
                Receipt(later.replace(one.predicate.previous.encode(), walk._previous.encode() or b"0"), ())
            )
    assert caught.value.failure == "unsigned" and walk.count < 100
