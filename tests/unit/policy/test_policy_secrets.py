"""The clauses of a secret, and what contradicts them."""

from __future__ import annotations

from typing import Any

import pytest

from stockade.errors import PolicyError
from stockade.policy import Policy
from stockade.policy.secret_services import SERVICES, from_words
from stockade.policy.secrets import check_together, refuse_unjudged, rules_for

HOST = {"hosts": ["api.example.com"]}


def made(**clauses: Any) -> Any:
    return Policy(secrets={"KEY": {"from_env": "KEY", **HOST, **clauses}}).secrets["KEY"]


def test_a_secret_says_where_it_comes_from_and_where_it_goes() -> None:
    secret = made(hosts=["API.Example.com:443", "api.example.com:8443", "http://intranet.example"])
    assert secret.hosts == ("api.example.com", "api.example.com:8443", "http://intranet.example")
    assert secret.as_ == ("bearer", "basic") and secret.source == "from_env" and secret.inside == "env"
    assert made(**{"as": "header:X-Api-Key"}).as_ == ("header:x-api-key",)


@pytest.mark.parametrize(
    ("clauses", "words", "hint"),
    [
        ({"from_env": None}, "does not say where its value is", "write one of from_env"),
        ({"from_file": "/a"}, "has from_env and from_file", "write one of from_env"),
        ({"from_env": "sk-ant-123"}, "is not the name of a variable", "never the value itself"),
        ({"from_command": "pass show x", "from_env": None}, "list of words", '["pass", "show", "x"]'),
        ({"hosts": []}, "names no host", "api.example.com"),
        ({"hosts": ["*.example.com"]}, "is not one host", "each host by itself"),
        ({"hosts": ["api.example.com/v1"]}, "is not one host", "without a path"),
        ({"hosts": ["10.0.0.1"]}, "judged by the name", ""),
        ({"as": "token"}, "is not a form", "bearer"),
        ({"as": "header:Host"}, "no secret can be in this header", "bearer"),
        ({"as": "header:Authorization"}, "has a scheme before the value", "bearer"),
        ({"as": "header:a b"}, "is not the name of a header", "X-Api-Key"),
        ({"as": "query:a&b"}, "is not the name of a parameter", "query:key"),
        ({"prefix": "a b"}, "at most 32 letters", "sk-"),
        ({"inside": "stdin"}, "is not a known value", "env"),
        ({"value": "sk-ant-123"}, "there is no such key", "never has the value"),
    ],
)
def test_a_mistake_is_named_with_its_key_and_never_repeats_a_value(
    clauses: dict[str, Any], words: str, hint: str
) -> None:
    with pytest.raises(PolicyError) as caught:
        made(**clauses)
    assert words in caught.value.message and hint in caught.value.hint
    assert caught.value.message.startswith("secrets.KEY")
    assert "sk-ant-123" not in caught.value.message + caught.value.hint


@pytest.mark.parametrize("name", ["PATH", "a-b", "1A", "x" * 65])
def test_a_secret_is_called_as_a_variable(name: str) -> None:
    with pytest.raises(PolicyError, match=r"secrets\."):
        Policy(secrets={name: {"from_env": "KEY", **HOST}})


@pytest.mark.parametrize(
    ("clauses", "words"),
    [
        ({"net": ["api.example.com"]}, "no rule of net is about requests to this host"),
        ({"net": ["GET https://other.example/**"]}, "no rule of net is about requests"),
        ({"net": ["GET http://api.example.com/**"]}, "no rule of net is about requests"),
        ({"net": "open"}, "passes requests that Stockade does not see"),
        ({"net": ["* https://api.example.com/**"], "pass_env": ["KEY"]}, "the program gets this variable"),
        ({"net": ["* https://api.example.com/**"], "env": {"KEY": "x"}}, "env sets the variable KEY too"),
    ],
)
def test_what_contradicts_a_secret_is_refused(clauses: dict[str, Any], words: str) -> None:
    policy = Policy(secrets={"KEY": {"from_env": "KEY", **HOST}}, **clauses)
    with pytest.raises(PolicyError, match=words):
        check_together(policy.secrets, policy.net, policy.env, policy.pass_env)


@pytest.mark.parametrize(
    ("rules", "hint"),
    [
        (["api.example.com:8080"], '"* https://api.example.com:8080/**"'),
        (["api.example.com:80"], '"* http://api.example.com/**"'),
        (["api.example.com:80,8080"], '"* http://api.example.com/**", one for each port'),
        (["tcp://api.example.com:22"], '"* https://api.example.com:22/**"'),
        (["*.example.com:8080"], '"* https://*.example.com:8080/**", or deny this host there: "!api.'),
        (["*.example.com:80,8080", "!api.example.com:80"], '"* https://*.example.com:8080/**", or'),
        (["*:80"], 'deny this host there: "!api.example.com:80"'),
        (["udp://api.example.com:123"], "leave it out: no rule looks into datagrams"),
        (["udp://*.example.com:123"], 'deny this host there: "!api.example.com:123"'),
    ],
)
def test_a_rule_that_is_not_judged_is_refused_for_the_host_of_a_secret(rules: list[str], hint: str) -> None:
    policy = Policy(
        net=["* https://api.example.com/**", *rules], secrets={"KEY": {"from_env": "KEY", **HOST}}
    )
    with pytest.raises(PolicyError, match=r"api\.example\.com gets secrets\.KEY") as caught:
        check_together(policy.secrets, policy.net, policy.env, policy.pass_env)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "rules",
    [
        ["other.example.com:8080", "tcp://db.example.com:5432", "*.api.example.com:80", "ask"],
        ["*.example.com:80,8080", "!api.example.com:80,8080"],
        ["*:80", "!api.example.com"],
        ["* http://*.example.com/**", "* https://api.example.com:8443/**"],
    ],
)
def test_rules_beside_the_host_of_a_secret_are_accepted(rules: list[str]) -> None:
    policy = Policy(
        net=["* https://api.example.com/**", *rules], secrets={"KEY": {"from_env": "KEY", **HOST}}
    )
    refuse_unjudged(policy.secrets, policy.net)


def test_a_narrow_rule_for_requests_is_enough() -> None:
    rules = ("POST https://api.example.com/v1/**",)
    policy = Policy(net=rules, secrets={"KEY": {"from_env": "KEY", **HOST}})
    check_together(policy.secrets, policy.net, policy.env, policy.pass_env)
    assert rules_for(["api.example.com"], rules) == []
    assert rules_for(["api.example.com"], ()) == ["* https://api.example.com/**"]


@pytest.mark.parametrize(
    ("rule", "hint"),
    [
        ("api.example.com", "leave the rule out"),
        ("udp://api.example.com:443", "leave the rule out"),
        ("*.example.com", "name the other hosts instead"),
        ("*", "name the other hosts instead"),
    ],
)
def test_the_rule_that_a_secret_of_the_command_line_brings_beside_a_plain_one(rule: str, hint: str) -> None:
    with pytest.raises(PolicyError, match=r"--secret allows requests to api\.example\.com") as caught:
        rules_for(["api.example.com"], ["other.example", rule])
    assert caught.value.hint == hint
    assert rules_for(["api.example.com:8443"], [rule]) == ["* https://api.example.com:8443/**"]


def test_the_short_form_knows_common_services() -> None:
    assert from_words(["KEY@api.example.com", "KEY@b.example"]) == {
        "KEY": {"from_env": "KEY", "hosts": ["api.example.com", "b.example"]}
    }
    known = from_words(["ANTHROPIC_API_KEY"])["ANTHROPIC_API_KEY"]
    assert known["hosts"] == ["api.anthropic.com"] and "header:x-api-key" in known["as"]
    for name in SERVICES:
        assert Policy(secrets=from_words([name])).secrets[name].hosts


@pytest.mark.parametrize("word", ["KEY", "@host", "KEY@", "KEY=sk-ant-123@a.example"])
def test_a_short_form_without_a_host_is_refused(word: str) -> None:
    with pytest.raises(PolicyError) as caught:
        from_words([word])
    assert "sk-ant-123" not in caught.value.message + caught.value.hint


def test_a_secret_is_in_the_table_and_the_text_of_a_policy_and_reads_back() -> None:
    policy = Policy(secrets={"KEY": {"from_env": "KEY", **HOST, "as": ["query:key"]}})
    assert "[secrets.KEY]" in policy.to_toml() and 'as = ["query:key"]' in policy.to_toml()
    assert Policy.from_toml(policy.to_toml()) == policy
    assert policy.hash != Policy().hash
