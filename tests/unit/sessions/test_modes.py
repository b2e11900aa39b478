"""What a program has switched on in a terminal and left on, told from what it shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.sessions.attach.terminal_modes import EVERYTHING, UNCOUNTED, Modes

LINES = 24
#: What full-screen programs show, and no terminal answers.
HARMLESS = (
    b"\x1b[?1049h\x1b[22;0;0t\x1b[?1h\x1b=\x1b[1;24r\x1b(B\x1b[m\x1b[4l\x1b[?7h\x1b[H\x1b[2J\x1b[31mred"
    b"\x1b[m\x1b]0;title?\x07\x1b]8;;https://a/?b\x1b\\link\x1b]8;;\x1b\\\x1b]11;#000\x07\x1b]52;c;YQ==\x07"
    b"\x1b[>4;2m\x1b[2 q\x1b[?25l\x1b7\x1b[5;5H\x1b8\x1b[K\x1bM\x1b[3X\x1b[>1u\x1b[<u\x1b[23;0;0t\x1b[?1049l"
)


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
        (b"\x1b]0;a title without an end", b"\x18\x1b\\"),
        (b"\x1b[3", b"\x18\x1b\\"),
        (b"\x1b]0;a title\x07", b""),
        (b"\x1b]0;a title\x1b\\", b""),
        (b"\x1b[?" + b"0" * 116 + b"1003h", b"\x1b[?1003l"),
        (b"\x1b[2h\x1b[4h\x1b[20h\x1b[12l", b"\x1b[2l\x1b[4l\x1b[12h\x1b[20l"),
        (b"\x1b[4h\x1b[4l\x1b[12l\x1b[12h", b""),
        (b"\x1b[?69h", b"\x1b[?69l"),
        (b"\x0e", b"\x0f"),
        (b"\x0elqk\x0f", b""),
        ("Û\u201b\U0001f600".encode(), b""),
    ],
)
def test_what_was_left_on_is_switched_off_and_nothing_else(shown: bytes, reset: bytes) -> None:
    assert off(shown) == reset


@pytest.mark.parametrize(
    "shown",
    [
        b"\x1b[?" + b"9" * 5000 + b"h",
        b"\x1b[?" + b"0;" * 80 + b"1003h",
        b"\x1b[?" + b"1;" * 40 + b"1003l",
        b"\x1b[?66539h",
        b"\x1b[?10\n03h",
        b"\x1b\n[?1003h",
        b"\xc2\x9b?1003h",
        b"\x9b?1003h",
        b"\x1b[?1003r",
        b"\x1b G",
        b"\x1b[>1;2m",
        b"\x1b[5i",
        b"\x1b[<1:2u",
    ],
)
def test_where_terminals_differ_everything_is_switched_off(shown: bytes) -> None:
    assert off(b"text", shown) == off(shown[:-3], shown[-3:] + b"text") == EVERYTHING
    for mode in (b"?1003l", b"?1049l", b"?25h", b"4l", b"12h", b"!p"):
        assert b"\x1b[" + mode in EVERYTHING


def test_a_soft_reset_does_not_count_for_what_it_leaves_on() -> None:
    assert off(b"\x1b[?1003h\x1b[!p") == b"\x1b[?1003l"


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
        b"\x1b[" + b"0" * 5000 + b"6n",
        b"\x1b[6\nn",
        b"\x1b[6\x7fn",
        b"\xc2\x9b6n",
        b"\x1b]52;c;?\x07",
        b"\x1b]0052;;?\x1b\\",
        b"\x1b[1;1;1;1;9;9*y",
        b"\x1b[?1;1;0S",
        b"\x1b[?4m",
        b"\x1b[21t",
        b"\x1b]" + b"x" * 5000 + b"\x07",
        b"\x1b_Gi=1,a=q;\x1b\\",
        b"\x1b]0;\xc2\x9c\xc2\x9b6n\x07",
        b"\x1b]0;\x9c\x9b6n\x07",
        b"\x1b]0;\xc2\x9c\xc2\x9b6n",
        b"\x1b]0;\n\x05\x07",
        "\x1b]0;Û6n\x07".encode(),
        b"\x1b(\x9b6n",
        b"\x1b)\x9b6n",
        b"\x1b(\x05B",
    ],
)
def test_questions_are_noticed(asks: bytes) -> None:
    for pieces in ([asks], [asks[i : i + 1] for i in range(len(asks))]):
        modes = Modes()
        modes.see(HARMLESS)
        assert not modes.asked
        for piece in pieces:
            modes.see(piece)
        assert modes.asked


@pytest.mark.parametrize(
    ("asks", "answers"),
    [
        (b"\x1b[5n" * 3, 3),
        (b"\x1b[005n" * 3, 3),
        # Terminals differ about these, and some answer several times.
        (b"\x1b[5;n", UNCOUNTED),
        (b"\xc2\x9b5n", UNCOUNTED),
        (b"\x1b[\n5n", UNCOUNTED),
        (b"\x1b]0;\n\x07", UNCOUNTED),
        (b"\x1b]4;" + b"1;#fff;" * 60 + b"5;?", UNCOUNTED),
    ],
)
def test_it_is_counted_how_often_a_terminal_may_say_that_it_is_well(asks: bytes, answers: int) -> None:
    modes = Modes()
    modes.see(HARMLESS + b"\x1b[6n\x1b[c")
    assert modes.statuses == 0
    modes.see(asks)
    assert min(modes.statuses, UNCOUNTED) == answers


@given(st.lists(st.binary(max_size=40), max_size=5))
def test_no_bytes_confuse_it(pieces: list[bytes]) -> None:
    off(*pieces)
