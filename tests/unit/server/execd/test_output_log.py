"""The log of a command in the background: the newest bytes, at their places."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.server.execd import output_log
from stockade.server.execd.output_log import OutputLog, unfinished


@pytest.fixture
def log() -> Iterator[OutputLog]:
    made = OutputLog()
    yield made
    made.close()


def test_a_cursor_goes_on_where_the_last_page_ended(log: OutputLog) -> None:
    log(b"one\n")
    page = log.read(0, ended=False)
    assert page == (b"one\n", 4)
    log(b"two\n")
    assert log.read(page.cursor, ended=True) == (b"two\n", 8)
    assert log.read(8, ended=True) == (b"", 8)
    assert log.read(99, ended=True) == (b"", 8)


@given(pieces=st.lists(st.binary(max_size=30)), cursor=st.integers(0, 200))
def test_a_full_log_keeps_the_newest_bytes(pieces: list[bytes], cursor: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output_log, "MOST_KEPT", 16)
        log = OutputLog()
        for piece in pieces:
            log(piece)
        whole = b"".join(pieces)
        start = min(max(cursor, len(whole) - 16), len(whole))
        assert log.read(cursor, ended=True) == (whole[start:], len(whole))
        log.close()


def test_half_a_character_waits_for_the_other_half(log: OutputLog) -> None:
    data = "a€".encode()
    log(data[:2])
    assert log.read(0, ended=False) == (b"a", 1)
    assert log.read(0, ended=True) == (data[:2], 2)
    log(data[2:])
    assert log.read(1, ended=False) == ("€".encode(), 4)


def test_bytes_that_are_no_text_are_not_held_back() -> None:
    assert [unfinished(data) for data in (b"", b"\x80", b"\x80\x80\x80\x80", b"\xff", b"a\xe2\x82")] == [
        0,
        0,
        0,
        1,
        2,
    ]
