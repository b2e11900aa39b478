"""Which rules are in force after `net.allow` and `net.deny`."""

from __future__ import annotations

import pytest

from stockade.errors import PolicyError
from stockade.runs.network.egress_changes import with_allowed, with_denied

RULES = ("api.example.com", "*.wild.example:443")


def allowed(*asked: str, rules: tuple[str, ...] = RULES, own: tuple[str, ...] = RULES) -> tuple[str, ...]:
    return with_allowed(rules, asked, own)


def test_rules_are_added_in_their_one_spelling_and_once() -> None:
    assert allowed("WWW.Example.com:443,80", "api.example.com") == (*RULES, "www.example.com")


def test_denials_are_added_for_every_protocol() -> None:
    assert with_denied(RULES, ("api.example.com", "tcp://db.example.com:5432", "10.0.0.0/8")) == (
        *RULES,
        "!api.example.com",
        "!db.example.com:5432",
        "!10.0.0.0/8",
    )


def test_a_denial_is_taken_back_by_the_same_words() -> None:
    rules = with_denied(RULES, ("api.example.com", "db.example.com:5432"))
    assert allowed("api.example.com", rules=rules) == (*RULES, "!db.example.com:5432")
    assert allowed("tcp://db.example.com:5432", rules=rules) == (
        *RULES,
        "!api.example.com",
        "tcp://db.example.com:5432",
    )


def test_a_denial_of_the_policy_stays() -> None:
    own = (*RULES, "!ads.example.com")
    with pytest.raises(PolicyError, match=r"!ads\.example\.com denies it"):
        allowed("ads.example.com", rules=own, own=own)


@pytest.mark.parametrize(
    ("denial", "asked"),
    [
        ("*.example.com", "ads.example.com:443"),
        ("*.example.com", "*.ads.example.com"),
        ("*.example.com", "*.example.com:443"),
        ("10.0.0.0/8:1-9000", "10.1.0.0/16"),
    ],
)
def test_a_rule_that_would_allow_nothing_is_refused(denial: str, asked: str) -> None:
    with pytest.raises(PolicyError, match="would allow nothing"):
        allowed(asked, rules=with_denied((), (denial,)), own=())


def test_a_rule_that_is_denied_in_part_is_not() -> None:
    rules = with_denied((), ("ads.example.com", "api.example.com:80"))
    assert allowed("*.example.com", "api.example.com", rules=rules, own=())[-2:] == (
        "*.example.com",
        "api.example.com",
    )


@pytest.mark.parametrize(
    "asked", ["", "https://example.com/", "!example.com", "*.", "host:0", 443, None, b"x"]
)
def test_what_is_no_rule_is_refused(asked: str) -> None:
    with pytest.raises(PolicyError) as raised:
        allowed(asked)
    assert raised.value.hint


def test_too_many_rules_and_ports_are_refused() -> None:
    with pytest.raises(PolicyError, match="at most 256"):
        allowed(*(f"n{number}.example.com" for number in range(260)))
    with pytest.raises(PolicyError, match="at most 64"):
        allowed("www.example.com:9000-9062")
    full = tuple(f"n{number}.example.com" for number in range(256))
    assert len(with_denied(full, [f"n{number}.example.com" for number in range(256)])) == 512
    with pytest.raises(PolicyError, match="at most 512"):
        with_denied(full, [f"d{number}.example.com" for number in range(257)])
