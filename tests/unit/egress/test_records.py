"""Records of an egress process: what it writes is what the supervisor reads, and rubbish is left out."""

from __future__ import annotations

import fcntl
import os
import random
from collections.abc import Iterator

import pytest

from stockade.egress import records
from stockade.egress.records import InsideEnds, RecordReader, RecordWriter, create_records


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = create_records()
    yield descriptor
    os.close(descriptor)


def test_a_connection_is_read_while_it_goes_on_and_again_when_it_ends(memory: int) -> None:
    nudges: list[int] = []
    writer, reader = RecordWriter(memory, lambda: nudges.append(1)), RecordReader(memory)
    record = writer.connection("api.example.com", "2001:db8::7", 443, 3)
    record.add(10, 0)
    (found,), cursor = reader.since(0)
    assert (found.name, found.address, found.port, found.rule) == ("api.example.com", "2001:db8::7", 443, 3)
    assert (found.kind, found.verdict, found.open, found.sent) == ("connect", "allowed", True, 10)
    record.add(0, 5)
    assert reader.since(cursor) == ([], cursor)
    record.close()
    record.close("failed", "reset")
    (ended,), _ = reader.since(cursor)
    assert (ended.slot, ended.open, ended.sent, ended.received, ended.reason) == (
        found.slot,
        False,
        10,
        5,
        "",
    )
    assert len(nudges) == 2
    totals = reader.totals()
    assert (totals.connections_allowed, totals.bytes_sent, totals.bytes_received) == (1, 10, 5)


@pytest.mark.parametrize(
    "ends", [InsideEnds("198.18.0.2", 40000, "198.18.3.4"), InsideEnds("fd00:5afe::2", 65535, "2001:db8::9")]
)
def test_a_connection_has_its_ends_inside_until_it_ends(memory: int, ends: InsideEnds) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    record = writer.connection("api.example.com", "2001:db8::7", 443, 3, ends)
    writer.refuse("", "10.0.0.1", 80, "no rule")
    assert [one.inside for one in reader.since(0)[0]] == [ends, None]
    record.close()
    assert reader.since(0)[0][-1].inside == ends


def test_only_memory_that_was_written_is_read(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    read: list[int] = []

    def pread(descriptor: int, size: int, at: int) -> bytes:
        found = os.preadv(descriptor, [block := bytearray(size)], at)
        read.append(found)
        return bytes(block[:found])

    monkeypatch.setattr("stockade.egress.records.os.pread", pread)
    assert reader.since(0) == ([], 0) and read == []
    # One of each class: they lie far apart.
    writer.name("api.example.com", allowed=True)
    writer.refuse("", "10.0.0.1", 80, "no rule")
    writer.connection("", "192.0.2.1", 443, 0)
    assert [one.kind for one in reader.since(0)[0]] == ["name", "connect", "connect"]
    assert sum(read) < records.SIZE / 20


def test_every_slot_is_found(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    for number in range(records.SLOTS):
        writer.refuse(f"{number}.example", "", 80, "no rule")
        writer.name(f"{number}.example", allowed=False)
        writer.connection(f"{number}.example", "192.0.2.1", 443, 0)
        writer.request(f"{number}.example", 443, f"GET https://{number}.example/")
    assert [one.slot for one in sorted(reader.since(0)[0])] == list(range(records.SLOTS))


def test_equal_refusals_share_a_record_and_count(memory: int) -> None:
    nudges: list[int] = []
    writer, reader = RecordWriter(memory, lambda: nudges.append(1)), RecordReader(memory)
    for _ in range(5):
        writer.refuse("", "10.0.0.1", 80, "no rule")
    writer.refuse("", "10.0.0.1", 81, "no rule")
    # The first, second and fourth of the one kind, and the other one.
    assert len(nudges) == 4
    found, _ = reader.since(0)
    assert [(one.port, one.times, one.verdict, one.reason) for one in found] == [
        (80, 5, "denied", "no rule"),
        (81, 1, "denied", "no rule"),
    ]
    assert reader.totals().connections_refused == 6
    assert reader.totals().records == 2


def test_a_connection_that_is_refused_later_counts_as_refused(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    writer.connection("a.example", "192.0.2.1", 8443, 0).close("denied", "SNI differs")
    assert reader.totals()[:2] == (0, 1)
    assert [(one.verdict, one.reason) for one in reader.since(0)[0]] == [("denied", "SNI differs")]


def test_refusals_cannot_push_out_what_was_allowed(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    for number in range(5000):
        writer.name(f"n{number}.example", allowed=False, reason="no rule")
        writer.refuse("", f"10.0.{number // 256}.{number % 256}", 80, "no rule")
    writer.connection("a.example", "192.0.2.1", 443, 0).close()
    found, _ = reader.since(0)
    assert found[-1].name == "a.example"
    assert len(found) == records.NAME_SLOTS + records.REFUSED_SLOTS + 1
    totals = reader.totals()
    assert totals.dropped == 10_000 - records.NAME_SLOTS - records.REFUSED_SLOTS
    assert totals.names_refused == totals.connections_refused == 5000


def test_a_connection_cannot_hide_behind_thousands_of_others(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    for number in range(records.ALLOWED_SLOTS + 300):
        writer.connection("a.example", f"192.0.2.{number % 250}", 443, 0).close()
    hidden = writer.connection("b.example", "192.0.2.9", 443, 1)
    again = writer.connection("b.example", "192.0.2.10", 443, 1)
    hidden.add(5, 6)
    again.add(1, 1)
    again.close()
    hidden.add(2, 0)
    hidden.close()
    last = {one.name: one for one in reader.since(0)[0]}
    assert (last["a.example"].times, last["b.example"].times) == (300, 2)
    assert (last["b.example"].sent, last["b.example"].received) == (8, 7)
    assert reader.totals().dropped == 0
    assert reader.totals().bytes_sent == 8


def test_one_of_them_that_is_refused_later_is_there_as_a_refusal(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    for _ in range(records.ALLOWED_SLOTS):
        writer.connection("a.example", "192.0.2.1", 443, 0).close()
    writer.connection("b.example", "192.0.2.1", 443, 1).close("denied", "SNI differs")
    found = [(one.name, one.verdict, one.reason) for one in reader.since(0)[0]]
    assert ("b.example", "denied", "SNI differs") in found


def test_connections_to_more_places_than_there_are_slots_are_counted(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    for number in range(records.ALLOWED_SLOTS + records.PLACE_SLOTS + 7):
        record = writer.connection(f"n{number}.example", "192.0.2.1", 443, 0)
        record.add(1, 1)
        record.close()
    assert reader.totals().dropped == 7
    assert reader.totals().records == records.ALLOWED_SLOTS + records.PLACE_SLOTS
    assert reader.totals().bytes_sent == records.ALLOWED_SLOTS + records.PLACE_SLOTS + 7


def test_a_name_with_bytes_that_no_terminal_should_see_is_made_printable(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    writer.name("a\x1b[31m b\u20ac" + "x" * 300, allowed=False, reason="no rule")
    (found,), _ = reader.since(0)
    assert found.name.startswith("a?[31m?b?xxx")
    assert len(found.name) == 253


def test_the_size_is_sealed(memory: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(memory, 0)
    with pytest.raises(PermissionError):
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_slot_that_is_being_written_is_left_for_later(memory: int) -> None:
    writer, reader = RecordWriter(memory), RecordReader(memory)
    writer.refuse("", "10.0.0.1", 80, "no rule")
    slot = records._HEADER_SIZE + records.NAME_SLOTS * records._SLOT_SIZE
    change = os.pread(memory, 8, slot)
    os.pwrite(memory, bytes(8), slot)
    assert reader.since(0) == ([], 0)
    os.pwrite(memory, change, slot)
    assert len(reader.since(0)[0]) == 1


def test_rubbish_yields_no_error_and_only_records_that_make_sense(memory: int) -> None:
    chance = random.Random(18)
    reader = RecordReader(memory)
    for _ in range(20):
        os.pwrite(memory, chance.randbytes(records.SIZE), 0)
        found, cursor = reader.since(0)
        assert all(one.name.isprintable() and one.duration >= 0 and one.rule >= -1 for one in found)
        assert reader.since(cursor)[0] == []
        assert all(0 <= value < 2**63 for value in reader.totals())
    writer = RecordWriter(memory)
    writer.refuse("", "10.0.0.1", 80, "no rule")
    # Flip bytes of one good slot.
    at = records._HEADER_SIZE + records.NAME_SLOTS * records._SLOT_SIZE
    good = os.pread(memory, records._SLOT_SIZE, at)
    for _ in range(2000):
        block = bytearray(good)
        block[chance.randrange(len(block))] = chance.randrange(256)
        os.pwrite(memory, bytes(block), at)
        record = reader._read(records.NAME_SLOTS)
        assert record is None or (record[1].kind in records.KINDS and record[1].verdict in records.VERDICTS)
