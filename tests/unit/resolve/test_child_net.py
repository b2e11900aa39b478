"""The rules of `net` that a program inside may ask for a child: within its own, never more."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade.linux.user import Caller
from stockade.policy import Policy
from stockade.resolve.child_policy import ChildRefusedError, child
from stockade.resolve.resolution import resolve
from stockade.resolve.resolved import ResolvedPolicy

Ask = Callable[..., Policy]


@pytest.fixture
def ask(tmp_path: Path, stockade_home: Path) -> Iterator[Ask]:
    """Asks for a child of a program with the given network and variables."""
    made: list[ResolvedPolicy] = []

    def make(parent: Any, asked: Any, env: dict[str, str] | None = None) -> Policy:
        home = str(tmp_path)
        caller = Caller(os.getuid(), os.getgid(), "me", "us", home, home, {})
        policy = Policy(net=parent, delegate=True, env=env or {})
        made.append(resolve(policy, caller, str(stockade_home)))
        return child({"net": asked}, made[-1], "native", {}).policy

    yield make
    for one in made:
        one.close()


def test_a_child_may_have_fewer_hosts(ask: Ask) -> None:
    assert ask(["*.example", "!ads.example"], ["a.example:443", "!ads.example"]).net == (
        "a.example:443",
        "!ads.example",
    )
    assert ask("open", ["a.example"]).net == ("a.example",)
    assert ask(["a.example"], []).net == ask(["a.example"], "none").net == ()


@pytest.mark.parametrize(
    ("parent", "asked", "words"),
    [
        (["a.example"], ["b.example"], 'net = "b.example"'),
        (["a.example"], ["a.example:22"], 'net = "a.example:22"'),
        (["a.example"], ["tcp://a.example:443"], 'net = "tcp://a.example:443"'),
        (["*.example", "!ads.example"], ["*.example"], 'without net = "!ads.example"'),
        (["a.example"], "open", "the host's network"),
        ([], ["a.example"], 'net = "a.example"'),
        (["a.example"], ["https://a.example"], "net[0]"),
        (["a.example"], 443, "net = 443"),
        (["a.example"], {"a": 1}, "net = "),
    ],
)
def test_a_child_never_has_more(ask: Ask, parent: Any, asked: Any, words: str) -> None:
    with pytest.raises(ChildRefusedError) as caught:
        ask(parent, asked)
    assert words in caught.value.message


def test_a_child_with_rules_gets_the_certificates_of_its_parent_and_no_proxy(ask: Ask) -> None:
    env = {"SSL_CERT_FILE": "/etc/ssl/own.pem", "https_proxy": "http://proxy:3128"}
    assert dict(ask("open", ["a.example"], env).env) == {"SSL_CERT_FILE": "/etc/ssl/own.pem"}
    assert dict(ask("open", "open", env).env) == env
    assert dict(ask("open", [], env).env) == {}
