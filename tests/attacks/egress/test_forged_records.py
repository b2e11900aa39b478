"""Records that a hostile egress process has written: the supervisor reads what makes sense, and goes on."""

from __future__ import annotations

import json
import os
import random
import struct
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest

from stockade.egress import records
from stockade.runs.network.decisions import decisions, denials

RULES = ["api.good.example:443", "!evil.example"]


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = records.create_records()
    yield descriptor
    os.close(descriptor)


def shown(descriptor: int) -> str:
    """What a result, its JSON and a terminal would show."""
    reader = records.RecordReader(descriptor)
    found, cursor = reader.since(0)
    seen = decisions(found, RULES)
    text = json.dumps(msgspec.to_builtins([seen, denials(seen), reader.totals(), cursor]))
    assert len(found) <= records.SLOTS and len(denials(seen)) <= 100
    return text


def honest(descriptor: int) -> None:
    writer = records.RecordWriter(descriptor)
    for number in range(30):
        writer.name(f"n{number}.good.example", allowed=bool(number % 2), reason="no rule")
        writer.refuse("evil.example", "11.0.0.66", number + 1, "deny rule", rule=1)
        writer.connection("api.good.example", "11.0.0.10", 443, 0).add(1000, 2000)


def test_bytes_at_random_in_the_records(memory: int) -> None:
    chance = random.Random(65)
    honest(memory)
    block = bytearray(os.pread(memory, records.SIZE, 0))
    used = [at for at in range(len(block)) if block[at]]
    for _ in range(150):
        changed = bytearray(block)
        for _ in range(chance.randrange(1, 60)):
            at = chance.choice(used) if chance.random() < 0.8 else chance.randrange(len(changed))
            changed[at] = chance.choice([0, 0x1B, 0x7F, 0x80, 0xFF, chance.randrange(256)])
        os.pwrite(memory, changed, 0)
        assert shown(memory).isprintable()


def test_escape_sequences_in_a_name(memory: int) -> None:
    name = b"\x1b]52;c;ZXZpbA==\x07evil"
    honest(memory)
    block = bytearray(os.pread(memory, records.SIZE, 0))
    at = block.index(b"n0.good.example")
    block[at : at + len(name)] = name
    os.pwrite(memory, block, 0)
    assert b"\x1b]52" in os.pread(memory, records.SIZE, 0)
    assert "\\u001b" not in shown(memory) and "ZXZpbA" not in shown(memory)


def test_counters_and_times_that_cannot_be(memory: int) -> None:
    honest(memory)
    struct.pack_into("<8s9Q", block := bytearray(80), 0, b"egress-1", *(2**64 - 1,) * 9)
    os.pwrite(memory, block, 0)
    for number, when in enumerate((float("nan"), float("inf"), -float("inf"), -1.0, 1e300)):
        at = records._HEADER_SIZE + number * records._SLOT_SIZE
        os.pwrite(memory, struct.pack("<Qdd", 2**64 - 1, when, when), at)
    text = shown(memory)
    assert "NaN" not in text and "Infinity" not in text
    totals = records.RecordReader(memory).totals()
    assert max(totals) < 2**63 and totals.records <= records.SLOTS


def test_slots_that_change_while_they_are_read(memory: int) -> None:
    honest(memory)
    first = bytes(os.pread(memory, records.SIZE, 0))
    second = first.replace(b"api.good.example", b"API.EVIL.EXAMPLE").replace(
        struct.pack("<QQ", 1000, 2000), struct.pack("<QQ", 7000, 9000)
    )
    done = threading.Event()

    def write() -> None:
        while not done.is_set():
            os.pwrite(memory, second, 0)
            os.pwrite(memory, first, 0)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        until = time.monotonic() + 1
        while time.monotonic() < until:
            for one in records.RecordReader(memory).since(0)[0]:
                assert one.name.isprintable() and one.received in (0, 2000, 9000)
    finally:
        done.set()
        writer.join()
