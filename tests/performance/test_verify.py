"""Verifying a receipt costs little more than checking its signature, which no one can do for less."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import stockade
from stockade.receipt import ed25519
from stockade.receipt.statement import to_sign
from support.made_receipts import public

#: Of the bare check; with it 5,000 receipts are verified in a second of one of today's cores.
BAR, SLACK = 1.4, 1.3
ROUNDS, BATCH = 200, 20


def least(*turns: Callable[[], object]) -> list[float]:
    """The processor time that each takes when nobody is in the way, taken in turns."""
    found = [float("inf")] * len(turns)
    for _ in range(ROUNDS):
        for number, turn in enumerate(turns):
            began = time.process_time_ns()
            for _ in range(BATCH):
                turn()
            found[number] = min(found[number], (time.process_time_ns() - began) / BATCH / 1e9)
    return found


def test_a_receipt_is_verified_for_little_more_than_its_signature(stockade_home: Path) -> None:
    receipt = stockade.run(["true"]).receipt
    assert receipt is not None
    envelope, key = receipt.encode(), public(stockade_home)
    signed, signature = to_sign(receipt.payload), receipt.signatures[0].sig
    assert ed25519.verifies(key, signature, signed)
    whole, bare = least(
        lambda: stockade.verify(envelope, key), lambda: ed25519.verifies(key, signature, signed)
    )
    assert whole <= BAR * SLACK * bare, f"{1 / whole:.0f} a second, {whole / bare:.2f} times the signature"
