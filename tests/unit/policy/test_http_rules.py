"""Rules for HTTP requests: which requests they match, in every way in which a server may read them."""

from __future__ import annotations

import pytest

from stockade import Policy
from stockade.errors import PolicyError
from stockade.policy.http_rules import AmbiguousTargetError, covers, read_target
from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import NetRule, parse_rule
from stockade.runs.network.egress_changes import with_allowed

ALLOWED = (
    ("GET https://a.example/v1/**", "GET", "/v1"),
    ("GET https://a.example/v1/**", "GET", "/v1/"),
    ("GET https://a.example/v1/**", "GET", "/v1/a/b?c=d"),
    ("GET https://a.example/v1/**", "GET", "/v1/@scope%2fname"),
    ("GET https://a.example/v1/**", "GET", "/v1/a;b=c"),
    ("GET https://a.example/v1/**", "GET", "/v%31/a"),
    ("GET,POST https://a.example/*/x", "POST", "/v1/x"),
    ("* https://a.example/**", "PROPFIND", "/"),
    ("GET https://a.example/", "GET", "/"),
    ("GET https://a.example/**/info/refs", "GET", "/a/b.git/info/refs"),
    ("GET https://a.example/*.git/**", "GET", "/b.git/info/refs"),
    ("GET https://a.example/a%20b", "GET", "/a%20b"),
    ("GET https://a.example/q?page=*&x=1", "GET", "/q?x=1&page=7"),
    ("GET https://a.example/q?", "GET", "/q"),
)
REFUSED = (
    ("GET https://a.example/v1/**", "POST", "/v1/a"),
    ("GET https://a.example/v1/**", "GET", "/v10"),
    ("GET https://a.example/v1/**", "GET", "/V1/a"),
    ("GET https://a.example/*/x", "GET", "/a/b/x"),
    ("GET https://a.example/*/x", "GET", "//x"),
    # A server that decodes %2F, merges slashes or cuts off parameters would see another path.
    ("GET https://a.example/*/x", "GET", "/a%2Fb/x"),
    ("GET https://a.example/*/x", "GET", "/a%5Cb/x"),
    ("GET https://a.example/*/x", "GET", "/a%252Fb/x"),
    ("GET https://a.example/v1/*", "GET", "/v1//"),
    ("GET https://a.example/q?page=*", "GET", "/q"),
    ("GET https://a.example/q?page=*", "GET", "/q?page=1&page=2"),
    ("GET https://a.example/q?page=*", "GET", "/q?page=1&admin=1"),
    ("GET https://a.example/q?page=1", "GET", "/q?page=1;x=2"),
    ("GET https://a.example/q?", "GET", "/q?x"),
)
DENIED = (
    "/admin",
    "/admin/",
    "/Admin/x",
    "/%61dmin",
    "/admin%2Fx",
    "/admin;x/y",
    "//admin",
    "/admin%5Cx",
)
AMBIGUOUS = (
    "/v1/../admin",
    "/v1/./x",
    "/v1/%2e%2e/admin",
    "/v1/..%2fadmin",
    "/v1/..%5cadmin",
    "/v1/%252e%252e/admin",
    "/v1/..;/admin",
    "/v1/..;x=y/admin",
    "/v1/%2e%2e;x/admin",
    "/v1/%c0%ae%c0%ae/admin",
    "/v1/a%00",
    "/v1/a%0d%0aX: y",
    "/v1/a%",
    "/v1/a%zz",
    "/v1/a b",
    "/v1/a\\b",
    "/v1/\xe9",
    "v1",
    "*",
    "",
    "/v1?a b",
    "/" + "a" * 20000,
)


def decided(rule: str | tuple[str, ...], method: str, target: str) -> bool:
    texts = (rule,) if isinstance(rule, str) else rule
    rules: list[NetRule] = [parse_rule(text) for text in texts]
    return RuleSet(rules).for_request("a.example", 443, method, read_target(target)).allowed


@pytest.mark.parametrize(("rule", "method", "target"), ALLOWED)
def test_a_rule_allows_what_it_says(rule: str, method: str, target: str) -> None:
    assert decided(rule, method, target)


@pytest.mark.parametrize(("rule", "method", "target"), REFUSED)
def test_a_rule_allows_nothing_that_a_server_could_read_otherwise(
    rule: str, method: str, target: str
) -> None:
    assert not decided(rule, method, target)


@pytest.mark.parametrize("target", DENIED)
def test_a_rule_that_denies_holds_in_every_reading(target: str) -> None:
    assert not decided(("* https://a.example/**", "!GET https://a.example/admin/**"), "GET", target)
    assert decided(("* https://a.example/**", "!GET https://a.example/admin/**"), "POST", target)


@pytest.mark.parametrize("target", AMBIGUOUS)
def test_what_no_two_servers_read_alike_is_refused(target: str) -> None:
    with pytest.raises(AmbiguousTargetError):
        read_target(target)


@pytest.mark.parametrize(
    ("wide", "narrow", "inside"),
    [
        ("* https://a.example/**", "GET https://a.example/x", True),
        ("GET https://a.example/**", "* https://a.example/x", False),
        ("GET https://a.example/v1/**", "GET https://a.example/v1", True),
        ("GET https://a.example/v1/**", "GET https://a.example/v1/*/x", True),
        ("GET https://a.example/v1/*", "GET https://a.example/v1/x", True),
        ("GET https://a.example/v1/*", "GET https://a.example/v1/x*", True),
        ("GET https://a.example/v1/*", "GET https://a.example/v1/**", False),
        ("GET https://a.example/**/x", "GET https://a.example/a/b/x", True),
        ("GET https://a.example/**/x", "GET https://a.example/**", False),
        ("GET https://a.example/x*", "GET https://a.example/*", False),
        ("GET https://a.example/x?a=1", "GET https://a.example/x", False),
        ("GET https://a.example/x", "GET https://a.example/x?a=1", True),
        ("GET http://a.example/x", "GET https://a.example/x", False),
    ],
)
def test_one_rule_is_within_another(wide: str, narrow: str, inside: bool) -> None:
    one, other = parse_rule(wide).http, parse_rule(narrow).http
    assert one is not None and other is not None
    assert covers(one, other) is inside


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("POST,GET https://API.Example.COM:443/a", "GET,POST https://api.example.com/a"),
        ("GET  https://a.example/a", "GET https://a.example/a"),
        ("GET http://a.example:80/%7ea", "GET http://a.example/~a"),
        ("!* https://*.a.example:8443/**", "!* https://*.a.example:8443/**"),
        ("GET https://a.example/?b=1&a=*", "GET https://a.example/?a=*&b=1"),
    ],
)
def test_each_rule_has_one_spelling(written: str, text: str) -> None:
    assert parse_rule(written).text == text
    assert parse_rule(text).text == text


@pytest.mark.parametrize(
    ("written", "meant"),
    [("GTE", "GET"), ("GET,PSOT", "POST"), ("!DELET", "DELETE"), ("PROPFNID", "PROPFIND"), ("PO", "POST")],
)
def test_a_mistyped_method_is_refused(written: str, meant: str) -> None:
    with pytest.raises(PolicyError, match=f"is not a known method\nhint: did you mean {meant}"):
        Policy(net=["* https://a.example/**", f"{written} https://a.example/v1/**"])
    with pytest.raises(PolicyError, match=f"did you mean {meant}"):
        with_allowed((), [f"{written} https://a.example/v1/**".removeprefix("!")], ())


@pytest.mark.parametrize("method", ["GET", "PROPFIND", "MKCALENDAR", "M-SEARCH", "PURGE", "BAN", "FETCH_ALL"])
def test_registered_methods_and_a_servers_own_are_taken(method: str) -> None:
    rule = f"{method} https://a.example/v1/**"
    assert Policy(net=[rule]).net == (rule,)
