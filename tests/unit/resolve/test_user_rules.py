"""A rule is added to the user's policy, and everything else in it stays."""

from __future__ import annotations

import tomllib

import pytest

from stockade.errors import PolicyError
from stockade.resolve.user_rules import with_rule

RULE = "api.example.com:443"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f'net = ["{RULE}"]\n'),
        ("# mine\n[limits]\nwall = 5\n", f'net = ["{RULE}"]\n# mine\n[limits]\nwall = 5\n'),
        ("net = []\n", f'net = ["{RULE}"]\n'),
        ('net = "ask" # yes\n', f'net = ["{RULE}", "ask"] # yes\n'),
        ('net=["a.example"]', f'net = ["{RULE}", "a.example"]'),
        ('net = [ # why\n  "a.example", # [\n]\n', f'net = ["{RULE}",  # why\n  "a.example", # [\n]\n'),
        (f'net = ["{RULE}"]', f'net = ["{RULE}"]'),
        ('profile = "dev"\nnet = [\n]\n', f'profile = "dev"\nnet = ["{RULE}"]\n'),
    ],
)
def test_the_rule_is_added(before: str, after: str) -> None:
    assert with_rule(before, RULE) == after
    assert RULE in tomllib.loads(after)["net"]


@pytest.mark.parametrize(
    "text",
    [
        'net = "open"',
        'net = "none"',
        "net = [",
        '"net" = ["a.example"]',
        'x = """\nnet = [\n"""\nnet= ["a"]',
        "net = 5",
    ],
)
def test_what_cannot_be_changed_safely_stays(text: str) -> None:
    with pytest.raises(PolicyError, match="is left as it is") as found:
        with_rule(text, RULE)
    assert RULE in (found.value.hint or "")
