"""What a kept terminal shows again: bounded, not torn apart, and without the questions in it."""

from __future__ import annotations

import os
import tty
from collections.abc import Iterator
from typing import cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stockade.gate.wire import Channel
from stockade.runs.io.eventloop import Events
from stockade.sessions.attach import protocol
from stockade.sessions.attach.scrollback import AFRESH, Scrollback
from stockade.sessions.attach.shared_terminal import SharedTerminal, TerminalClient
from stockade.sessions.attach.terminal_modes import CANCEL, Modes, ReplyFilter
from support.kept import HELLO

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
        assert ReplyFilter().feed(whole).replace(b"\x1b\\", b"") == b"".join(HARMLESS)

    @given(st.lists(st.sampled_from([*HARMLESS, *QUESTIONS])), st.lists(st.integers(1, 12)))
    def test_it_does_not_matter_where_it_is_cut(self, parts: list[bytes], sizes: list[int]) -> None:
        whole, cut = b"".join(parts) + b"\r\n", ReplyFilter()
        pieces, rest = [], whole
        for size in sizes:
            pieces.append(cut.feed(rest[:size]))
            rest = rest[size:]
        assert b"".join(pieces) + cut.feed(rest) == ReplyFilter().feed(whole)

    def test_a_long_text_for_the_terminal_is_left_out_however_it_comes(self) -> None:
        cut = ReplyFilter()
        shown = b"".join(cut.feed(b"a" + LONG[:300] if n == 0 else b"x" * 300) for n in range(3))
        assert shown + cut.feed(b"\x07b") == b"ab"

    def test_the_clipboard_and_what_is_answered_at_once_are_for_one_alone(self) -> None:
        shown = b"a\x1b]52;c;QUJD\x07b\x1b]052;c;QUJD\x1b\\c\x1b[?1049;1004;25h\x1b[?2048h\x1b[?1004l"
        assert ReplyFilter().feed(shown) == b"ab\x1b\\c\x1b[?1049;25h\x1b[?1004l"

    @given(st.lists(st.sampled_from([*QUESTIONS, *NASTY])).map(b"".join), st.integers(0, 20))
    @example(b"\x1b\xc3\x9b", 0)
    @example(b"\x1b[1\xc3\x9b6n", 0)
    @example(b"\x1b\xc2\x9b6n", 0)
    @example(b"\x1b[\xc3\x9b6n", 3)
    def test_nothing_that_is_left_asks_whatever_was_left_out_between(self, data: bytes, cut: int) -> None:
        data += b"\x18\r\n"
        kept = Scrollback()
        kept.add(data)
        twice = ReplyFilter()
        for left in (kept.shown(afresh=False), twice.feed(data[:cut]) + twice.feed(data[cut:])):
            seen = Modes()
            seen.see(left)
            assert not seen.asked, left


class TestScrollback:
    def test_it_is_bounded_and_begins_with_a_line(self) -> None:
        kept = Scrollback(1000)
        for number in range(500):
            kept.add(b"line %d\r\n" % number)
        shown = kept.shown(afresh=False)
        assert 900 <= len(shown) <= 1250
        assert shown.startswith(b"line ") and shown.endswith(b"line 499\r\n")
        assert kept.shown(afresh=True) == AFRESH + shown

    def test_what_a_terminal_answers_at_once_is_on_only_if_it_still_is(self) -> None:
        for filler in (b"", b"line\r\n" * 1000):
            kept = Scrollback(1000)
            kept.add(b"\x1b[?1004h\x1b[?2048h" + filler + b"\x1b[?2048l$ ")
            shown = kept.shown(afresh=False)
            assert shown.endswith(b"$ \x1b[?1004h") and shown.count(b"?1004h") == 1
            assert b"?2048h" not in shown

    def test_another_terminal_does_not_ring_nor_lose_its_own_history(self) -> None:
        kept = Scrollback(1000)
        kept.add(b"\x07a\x1b]2;title\x07\x07\x1b[H\x1b[2J\x1b[3J\x1b[03Jb\x1bcc\x1b[13J")
        assert kept.shown(afresh=False) == b"a\x1b]2;title\x07\x1b[H\x1b[2Jb" + AFRESH + b"c\x1b[13J"

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


class Shown:
    """A terminal whose program is the test."""

    def __init__(self, events: Events) -> None:
        self._outer, self._inner = os.openpty()
        tty.setraw(self._inner)
        self._shared = SharedTerminal(1, HELLO)
        self._shared.connect(self._outer, cast(Channel, None), events)
        self._streams: list[int] = []
        self._lines: list[protocol.AttachSocket] = []

    def show(self, data: bytes) -> None:
        os.write(self._inner, data)
        self._shared.move(self._outer)

    def join(self) -> int:
        """Who comes sees it at this end."""
        ours, theirs = protocol.line_pair()
        stream, handed_over = protocol.streams()
        self._lines.append(ours)
        self._streams.append(stream)
        os.set_blocking(stream, False)
        self._shared.join(TerminalClient(theirs, handed_over, HELLO))
        return stream

    def leave_last(self) -> None:
        self._shared.leave(self._shared.clients[-1])

    def close(self) -> None:
        self._shared.leave_all()
        self._shared.close()
        os.close(self._inner)
        for line in self._lines:
            line.close()
        for stream in self._streams:
            os.close(stream)


@pytest.fixture
def shown() -> Iterator[Shown]:
    with Events() as events:
        made = Shown(events)
        yield made
        made.close()


class TestWhoComesInTheMiddle:
    @pytest.mark.parametrize(
        ("begun", "rest", "asked", "unasked"),
        [
            (b"\x1b[", b"6n", b"\x1b[6n", b""),
            (b"\x1b]2;ti", b"tle\x07", b"\x1b]2;title\x07", b"\x1b]2;title\x07"),
            (b"\x1bPq12", b"34\x1b\\", b"\x1b\\", b"\x1b\\"),
            (b"\x1b]52;" + b"x" * 300, b"yz\x07", b"", b""),
        ],
    )
    def test_sees_all_of_it_or_nothing(
        self, shown: Shown, begun: bytes, rest: bytes, asked: bytes, unasked: bytes
    ) -> None:
        first = shown.join()
        shown.show(b"<" + begun)
        last = shown.join()
        shown.show(rest + b">")
        assert os.read(last, 1000) == b"<" + asked + b">"
        assert os.read(first, 1000) == b"<" + begun + CANCEL + unasked + b">"

    def test_one_who_is_left_alone_is_asked_and_speaks(self, shown: Shown) -> None:
        first = shown.join()
        shown.join()
        shown.show(b"\x1b[?1004h<\x1b[")
        assert os.read(first, 1000) == b"<"
        shown.leave_last()
        shown.show(b"6n>")
        assert os.read(first, 1000) == b"\x1b[?1004h\x1b[6n>"
