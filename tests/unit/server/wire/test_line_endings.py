"""The texts of output events: one line each, whole characters, whatever the reads were."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.server.wire import line_endings
from stockade.server.wire.line_endings import EXTENSION, LineRule, LineSplitter, line_rule

PYTHON = "OpenSandbox-Python-SDK/"


@pytest.mark.parametrize(
    ("user_agent", "rule"),
    [
        (f"{PYTHON}1.1.1", "keep"),
        (f"{PYTHON}1.1.2.dev20261020", "keep"),
        (f"{PYTHON}1.2.0 (linux)", "keep"),
        (f"{PYTHON}2.0.0", "keep"),
        (f"{PYTHON}10.0.0", "keep"),
        ("stockade/0.2.0", "keep"),
        (f"{PYTHON}1.1.0", "cut"),
        (f"{PYTHON}1.1.1.dev3", "cut"),
        (f"{PYTHON}1.1.1rc1", "cut"),
        (f"{PYTHON}0.9.9", "cut"),
        (f"{PYTHON}latest", "cut"),
        ("OpenSandbox-JS-SDK/0.1.11", "cut"),
        ("OpenSandbox-Go-SDK/1.1.1", "cut"),
        ("curl/8.5.0", "cut"),
        ("", "cut"),
        (f"{PYTHON}{'9' * 5000}.0.0", "keep"),
    ],
)
def test_the_clients_version_decides(user_agent: str, rule: str) -> None:
    assert line_rule(user_agent, {}) == rule


def test_the_configuration_wins_over_the_version_and_the_sandbox_over_both() -> None:
    assert line_rule(f"{PYTHON}1.1.1", {}, "cut") == "cut"
    assert line_rule("", {}, "keep") == "keep"
    assert line_rule(f"{PYTHON}1.1.1", {EXTENSION: "cut"}, "keep") == "cut"
    assert line_rule("", {EXTENSION: "nonsense"}, "auto") == "cut"


def texts(rule: LineRule, *reads: bytes) -> list[str]:
    splitter = LineSplitter(rule)
    return [text for data in reads for text in splitter.feed(data)] + splitter.rest()


def test_kept_endings_give_the_output_back() -> None:
    assert texts(LineRule.KEEP, b"a\n\nb\r\nc\rd") == ["a\n", "\n", "b\r\n", "c\r", "d"]


def test_cut_endings_leave_lines_and_a_newline_for_an_empty_one() -> None:
    assert texts(LineRule.CUT, b"a\n\nb\r\nc\rd") == ["a", "\n", "b", "c", "d"]


def test_an_ending_that_is_split_over_reads_is_one_ending() -> None:
    assert texts(LineRule.CUT, b"a\r", b"\nb\n") == ["a", "b"]
    assert texts(LineRule.KEEP, b"a\r", b"\nb\n") == ["a\r\n", "b\n"]


def test_a_character_that_is_split_over_reads_stays_whole() -> None:
    data = "é€𝄞".encode()
    assert texts(LineRule.KEEP, *(data[at : at + 1] for at in range(len(data)))) == ["é€𝄞"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert texts(LineRule.KEEP, b"a\xffb\n\xe2\x82\nc") == ["a�b\n", "�\n", "c"]


def test_an_unfinished_line_comes_at_the_end() -> None:
    splitter = LineSplitter(LineRule.KEEP)
    assert splitter.feed(b"name? ") == []
    assert splitter.rest() == ["name? "]
    assert splitter.rest() == []


@pytest.mark.parametrize("rule", LineRule)
@given(
    reads=st.lists(
        st.lists(st.sampled_from([b"a", b"\r", b"\n", b"\xe2\x82\xac", b"\xff", b"xyz", b"\xac"])).map(
            b"".join
        )
    ),
    longest=st.integers(4, 12),
)
def test_the_texts_do_not_depend_on_the_reads(rule: LineRule, reads: list[bytes], longest: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_endings, "LONGEST_TEXT", longest)
        together = b"".join(reads)
        singly = [together[at : at + 1] for at in range(len(together))]
        found = texts(rule, *reads)
        assert found == texts(rule, together) == texts(rule, *singly)
        assert all(len(text.encode()) <= 3 * longest + 2 for text in found)
        if (
            rule is LineRule.KEEP
            and b"\xff" not in together
            and b"\xac" not in together.replace(b"\xe2\x82\xac", b"")
        ):
            assert "".join(found).encode() == together


def test_a_long_line_is_several_texts_and_memory_stays_bounded() -> None:
    splitter = LineSplitter(LineRule.KEEP)
    found = [text for _ in range(200) for text in splitter.feed("€".encode() * 10_000)]
    assert len(splitter._pending) <= line_endings.LONGEST_TEXT + 4
    assert set("".join([*found, *splitter.rest()])) == {"€"}
    assert max(len(text.encode()) for text in found) <= line_endings.LONGEST_TEXT
