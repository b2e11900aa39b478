"""How published ports are written."""

from __future__ import annotations

import random

import pytest

from stockade.errors import PolicyError
from stockade.runs.network.published_ports import PublishedPort, parse_all, parse_published


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8080", ("127.0.0.1", 8080, 8080)),
        ("8080:80", ("127.0.0.1", 8080, 80)),
        ("0:80", ("127.0.0.1", 0, 80)),
        ("0.0.0.0:8080:80", ("0.0.0.0", 8080, 80)),
        ("[::1]:8080:80", ("::1", 8080, 80)),
        ("[0:0:0:0:0:0:0:1]:8080:80", ("::1", 8080, 80)),
    ],
)
def test_the_forms(text: str, found: tuple[str, int, int]) -> None:
    assert parse_published(text) == PublishedPort(*found)
    assert parse_published(str(parse_published(text))) == parse_published(text)


@pytest.mark.parametrize(
    "text",
    [
        *("", "0", "x", ":", "8080:", ":80", "-1:80", "8080:80:90:100", "80:80 ", "65536:80", "1e3:80"),
        *("8080:80/udp", "\u0668\u0660:80", "::1:80:80", "[::1]", "[::1]:80", "[::1]80:80"),
        *("[127.0.0.1]:80:80", "127.1:80:80", "example.com:80:80"),
    ],
)
def test_other_forms_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(PolicyError) as raised:
        parse_published(text)
    assert raised.value.message.startswith("publish = ") and raised.value.hint


def test_any_text_is_a_port_or_refused() -> None:
    chance = random.Random(18)
    for _ in range(3000):
        text = "".join(chance.choices("0123456789:[].abcf-x ", k=chance.randint(0, 25)))
        try:
            assert 1 <= parse_published(text).port <= 65535
        except PolicyError:
            continue


def test_the_same_inside_may_be_published_twice() -> None:
    assert len(parse_all(["8080:80", "8081:80", "0:80", "0:80"], ())) == 4
