"""What a kept terminal shows again: bounded, not torn apart, and without the questions in it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stockade.live.modes import Modes, Unasked
from stockade.live.scrollback import AFRESH, Scrollback

HARMLESS = [b"text ", "é€𝄞".encode(), b"\r\n", b"\x1b[31m", b"\x1b[?1049h", b"\x1b]2;title\x07", b"\x1b[2J"]
QUESTIONS = [
    b"\x1b[6n",
    b"\x1b[c",
    b"\x05",
    b"\x1b]10;?\x07",
    b"\x1bP+q544e\x1b\\",
    b"\x1b[18t",
    b"\x1b]4;1;?\x1b\\",
]
NASTY = [
    b"\x1b",
    b"\x1b[",
    b"[",
    b"6n",
    b"\x18",
    b"\x9b",
    b"\x1b]",
    b"\x1bP",
    b"\\",
    b"\x07",
    b"0",
    b"a",
    b"\xc3",
]
LONG = b"\x1b]52;c;" + b"QUJD" * 200 + b"\x07"


class TestUnasked:
    def test_questions_are_left_out_and_nothing_else(self) -> None:
        whole = b"".join(part + question for part, question in zip(HARMLESS, QUESTIONS, strict=True))
        # What is left of a string is its end, which means nothing by itself.
        assert Unasked().feed(whole).replace(b"\x1b\\", b"") == b"".join(HARMLESS)

    @given(st.lists(st.sampled_from([*HARMLESS, *QUESTIONS])), st.lists(st.integers(1, 12)))
    def test_it_does_not_matter_where_it_is_cut(self, parts: list[bytes], sizes: list[int]) -> None:
        whole, cut = b"".join(parts) + b"\r\n", Unasked()
        pieces, rest = [], whole
        for size in sizes:
            pieces.append(cut.feed(rest[:size]))
            rest = rest[size:]
        assert b"".join(pieces) + cut.feed(rest) == Unasked().feed(whole)

    def test_a_long_text_for_the_terminal_is_left_out_however_it_comes(self) -> None:
        cut = Unasked()
        shown = b"".join(cut.feed(b"a" + LONG[:300] if n == 0 else b"x" * 300) for n in range(3))
        assert shown + cut.feed(b"\x07b") == b"ab"

    @given(st.lists(st.sampled_from([*QUESTIONS, *NASTY])).map(b"".join))
    def test_nothing_that_is_left_asks_whatever_was_left_out_between(self, data: bytes) -> None:
        left = Unasked().feed(data + b"\x18\r\n")
        seen = Modes()
        seen.see(left)
        assert seen.asked is None, left


class TestScrollback:
    def test_it_is_bounded_and_begins_with_a_line(self) -> None:
        kept = Scrollback(1000)
        for number in range(500):
            kept.add(b"line %d\r\n" % number)
        shown = kept.shown(afresh=False)
        assert 900 <= len(shown) <= 1250
        assert shown.startswith(b"line ") and shown.endswith(b"line 499\r\n")
        assert kept.shown(afresh=True) == AFRESH + shown

    def test_a_character_and_a_sequence_stay_whole(self) -> None:
        kept = Scrollback(1000)
        kept.add("€".encode() * 2000)
        kept.shown(afresh=False).decode()
        kept.add(b"\x1b[38;5;196m" * 2000)
        assert kept.shown(afresh=False).startswith(b"\x1b[38;5;196m\x1b")

    def test_modes_from_before_its_beginning_are_switched_on(self) -> None:
        kept = Scrollback(1000)
        kept.add(b"\x1b[?1049h\x1b[?25l\x1b[?2004h\x1b[?2004l")
        kept.add(b"drawn\r\n" * 1000)
        assert kept.shown(afresh=False).startswith(b"\x1b[?1049h\x1b[?25ldrawn")
        assert kept.modes.alternate
        kept.add(b"\x1b[?1049l\x1b[?25h")
        assert not kept.modes.alternate
