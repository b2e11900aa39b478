"""A rule for every host is said in words wherever a policy is shown."""

from __future__ import annotations

import pytest

from stockade.cli import policy as policy_command
from stockade.cli.verify import network_text
from stockade.policy import Policy
from stockade.policy.net_reach import reach_text
from stockade.receipt.statement import Network, NetworkCounts
from stockade.resolve.discovery import PolicySource
from stockade.runs.prepare import warnings_before


@pytest.mark.parametrize(
    ("rules", "ports"),
    [
        (["*"], "ports 80,443"),
        (["a.example", "*:443"], "port 443"),
        (["*", "tcp://*:22,443", "udp://*:8000-8010"], "ports 22,80,443,8000-8010"),
        (["0.0.0.0/0"], "ports 80,443"),
        (["[::/0]:443", "0.0.0.0/0:22"], "ports 22,443"),
    ],
)
def test_the_words_name_the_rules_and_the_ports(rules: list[str], ports: str) -> None:
    words = reach_text(rules)
    assert words.endswith(f"the program may reach any public host on {ports}")
    assert all(f'"{rule}"' in words for rule in rules if "a.example" not in rule)
    assert warnings_before(Policy(net=rules)) == (words,)
    assert words in network_text(Network(mode="rules", rules=tuple(rules), counts=NetworkCounts()))


def test_no_other_rule_has_such_words() -> None:
    rules = [
        "*.example",
        "!*:25",
        "8.0.0.0/7",
        "!0.0.0.0/0",
        "ask",
        "* https://a.example/**",
        "what a later version writes",
        "*.x:y",
    ]
    assert reach_text(rules) == "" and reach_text("open") == "" and warnings_before(Policy(net="open")) == ()


def test_a_check_of_a_policy_says_it() -> None:
    source = PolicySource(policy=Policy(net=["*:443"]), sources=())
    assert f"WARNING: {reach_text(['*:443'])}" in policy_command._summary(source)
    assert policy_command._facts(source)["reach"] == reach_text(["*:443"])
