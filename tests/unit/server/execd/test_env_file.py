"""The file of `EXECD_ENVS`: what the SDK writes comes back, and nothing that is written does harm."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opensandbox.adapters.converter.env_entry import _escape_double_quoted

from stockade.server.execd.env_file import MOST_BYTES, MOST_NAMES, MOST_VALUE, expand, parse_env_file

HOME = {"HOME": "/root", "LANG": "C"}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("A='x'\n", {"A": "x"}),
        ("A='two\nlines $HOME \\n'\nB='y'", {"A": "two\nlines $HOME \\n", "B": "y"}),
        ('A="t\\tn\\nr\\rq\\"b\\\\"\n', {"A": 't\tn\nr\rq"b\\'}),
        ('A="\\x \\$HOME"\n', {"A": "\\x \\$HOME"}),
        ('A="$HOME/${LANG}/$NONE."\n', {"A": "/root/C/."}),
        ("A=1\nA=2\n", {"A": "2"}),
        ('A=1\nB="$A"\nA=2\n', {"A": "2", "B": "1"}),
        ('HOME=/other\nB="$HOME"', {"HOME": "/other", "B": "/other"}),
        ("A= plain text $LANG \n", {"A": "plain text C"}),
        ("export A='x'\n", {"A": "x"}),
        ("# a comment\n\nnonsense\n1A=x\nA B=x\n=x\nA='ok'\n", {"A": "ok"}),
        ("A=''\nB=\"\"\nC=\n", {"A": "", "B": "", "C": ""}),
        ("A='open\nB='x'\n", {"A": "open\nB="}),
        ("B='x'\nA='never closed\nC=y", {"B": "x", "C": "y"}),
        ('A="never closed\nC=y', {"C": "y"}),
        ("A='x' trailing\nB='y'", {"A": "x", "B": "y"}),
        ("A=nul\0byte\nB='y'", {"B": "y"}),
        ("", {}),
    ],
)
def test_entries(text: str, found: dict[str, str]) -> None:
    assert parse_env_file(text.encode(), HOME) == found


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=200))
def test_what_the_sdk_writes_comes_back(value: str) -> None:
    entry = f"K='{value}'" if "'" not in value else f'K="{_escape_double_quoted(value)}"'
    if "'" in value and "$" in value:
        return  # the SDK says itself that such a value may be expanded
    assert parse_env_file(f"A=1\n{entry}\nZ=1\n".encode(), {}) == {"A": "1", "K": value, "Z": "1"}


@given(
    st.lists(
        st.sampled_from(["A=", "B", "'", '"', "\\", "\n", "$A", "${B}", "$", "x", "\0", "export ", "é", "="])
    )
)
def test_any_text_is_parsed_and_values_can_be_set(parts: list[str]) -> None:
    for name, value in parse_env_file("".join(parts).encode(), HOME).items():
        assert name.isidentifier() and "\0" not in value


@given(st.binary(max_size=500))
def test_any_bytes_are_parsed(data: bytes) -> None:
    parse_env_file(data, HOME)


def test_bytes_that_are_no_text_stay_as_they_are() -> None:
    (value,) = parse_env_file(b"A='\xff\xe9'", {}).values()
    assert value.encode("utf-8", "surrogateescape") == b"\xff\xe9"


@pytest.mark.parametrize(
    "content",
    [
        b"A='x'\n" + b'A="$A$A$A$A$A$A$A$A"\n' * 50_000,
        b"A=" + b"x" * 100_000 + b"\n" + b'B="' + b"$A" * 400_000 + b'"\n',
        b"A='" + b"x" * (2 * MOST_BYTES),
        b'A="' + b"\\" * MOST_BYTES,
        b"K='" * 300_000,
        b'K="\\' * 200_000,
        b"".join(b"N%d=x\n" % number for number in range(100_000)),
        b"export " * 150_000,
        b" \t" * 500_000,
    ],
)
def test_a_hostile_file_costs_little(content: bytes) -> None:
    began = time.process_time()
    found = parse_env_file(content, HOME)
    assert time.process_time() - began < 3
    assert sum(map(len, found.values())) <= MOST_BYTES and len(found) <= MOST_NAMES
    assert all(len(value) <= MOST_VALUE for value in found.values())


def test_paths_are_expanded() -> None:
    assert expand("~", HOME) == "/root"
    assert expand("~/a/$LANG", HOME) == "/root/a/C"
    assert expand("/a/~b/${LANG}x", HOME) == "/a/~b/Cx"
    assert expand("~user/x", HOME) == "~user/x"
