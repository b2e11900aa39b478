"""Two texts that began as one: what was changed apart is put together, what was changed twice is not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.workspace.merge.three_way import merge3

#: Few different lines, so that they are often the same; the last may have no end.
line = st.sampled_from([b"a\n", b"b\n", b"c\r\n", b"\n", b"d\n"])
text = st.builds(
    lambda lines, end: b"".join(lines) + end, st.lists(line, max_size=12), st.sampled_from([b"", b"x"])
)


@given(text, text)
def test_a_side_that_changed_nothing_takes_the_other(base: bytes, new: bytes) -> None:
    assert merge3(base, new, base).text == new
    assert merge3(base, base, new).text == new
    assert merge3(base, new, new).text == new
    assert not merge3(base, new, base).conflicts


@given(text, text, text)
def test_both_sides_are_equal(base: bytes, one: bytes, other: bytes) -> None:
    left, right = merge3(base, one, other), merge3(base, other, one)
    assert left.text == right.text and len(left.conflicts) == len(right.conflicts)


@given(text, text, text, text, text)
def test_edits_with_a_line_between_them_both_land(a: bytes, b: bytes, c: bytes, d: bytes, end: bytes) -> None:
    a, b, c, d = (part.removesuffix(b"x") for part in (a, b, c, d))
    # Lines that are nowhere else hold the parts apart.
    base, apart = b"first\n" + a + b"one\ntwo\n" + c + b"last\n", end.removesuffix(b"x")
    ours = base.replace(b"first\n" + a + b"one\n", b"first\n" + b + b"one\n")
    theirs = base.replace(b"two\n" + c + b"last\n", b"two\n" + d + b"last\n") + apart
    assert merge3(base, ours, theirs).text == b"first\n" + b + b"one\ntwo\n" + d + b"last\n" + apart


@given(text, text, text)
def test_a_merge_is_found_again_when_it_is_merged_again(base: bytes, one: bytes, other: bytes) -> None:
    merged = merge3(base, one, other)
    if not merged.conflicts:
        assert not merge3(other, merged.text, other).conflicts
        assert merge3(other, merged.text, other).text == merged.text


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "merged"),
    [
        (b"1\n2\n3\n", b"one\n2\n3\n", b"1\n2\nthree\n", b"one\n2\nthree\n"),
        (b"1\n2\n3", b"one\n2\n3", b"1\n2\n3\n", b"one\n2\n3\n"),
        (b"1\r\n2\r\n3\r\n", b"1\r\n2\r\n3\r\n4\r\n", b"0\r\n1\r\n2\r\n3\r\n", b"0\r\n1\r\n2\r\n3\r\n4\r\n"),
        (b"", b"new\n", b"", b"new\n"),
        (b"old\n", b"", b"old\n", b""),
        (b"1\n2\n3\n", b"1\n3\n", b"1\n3\n", b"1\n3\n"),
        (b"1\n2\n3\n", b"2\n3\n", b"1\n2\n", b"2\n"),
    ],
)
def test_what_comes_of_it(base: bytes, ours: bytes, theirs: bytes, merged: bytes) -> None:
    assert merge3(base, ours, theirs).text == merged


@pytest.mark.parametrize(
    ("base", "ours", "theirs", "lines"),
    [
        (b"1\n2\n3\n", b"1\nours\n3\n", b"1\ntheirs\n3\n", ((2, 2),)),
        (b"1\n2\n3\n", b"1\nours\n3\n", b"0\n1\n2\nnew\ntheirs\n", ((3, 5),)),  # they touch
        (b"", b"ours\n", b"theirs\n", ((1, 1),)),
        (b"1\n2\n3\n", b"1\n3\n", b"1\ntheirs\n3\n", ((2, 2),)),
        (b"1\n", b"1\nours\n", b"1\ntheirs\n", ((2, 2),)),
        (b"1\n2", b"1\n2\n", b"1\ntwo", ((2, 2),)),
        (b"a\n1\n2\n3\nb\n", b"A\n1\n2\n3\nB\n", b"AA\n1\n2\n3\nBB\n", ((1, 1), (5, 5))),
    ],
)
def test_the_same_lines_are_a_conflict(
    base: bytes, ours: bytes, theirs: bytes, lines: tuple[tuple[int, int], ...]
) -> None:
    merged = merge3(base, ours, theirs)
    assert merged.conflicts == lines and not merged.text
