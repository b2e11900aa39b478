"""What a terminal answers to a program's questions does not become the user's next command.

The terminal here is slow, as one behind a bad line is, and answers what some terminals answer.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from stockade.sessions.attach.user_terminal import LAST_ANSWER, LAST_QUESTION
from support.screens import STOCKADE, Terminal

PYTHON = "/usr/bin/python3"
#: Asks, a byte at a time if told to, and ends after so many seconds.
ASK = """
import os, sys, time, tty
tty.setraw(0)
asked, size, seconds = bytes.fromhex(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
for at in range(0, len(asked), size or len(asked)):
    os.write(1, asked[at:at + (size or len(asked))])
time.sleep(seconds)
"""
EVIL = b"echo owned\r"


class Slow(Terminal):
    """Answers each question (a part of what is shown) after those before it, and some time later."""

    def __init__(self, rules: dict[bytes, tuple[float, bytes]], *arguments: Any, **options: Any) -> None:
        self._rules, self._done, self._due = rules, 0, [(0.0, b"")]
        super().__init__(*arguments, **options)

    def _answer(self, data: bytes) -> None:
        """What the emulator would say."""

    def _look(self, seconds: float) -> bool:
        seen = super()._look(seconds)
        while found := [(at, rule) for rule in self._rules if (at := self.shown.find(rule, self._done)) >= 0]:
            at, rule = min(found)
            delay, answer = self._rules[rule]
            self._done = at + len(rule)
            self._due.append((max(time.monotonic(), self._due[-1][0]) + delay, answer))
        while self._due and self._due[0][0] <= time.monotonic():
            answer = self._due.pop(0)[1]
            if answer:
                self.type(answer)
            if not self._due:
                self._due = [(0.0, b"")]
                break
        return seen

    def settled(self) -> int:
        """What would be typed once all is answered."""
        self.code()
        until = time.monotonic() + 0.1 + max(0.0, self._due[-1][0] - time.monotonic())
        while time.monotonic() < until:
            self._look(0.02)
        assert self.settings() == self.fresh or self.process.args[2] != STOCKADE
        return self.typed_ahead


def asking(
    workspace: Path, question: bytes, *, inside: bool, rules: dict[bytes, tuple[float, bytes]], size: int = 0,
    seconds: float = 0,
) -> Slow:  # fmt: skip
    command = [PYTHON, "-c", ASK, question.hex(), str(size), str(seconds)]
    walls = [STOCKADE, "run", "-q", "--"] if inside else []
    return Slow(rules, [*walls, *command], workspace)


QUESTIONS = {
    "DECRQSS": b"\x1bP$q\"p\x1b\\",
    "XTGETTCAP": b"\x1bP+q544e;436f\x1b\\",
    "a colour of the palette": b"\x1b]4;0;?\x07",
    "the colour of text": b"\x1b]10;?\x1b\\",
    "the clipboard": b"\x1b]52;c;?\x07",
    "where the cursor is": b"\x1b[6n",
    "where the cursor is, and on which page": b"\x1b[?6n",
    "a printer": b"\x1b[?15n",
    "what it is": b"\x1b[c",
    "what it is, secondly": b"\x1b[>0c",
    "what it is, thirdly": b"\x1b[=c",
    "what it is, in an old way": b"\x1bZ",
    "its name": b"\x1b[>0q",
    "sixels": b"\x1b[?2;1;0S",
    "kitty's pictures": b"\x1b_Gi=31,s=1,v=1,a=q,t=d,f=24;AAAA\x1b\\",
    "kitty's keyboard": b"\x1b[?u",
    "answerback": b"\x05",
    "a checksum": b"\x1b[1;1;1;1;9;9*y",
    "a mode": b"\x1b[?2026$p",
    "its title": b"\x1b[21t",
    "its size in a title": b"\x1b]0;\x9c\x9b18t\x07",
    "in one byte": b"\x9b6n",
    "in UTF-8": b"\xc2\x9b6n",
    "a string in one byte": b"\x90$qm\x9c",
    "through tmux": b"\x1bPtmux;\x1b\x1b[6n\x1b\\",
    "through screen": b"\x1bP\x1b[6n\x1b\\",
    "iTerm2's": b"\x1b]1337;ReportCellSize\x07",
    "a font": b"\x1b]50;?\x07",
    "colours by themselves": b"\x1b[?2031h\x1b[?996n",
}  # fmt: skip


@pytest.mark.parametrize("what", QUESTIONS)
def test_no_answer_is_left_for_the_shell(what: str, workspace: Path) -> None:
    question = QUESTIONS[what]
    rules = {question: (0.15, EVIL), LAST_QUESTION: (0.0, LAST_ANSWER)}
    # Some at once, some byte by byte.
    with asking(workspace, question, inside=True, rules=rules, size=len(question) % 2) as terminal:
        assert terminal.settled() == 0


def test_outside_it_is_left_for_the_shell(workspace: Path) -> None:
    with asking(workspace, b"\x1b[c", inside=False, rules={b"\x1b[c": (0.15, EVIL)}) as terminal:
        assert terminal.settled() > 0


@pytest.mark.parametrize(
    ("first", "answers"),
    [
        (b"\x1b[5;5;5;5n", 4),  # some answer each number
        (b"\x1b]0;\x9c\x9b5n\x9b5n\x9b5n\x07", 3),
        ("\x1b]0;\u06db5n\u06db5n\u06db5n\x07".encode(), 3),  # Linux's console
        (b"\xc2\x9b5n" * 3, 3),
        (b"\x1b]0;\n" + b"x" * 5000 + b"\x9b5n\x9b5n\x07", 2),
    ],
)
def test_an_answer_like_the_last_one_does_not_end_the_waiting(
    first: bytes, answers: int, workspace: Path
) -> None:
    """A program has the terminal say early that it has answered all, while it is still at something long."""
    rules = {first: (0.0, LAST_ANSWER * answers), b"\x1b[c": (0.2, EVIL), LAST_QUESTION: (0.0, LAST_ANSWER)}
    with asking(workspace, first + b"\x1b[c", inside=True, rules=rules) as terminal:
        assert terminal.settled() == 0


def test_a_question_of_long_ago_counts_too(workspace: Path) -> None:
    rules = {b"\x1b[c": (5.5, EVIL), LAST_QUESTION: (0.0, LAST_ANSWER)}
    with asking(workspace, b"\x1b[c", inside=True, rules=rules, seconds=5.3) as terminal:
        assert terminal.settled() == 0
