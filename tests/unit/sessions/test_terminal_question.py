"""What counts as an answer to a question on the terminal."""

from __future__ import annotations

import time

import pytest

from stockade.result import NetworkQuestion
from stockade.sessions.attach.terminal_question import READ_FIRST, TerminalQuestion

QUESTION = NetworkQuestion(name="api.example.com", port=443, process="cu\x1b[2Jrl (7)")


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        (b"o\r", "once"), (b"R\n", "run"), (b"w\r", "policy"), (b"n\r", "no"), (b"x\x7fo\r", "once"),
        (b"\x03", "no"), (b"\x04", "no"), (b"xo\ro\r", "once"), (b"\r\r\r", "no"), (b"oo\ror\rrr\r", "no"),
        # What a terminal sends by itself: reports of the title, the cursor, focus, and a paste.
        (b"\x1b]lr\x1b\\\r\r\r", "no"), (b"\x1b[1;1Rr\r\r\r", "no"), (b"\x1b[Ir\r\r\r", "no"),
        (b"\x1b[200~r\r\x1b[201~\r\r", "no"), ("ör\r\r\r".encode(), "no"), (b"\x1bPr\x1b\\\r\ro\r", "once"),
    ],
)  # fmt: skip
def test_an_answer_is_one_letter_and_enter(typed: bytes, answer: str) -> None:
    for pieces in ([typed], [bytes((byte,)) for byte in typed]):
        question = TerminalQuestion(QUESTION)
        for piece in pieces:
            assert b"\x1b" not in question.feed(piece)
        assert question.settled and question.wait() == answer


def test_what_was_typed_before_anyone_could_read_the_question_answers_nothing() -> None:
    question = TerminalQuestion(QUESTION)
    question.text()
    assert question.feed(b"r\rw") == b"" and not question.settled
    time.sleep(READ_FIRST)
    # The end of a line that began too early.
    question.feed(b"\r")
    assert not question.settled
    question.feed(b"o\r")
    assert question.wait() == "once"
    hasty = TerminalQuestion(QUESTION)
    hasty.text()
    hasty.feed(b"\x03")
    assert hasty.settled and hasty.wait() == "no"


def test_what_is_shown_cannot_be_obeyed_by_a_terminal() -> None:
    text = TerminalQuestion(QUESTION).text()
    assert b"\x1b" not in text and b"api.example.com:443" in text
