"""Which addresses of a name are dialled, and in which order."""

from __future__ import annotations

import pytest

from stockade.egress.dialer import choose_addresses, interleave, reason_for
from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import parse_rule


def rules(*texts: str) -> RuleSet:
    return RuleSet([parse_rule(text) for text in texts])


def test_public_addresses_may_be_dialled_in_their_order_once_each() -> None:
    found = ["1.1.1.1", "2606:4700::1111", "1.0.0.1", "1.1.1.1"]
    choice = choose_addresses(found, 443, rules("one.one:443"))
    assert choice.addresses == ("1.1.1.1", "2606:4700::1111", "1.0.0.1")
    assert choice.refusal is None


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("10.1.2.3", "private address"),
        ("127.0.0.1", "loopback address"),
        ("::1", "loopback address"),
        ("169.254.169.254", "metadata address"),
        ("fe80::1", "link-local address"),
        ("64:ff9b::a00:1", "private address"),
        ("::ffff:10.0.0.1", "private address"),
    ],
)
def test_a_name_does_not_lead_into_the_hosts_networks(address: str, reason: str) -> None:
    choice = choose_addresses([address], 443, rules("evil.example:443"))
    assert choice.addresses == ()
    assert choice.refusal is not None
    assert (choice.refusal.reason, choice.refusal.denied, choice.refusal.address) == (reason, True, address)


def test_a_private_address_that_a_rule_names_for_this_port_may_be_dialled() -> None:
    choice = choose_addresses(["10.1.2.3"], 443, rules("intern.example:443", "10.1.2.0/24:443"))
    assert choice.addresses == ("10.1.2.3",)
    choice = choose_addresses(["10.1.2.3"], 80, rules("intern.example:80", "10.1.2.0/24:443"))
    assert choice.addresses == ()


def test_a_deny_rule_holds_for_what_a_name_resolves_to() -> None:
    choice = choose_addresses(["1.1.1.1", "1.0.0.1"], 443, rules("one.one:443", "!1.1.1.1"))
    assert choice.addresses == ("1.0.0.1",)
    assert choice.refusal is not None
    assert (choice.refusal.reason, choice.refusal.rule) == ("deny rule", 1)


def test_what_is_no_plain_address_is_never_dialled() -> None:
    odd = [
        "fe80::1%lo",
        "localhost",
        "0x7f.1",
        "127.1",
        "1.1.1.1 ",
        "",
        "01.1.1.1",
        "1.1.1.1\0",
        "2606:4700:0::1",
    ]
    choice = choose_addresses(odd, 443, rules("one.one:443"))
    assert choice.addresses == ()


def test_families_alternate_beginning_with_the_first() -> None:
    assert interleave(["::1", "::2", "::3", "1.1.1.1"]) == ["::1", "1.1.1.1", "::2", "::3"]
    assert interleave(["1.1.1.1", "::1", "::2"]) == ["1.1.1.1", "::1", "::2"]
    assert interleave(["1.1.1.1"]) == ["1.1.1.1"]


def test_errors_have_words() -> None:
    assert reason_for(ConnectionRefusedError(111, "")) == "connection refused"
    assert reason_for(TimeoutError()) == "timed out"
    assert reason_for(OSError(113, "")) == "unreachable"
    assert reason_for(OSError(99999, "")) == "failed"
