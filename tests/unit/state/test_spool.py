"""Sequences that are kept on the disk, and MessagePack that is read item by item."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.result import Change
from stockade.state import msgpack_stream
from stockade.state.spool import SHORT, Spool, spool
from stockade.workspace import journal, metadata


def many(count: int) -> Spool[Change]:
    made = spool(Change)
    made.extend(Change(f"{number}-\udcff".rjust(200), "added") for number in range(count))
    return made


def test_a_short_one_needs_no_file() -> None:
    before = os.listdir("/proc/self/fd")
    short = many(10)
    assert isinstance(short.settled(), tuple) and short == tuple(short)
    assert os.listdir("/proc/self/fd") == before


def test_a_long_one_is_what_was_put_in() -> None:
    count = 3 * SHORT // 200
    long = many(count)
    assert long.settled() is long and len(long) == count
    expected = [Change(f"{number}-\udcff".rjust(200), "added") for number in range(count)]
    assert list(long) == expected and list(reversed(long)) == expected[::-1]
    assert long[5] == expected[5] and long[-1] == expected[-1] and long[count // 2] == expected[count // 2]
    assert long[100:4000] == expected[100:4000] and long[:10:3] == expected[:10:3] and long[7:3] == []
    assert long == tuple(expected) and long != tuple(expected[:-1]) and long == many(count)
    assert pickle.loads(pickle.dumps(long)) == tuple(expected)
    with pytest.raises(IndexError):
        long[count]


def test_a_long_one_lets_go_of_its_file() -> None:
    before = os.listdir("/proc/self/fd")
    long = many(3 * SHORT // 200)
    assert len(os.listdir("/proc/self/fd")) == len(before) + 1
    del long
    assert os.listdir("/proc/self/fd") == before


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.binary(max_size=300)
    | st.text(max_size=70),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
    max_leaves=40,
)


@given(st.lists(VALUES, max_size=20))
def test_values_are_told_apart_wherever_the_file_is_cut(values: list[object]) -> None:
    class Slow(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            return super().read(min(size or 1, 7))

    encoded = [msgspec.msgpack.encode(value) for value in values]
    for file in (io.BytesIO(b"".join(encoded)), Slow(b"".join(encoded))):
        reader = msgpack_stream.MsgpackReader(file)
        assert [reader.value() for _ in values] == encoded
        with pytest.raises(ValueError, match="too early"):
            reader.value()


@given(st.binary(max_size=40))
def test_other_bytes_are_an_error(data: bytes) -> None:
    reader = msgpack_stream.MsgpackReader(io.BytesIO(data))
    try:
        while True:
            assert reader.value()
    except ValueError:
        pass


class TestWhatIsKnownOfFiles:
    def test_is_found_by_its_path(self) -> None:
        known = metadata.HostFileTable()
        for number in range(5000):
            known.add(b"%d" % number, (number, -number))
        known.add(b"7", (1, 2))
        assert known.get(b"7") == (1, 2) and known.get(b"4999") == (4999, -4999)
        assert b"4998" in known and b"5000" not in known and known.get(b"5000") is None

    def test_is_added_to_and_known_better(self, tmp_path: Path) -> None:
        layer = str(tmp_path)
        metadata.remember(layer, [(b"a", (1, 1)), (b"b", (2, 2)), (b"a", (9, 9))])
        metadata.remember(layer, [(b"b", (3, 3)), (b"c\xff", (2**64 - 1, 2**62))])
        assert dict(metadata.sights(layer)) == {b"b": (3, 3), b"c\xff": (2**64 - 1, 2**62), b"a": (1, 1)}

    def test_as_earlier_versions_wrote_it_is_read(self, tmp_path: Path) -> None:
        written = {b"x" * 70000: (5, 6), b"": (7, 0)}
        (tmp_path / "seen").write_bytes(msgspec.msgpack.encode(written))
        assert dict(metadata.sights(str(tmp_path))) == written
        (tmp_path / "seen").write_bytes(msgspec.msgpack.encode(written)[:-1] + b"\xc1")
        assert metadata.seen(str(tmp_path)).get(b"") is None


class Earlier(msgspec.Struct):
    """A journal as earlier versions wrote it."""

    state: str
    root: int
    staging: str
    inode: int
    steps: tuple[
        journal.UnlockStep | journal.SetAsideStep | journal.MakeStep | journal.PutStep | journal.SettleStep,
        ...,
    ]


STEPS = (
    journal.UnlockStep(b"a", 0o700),
    journal.SetAsideStep(b"b\xff", "old-1", (1, 2, 3), "/"),
    journal.MakeStep(b"c"),
    journal.PutStep(b"d", "4", None),
    journal.PutStep(b"e", "5", (6, -7, 8), "old-5"),
    journal.SettleStep(b"c", 0o755, (0, 0), (1, 2)),
)


def test_a_journal_of_earlier_versions_is_read(tmp_path: Path) -> None:
    data = msgspec.msgpack.encode(Earlier("commit", 1, "staging", 2, STEPS))
    (tmp_path / journal.FILE).write_bytes(data)
    found = journal.read(str(tmp_path))
    assert found is not None and (found.state, found.root, found.inode) == ("commit", 1, 2)
    assert tuple(found.steps) == STEPS
    journal.write(str(tmp_path), found)
    again = msgspec.msgpack.decode((tmp_path / journal.FILE).read_bytes(), type=Earlier)
    assert again.steps == STEPS and again.state == "commit", "and they read what is written now"
