"""Network policies of the contract as rules of `net`."""

from __future__ import annotations

import pytest

from stockade.server.wire.errors import ApiError
from stockade.server.wire.network import (
    PLACEHOLDER,
    NetworkPolicySpec,
    NetworkRule,
    checked_policy,
    checked_rules,
    net_of,
    target_key,
)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (NetworkRule("allow", "api.example.com"), "api.example.com"),
        (NetworkRule("allow", "*.Example.com"), "*.example.com"),
        (NetworkRule("deny", "ads.example.com"), "!ads.example.com"),
        (NetworkRule("allow", "203.0.113.7", [22, 5432]), "203.0.113.7:22,5432"),
        (NetworkRule("allow", "10.0.0.0/8"), "10.0.0.0/8"),
        (NetworkRule("allow", "2001:4860::/32", [443]), "[2001:4860::/32]:443"),
    ],
)
def test_a_rule_is_one_of_net(rule: NetworkRule, text: str) -> None:
    assert text in net_of([rule])


def test_a_policy_that_allows_nothing_still_has_rules_that_can_change() -> None:
    assert net_of([]) == (PLACEHOLDER,)
    assert net_of([NetworkRule("deny", "example.com")]) == (PLACEHOLDER, "!example.com")


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1",
        "127.0.0.0/8",
        "::1",
        "0.0.0.0",
        "169.254.1.1",
        "169.254.169.254",
        "fe80::1",
        "100.100.100.200",
    ],
)
def test_this_machine_and_its_credentials_are_out_of_reach(target: str) -> None:
    with pytest.raises(ApiError) as caught:
        checked_rules([NetworkRule("allow", target)], "egress")
    assert caught.value.status == 400 and "egress[0].target" in caught.value.message
    assert checked_rules([NetworkRule("deny", target)], "egress")


@pytest.mark.parametrize(
    "target", ["not a host!", "!example.com", "*.", "http://example.com", "::ffff:127.0.0.1"]
)
def test_a_target_that_is_none_is_refused_with_its_place(target: str) -> None:
    with pytest.raises(ApiError) as caught:
        checked_rules([NetworkRule("allow", "a.example"), NetworkRule("allow", target)], "egress")
    assert caught.value.status == 400 and caught.value.message.startswith("egress[1].target")


def test_of_several_rules_for_one_target_the_first_counts() -> None:
    rules = [NetworkRule("deny", "A.example"), NetworkRule("allow", "a.example.")]
    assert checked_rules(rules, "egress") == (rules[0],)
    assert target_key("A.Example.") == "a.example"


def test_everything_is_not_a_policy() -> None:
    with pytest.raises(ApiError) as caught:
        checked_policy(NetworkPolicySpec("allow"), "networkPolicy")
    assert "name the hosts" in caught.value.message
    assert checked_policy(NetworkPolicySpec(), "networkPolicy") == ()
