"""A question on the user's terminal while a program has it: what is shown, and what counts as an answer.

Nothing inside can answer. The program has a terminal of its own (see `terminal`); while a question is shown,
none of its output reaches the user's terminal, and no key reaches it. A program can make the user's terminal
type, by a query whose answer holds the program's own words, so every such answer has been read and thrown
away before the question is shown; and a line with a control character or an escape sequence in it answers
nothing. An answer is one letter and Enter. A program can connect while it sees the user type, so keys count
only once the user can have read the question.
"""

from __future__ import annotations

import threading
import time

from stockade.linux.plain_text import clean_line
from stockade.result import NetworkQuestion
from stockade.runs.options import Answer

#: How long the user may take. The egress process holds a connection for a little longer.
SECONDS = 55.0
#: How long nobody can have read the question yet: what is typed meanwhile was meant for the program.
READ_FIRST = 0.5
#: After so many lines that answer nothing, the answer is no.
TRIES = 3
LETTERS: dict[str, Answer] = {"o": "once", "r": "run", "w": "policy", "n": "no"}
_PROMPT = "  letter and Enter: "
_ENTER, _ERASE, _GIVE_UP = b"\r\n", b"\x7f\x08", b"\x03\x04"


def question_lines(question: NetworkQuestion) -> list[str]:
    """Return what the user is asked."""
    who = clean_line(question.process or "a program")
    return [
        f"stockade: {who} wants to connect to {clean_line(question.target)}, and no rule covers that.",
        "  o  allow this connection            r  allow it in this run",
        "  w  write the rule into your policy  n  refuse",
    ]


class TerminalQuestion:
    """One question, from the thread that asks to the loop that owns the terminal, and its answer back."""

    def __init__(self, question: NetworkQuestion) -> None:
        self.until = time.monotonic() + SECONDS
        self._lines = question_lines(question)
        self._shown = 0.0
        self._typed, self._void, self._tries = "", False, 0
        self._answer: Answer = "no"
        self._answered = threading.Event()

    def text(self) -> bytes:
        """Return what to show first, which is shown now."""
        self._shown = time.monotonic()
        return ("\r\n".join(self._lines) + f"\r\n{_PROMPT}").encode("ascii", "replace")

    def feed(self, data: bytes) -> bytes:
        """Take what was typed, and return what to show for it."""
        shown = ""
        early = time.monotonic() - self._shown < READ_FIRST
        for number in data:
            byte = bytes((number,))
            if early and byte not in _GIVE_UP:
                self._void = byte not in _ENTER
                continue
            if self._answered.is_set():
                break
            if byte in _ENTER:
                shown += "\r\n" + self._end_line()
            elif byte in _GIVE_UP:
                shown += "\r\n"
                self.settle("no")
            elif byte in _ERASE and not self._void:
                shown += "\b \b" if self._typed else ""
                self._typed = self._typed[:-1]
            elif 0x20 < number < 0x7F and not self._void and len(self._typed) < 20:
                self._typed += chr(number)
                shown += chr(number)
            else:
                self._void = True
        return shown.encode()

    def _end_line(self) -> str:
        answer = None if self._void else LETTERS.get(self._typed.lower())
        self._typed, self._void, self._tries = "", False, self._tries + 1
        if answer is None and self._tries < TRIES:
            return _PROMPT
        self.settle(answer or "no")
        return ""

    def settle(self, answer: Answer) -> None:
        """Answer it, unless it is answered already."""
        if not self._answered.is_set():
            self._answer = answer
            self._answered.set()

    @property
    def settled(self) -> bool:
        """Whether there is an answer."""
        return self._answered.is_set()

    def wait(self) -> Answer:
        """Wait for the answer, in the thread that asks."""
        self._answered.wait(max(0.0, self.until - time.monotonic()) + 1.0)
        self.settle("no")
        return self._answer
