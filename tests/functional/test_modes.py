"""What a program has switched on in a terminal and left on, told from what it shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.cli.modes import Modes

LINES = 24


def off(*pieces: bytes) -> bytes:
    modes = Modes()
    for piece in pieces:
        modes.see(piece)
    return modes.off(LINES)


@pytest.mark.parametrize(
    ("shown", "reset"),
    [
        (b"plain text\r\n", b""),
        (b"\x1b[?1049h", b"\x1b[?1049l"),
        (b"\x1b[?1049h\x1b[?1049l", b""),
        (b"\x1b[?25l", b"\x1b[?25h"),
        (b"\x1b[?25l\x1b[?25h", b""),
        (b"\x1b[?1000;1006h", b"\x1b[?1000l\x1b[?1006l"),
        (b"\x1b[?1000;1006h\x1b[?1006l", b"\x1b[?1000l"),
        (b"\x1b[?2004h", b"\x1b[?2004l"),
        (b"\x1b[?12h\x1b[?1007h", b""),  # whether the cursor blinks is a matter of taste
        (b"\x1b[1;31mred", b"\x1b[0m"),
        (b"\x1b[1;31mred\x1b[m", b""),
        (b"\x1b[38:2::1:2:3mred\x1b[0;0m", b""),
        (b"\x1b(0lqk", b"\x1b(B"),
        (b"\x1b(0lqk\x1b(B", b""),
        (b"\x1b=", b"\x1b>"),
        (b"\x1b[3;10r", b"\x1b7\x1b[r\x1b8"),
        (b"\x1b[3;10r\x1b[1;24r", b""),
        (b"\x1b[>1u\x1b[>1u\x1b[<u", b"\x1b[<1u"),
        (b"\x1b[>4;2m", b"\x1b[>4m"),
        (b"\x1b[>4;2m\x1b[>4;m", b""),
        (b"\x1b[?1049h\x1b[31m\x1b[?25l\x1bc", b""),
        (b"\x1b]0;a title without an end", b"\x18"),
        (b"\x1b[3", b"\x18"),
        (b"\x1b]0;a title\x07", b""),
        (b"\x1b]0;a title\x1b\\", b""),
        (b"\x1b[?" + b"9" * 5000 + b"h", b""),
    ],
)
def test_what_was_left_on_is_switched_off_and_nothing_else(shown: bytes, reset: bytes) -> None:
    assert off(shown) == reset


PIECES = st.sampled_from(
    [
        b"\x1b[?1049h",
        b"\x1b[?25l",
        b"\x1b[?25h",
        b"\x1b[31m",
        b"\x1b[m",
        b"text",
        b"\x1b]2;t\x07",
        b"\x1b[2;5r",
        b"\x1b",
    ]
)


@given(st.lists(PIECES, max_size=12).map(b"".join), st.data())
def test_where_it_is_cut_does_not_matter(shown: bytes, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(shown)))
    assert off(shown[:cut], shown[cut:]) == off(shown) == off(*(shown[i : i + 1] for i in range(len(shown))))


@pytest.mark.parametrize(
    "asks",
    [
        b"\x1b[6n",
        b"\x1b[c",
        b"\x1b[>c",
        b"\x1b[?2026$p",
        b"\x1b]11;?\x07",
        b"\x1bP+q544e\x1b\\",
        b"\x05",
        b"\x1b[>q",
    ],
)
def test_questions_are_noticed(asks: bytes) -> None:
    modes = Modes()
    modes.see(b"\x1b[31mno question\x1b[m\x1b]0;title\x07")
    assert modes.asked is None
    modes.see(asks)
    assert modes.asked is not None


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_bytes_confuse_it(pieces: list[bytes]) -> None:
    off(*pieces)
