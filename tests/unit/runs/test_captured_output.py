"""What is kept of an output: the first or the last bytes, however it comes in pieces."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from stockade.runs.io.captured_output import CapturedOutput


@hypothesis.given(pieces=st.lists(st.binary(max_size=20), max_size=20), limit=st.integers(1, 30))
def test_the_beginning_or_the_end_is_kept_up_to_the_limit(pieces: list[bytes], limit: int) -> None:
    first, last = CapturedOutput(limit), CapturedOutput(limit, keep="end")
    for piece in pieces:
        first(piece)
        last(piece)
    whole = b"".join(pieces)
    assert (first.content, last.content) == (whole[:limit], whole[-limit:])
    assert first.truncated == last.truncated == (len(whole) > limit)
    assert first.size == last.size == len(whole)


def test_it_never_keeps_much_more_than_the_limit() -> None:
    last = CapturedOutput(1000, keep="end")
    for _ in range(1000):
        last(b"x" * 500)
        assert len(last._kept) <= 2500


def test_bytes_that_are_not_text_are_replaced() -> None:
    output = CapturedOutput(10)
    output(b"a\xff")
    assert output.text == "a\ufffd"
