"""The file with the records of a supervisor: what readers see while it is written, cut off or damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.runs.register import record_file
from stockade.runs.register.record_file import PAGE, RecordFile

ID = "0123456789ab"


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "sandboxes", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def own(file: int) -> RecordFile:
    return RecordFile(file)


def records(file: int) -> list[bytes]:
    found, damaged = record_file.read(file)
    assert not damaged
    return [one.record for one in found]


def pages(file: int) -> int:
    return -(-os.fstat(file).st_size // PAGE)


def test_a_record_is_there_until_it_is_freed_and_its_slot_serves_the_next(file: int, own: RecordFile) -> None:
    first, second = own.add(b"first"), own.add(b"second")
    assert records(file) == [b"first", b"second"]
    own.free(first)
    assert records(file) == [b"second"]
    own.add(b"third")
    assert records(file) == [b"third", b"second"] and pages(file) == 2
    own.free(second)
    assert records(file) == [b"third"]


def test_the_last_change_counts_and_none_of_an_earlier_sandbox_does(file: int, own: RecordFile) -> None:
    slot = own.add(b"an earlier one")
    for number in range(20):
        slot = own.change(slot, b"changed %d" % number, ID)
        assert records(file) == [b"changed %d" % number]
    own.free(slot)
    own.add(b"anotherlengths")
    assert records(file) == [b"anotherlengths"] and pages(file) == 1


def test_a_record_that_outgrows_its_slot_gets_another_with_its_mark(file: int, own: RecordFile) -> None:
    slot, other = own.add(b"small"), own.add(b"other")
    record_file.mark(file, slot.at, ID)
    for length in (5_000, 6_000, 20_000, 60_000):
        slot = own.change(slot, b"x" * length, ID)
        assert sorted(records(file)) == [b"other", b"x" * length]
        assert own.is_marked(slot, ID) and not own.is_marked(other, ID)
    own.free(slot)
    own.free(other)
    assert records(file) == []
    again = own.add(b"small")
    assert not own.is_marked(again, "ffffffffffff")  # the mark of the sandbox before says nothing about it


def test_a_record_moves_back_never_forward(file: int, own: RecordFile) -> None:
    free, slot = own.add(b"x"), own.add(b"y")
    own.free(free)
    for _ in range(2):
        slot = own.change(slot, b"z" * 1500, ID)
    moved = own.change(slot, b"z" * 1500, ID)
    assert moved.at > slot.at > free.at and moved.pages == free.pages


def test_many_sandboxes_have_a_page_each_and_ones_that_follow_need_no_more(
    file: int, own: RecordFile
) -> None:
    for _ in range(3):
        slots = [own.add(b"%d" % number * 100) for number in range(1000)]
        assert len(records(file)) == 1000 and pages(file) == 1000
        for slot in slots:
            own.free(slot)
        assert records(file) == []


def test_a_record_without_bounds_is_refused(file: int, own: RecordFile) -> None:
    with pytest.raises(OSError, match="File too large"):
        own.add(b"x" * (1 << 17))
    assert records(file) == []


def test_wherever_a_change_is_cut_off_the_record_before_counts(file: int, own: RecordFile) -> None:
    slot = own.add(b"before")
    untouched = os.pread(file, PAGE, 0)
    start = slot.end
    own.change(slot, b"after", ID)
    written = os.pread(file, slot.end - start, start)
    for count in range(len(written)):
        os.ftruncate(file, 0)
        os.pwrite(file, untouched, 0)
        os.pwrite(file, written[:count], start)
        assert records(file) == [b"before"]
    os.pwrite(file, written, start)
    assert records(file) == [b"after"]


def test_wherever_the_first_record_is_cut_off_nothing_else_is_lost(
    file: int, own: RecordFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "PAUSES", 0)
    slot = own.add(b"earlier", behind=-1)
    own.add(b"other")
    own.free(slot)
    untouched = os.pread(file, 2 * PAGE, 0)
    again = own.add(b"of the next sandbox")
    written = os.pread(file, again.end - 72, 72)
    for count in range(len(written)):
        os.pwrite(file, untouched, 0)
        os.pwrite(file, written[:count], 72)
        assert [one.record for one in record_file.read(file)[0]] == [b"other"]


def test_no_content_makes_reading_fail(file: int, own: RecordFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_file, "PAUSES", 0)
    dice = random.Random(3)
    for number in range(4):
        own.add(b"record %d" % number * 50)
    whole = os.pread(file, 1 << 20, 0)
    for _ in range(2000):
        spoilt = bytearray(whole[: dice.choice([len(whole), dice.randrange(len(whole))])])
        for _ in range(dice.randrange(4)):
            at = dice.choice(
                [dice.randrange(max(1, len(spoilt))), dice.randrange(4) * PAGE + dice.randrange(96)]
            )
            spoilt[at : at + 4] = dice.randbytes(4)
        os.ftruncate(file, 0)
        os.pwrite(file, spoilt, 0)
        found, _ = record_file.read(file)
        assert all(one.record.startswith(b"record ") for one in found)
