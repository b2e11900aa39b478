"""Rules for HTTP requests: which requests they match, in every way in which a server may read them."""

from __future__ import annotations

import contextlib
import posixpath
import re
from collections.abc import Callable
from random import Random
from urllib.parse import unquote

import pytest

from stockade import Policy
from stockade.errors import PolicyError
from stockade.policy.http_rules import covers, matches
from stockade.policy.http_targets import MOST_WORK, AmbiguousTargetError, read_target
from stockade.policy.net_errors import NetRuleError
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
    ("GET https://a.example/v1/**", "GET", "/v1/what%3F"),
    ("GET https://a.example/%C3%A9/*", "GET", "/%c3%a9/x"),
    ("GET https://a.example/100%25", "GET", "/100%25"),
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
    # A server that decodes %3F or %23 first ends the path there, and begins a query.
    ("GET https://a.example/*/x", "GET", "/a%3Fb/x"),
    ("GET https://a.example/*/x", "GET", "/a%2523b/x"),
    ("GET https://a.example/*?page=*", "GET", "/q%3Fadmin=1?page=1"),
    ("GET https://a.example/*?page=*", "GET", "/q%23?page=1"),
    ("GET https://a.example/*?", "GET", "/q%3Fadmin=1"),
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
    "/admin%3Fx",
    "/admin%23/x",
    "/admin%253Fx",
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
    "/v1/%e0%80%ae%e0%80%ae/admin",
    "/v1/%f0%80%80%ae%f0%80%80%ae/admin",
    "/v1/%80",
    "/v1/%ed%a0%80",
    "/v1/%e9",
    "/v1/%25e0%2580%25ae",
    "/v1/%c3%25a9",
    "/v1/..%3Fx",
    "/v1/%2e%2e%23",
    "/v1/%252525252525252e",
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


@pytest.mark.parametrize(
    ("denied", "target"),
    [
        ("/admin", "/admin/"),
        ("/admin", "/Admin//"),
        ("/admin", "/admin%2F"),
        ("/admin", "/admin%3F"),
        ("/admin/", "/admin"),
        ("/admin/*", "/admin/x/"),
        ("/", "/"),
        ("/%C3%A9/**", "/%C3%A9%2Fx"),
        ("/%C3%A9%41/**", "/%c3%a9a%2Fx"),
        ("/q?admin=1", "/q%3Fadmin=1"),
    ],
)
def test_a_rule_that_denies_means_what_servers_take_for_the_same_path(denied: str, target: str) -> None:
    rules = ("* https://a.example/**", f"!GET https://a.example{denied}")
    assert decided(rules, "GET", "/other")
    assert not decided(rules, "GET", target)


#: What some server does to a path before it looks for what is there.
SERVERS: tuple[Callable[[str], str], ...] = (
    lambda path: unquote(path, "latin-1"),
    lambda path: unquote(unquote(path, "latin-1"), "latin-1"),
    lambda path: re.split("(?i)[?#]|%3f|%23", path)[0],
    lambda path: re.sub("/+", "/", path),
    lambda path: "/".join(segment.partition(";")[0] for segment in path.split("/")),
    lambda path: path.replace("\\", "/"),
    posixpath.normpath,
)
PIECES = (
    *("a", "admin", "ADMIN", "adm%69n", "/", "%2F", "%252F", "%5C", "%255c", "..", ".", "%2e", "%252e"),
    *(";", "%3B", "%3F", "%253F", "%23", "%61", "%2561", "%20", "%c3%a9", "%25", "%2525"),
)


def test_no_server_finds_behind_an_allowed_path_what_the_rules_do_not_allow() -> None:
    random, allowed = Random(5), 0
    denial = ("* https://a.example/**", "!GET https://a.example/admin")
    for _ in range(4000):
        pieces = [random.choice(PIECES) for _ in range(random.randint(1, 4))]
        steps = random.sample(SERVERS, random.randint(1, 5))
        for before, after, rules, pattern in (
            ("/", "", denial, "(?i)(?!/admin/?$).*"),
            ("/v1/", "/x", ("GET https://a.example/v1/*/x",), "/v1/[^/]+/x"),
        ):
            text = read = before + "".join(pieces) + after
            try:
                if not decided(rules, "GET", text):
                    continue
            except AmbiguousTargetError:
                continue
            allowed += 1
            for step in steps:
                read = step(read)
            assert re.fullmatch(pattern, read, re.DOTALL), (text, read)
    assert allowed > 2000


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/a%2Fb", "in different ways"),
        ("/a%253Fb", "in different ways"),
        ("/a%23b", "in different ways"),
        ("/a;b", "in different ways"),
        ("/a%2A", "is a wildcard"),
        ("/%e9", "not UTF-8"),
        ("/a%0A", "control character"),
    ],
)
def test_a_path_that_no_server_reads_for_certain_is_no_rule(path: str, words: str) -> None:
    for before in ("", "!"):
        with pytest.raises(NetRuleError, match=words):
            parse_rule(f"{before}GET https://a.example{path}")


LONG = (
    ("/" + "a/" * 8190, [f"!GET https://a.example/**/a/a/a/a/b{number}" for number in range(255)]),
    ("/" + "a/" * 8190, ["!GET https://a.example/**/" + "a/" * 200 + "b"]),
    ("/?" + "a=1&" * 4090, [f"!GET https://a.example/?a=*&b={number}" for number in range(255)]),
    ("/" + "a" * 16000, ["!GET https://a.example/" + "*a" * 200 + f"b{number}" for number in range(255)]),
    ("/" + "%2F" * 5000, [f"!GET https://a.example/**/{number}" for number in range(255)]),
)


@pytest.mark.parametrize(("text", "denials"), LONG)
def test_the_work_that_one_request_makes_is_bounded(text: str, denials: list[str]) -> None:
    rules = RuleSet([parse_rule(one) for one in ("* https://a.example/**", *denials)])
    target = read_target(text)
    assert len(target.readings) <= 24
    with contextlib.suppress(AmbiguousTargetError):
        for method in ("GET", "POST") * 1000:
            assert rules.for_request("a.example", 443, method, target).allowed
    assert MOST_WORK - 16384 < target.work < MOST_WORK + 16384


def test_ordinary_requests_are_far_from_the_bound() -> None:
    denials = [f"!GET https://a.example/**/{number}/**/x*y" for number in range(255)]
    rules = RuleSet([parse_rule(one) for one in ("* https://a.example/**", *denials)])
    target = read_target("/api/v4/projects/group%2Fproject/repository/files/src%2Fmain.py/raw?ref=main")
    assert rules.for_request("a.example", 443, "GET", target).allowed
    assert target.work < MOST_WORK / 5


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
        # The narrow rule allows /a%20b, and the wide one does not in the reading "a b".
        ("GET https://a.example/*20b", "GET https://a.example/a%20b", False),
        ("GET https://a.example/a%25*", "GET https://a.example/a%2520b", False),
        ("GET https://a.example/a*b", "GET https://a.example/a%20b", True),
    ],
)
def test_one_rule_is_within_another(wide: str, narrow: str, inside: bool) -> None:
    one, other = parse_rule(wide).http, parse_rule(narrow).http
    assert one is not None and other is not None
    assert covers(one, other) is inside


def test_a_rule_within_another_allows_and_denies_nothing_beyond_it() -> None:
    random = Random(7)
    words = ("a", "A", "b", "*", "a*", "*a", "**", "a%20b", "*%20*", "%C3%A9", "")
    letters = ("a", "A", "b", "aa", "a%20b", "a%2520b", "%C3%A9", "%c3%89", "a%2Fb", "a;b", "a%3Fb", "")
    covered = 0
    for _ in range(6000):
        texts = ["/".join(random.choice(words) for _ in range(random.randint(1, 3))) for _ in range(2)]
        try:
            wide, narrow = (parse_rule(f"GET https://a.example/{text}").http for text in texts)
        except NetRuleError:
            continue
        assert wide is not None and narrow is not None
        if not covers(wide, narrow):
            continue
        covered += 1
        for _ in range(8):
            text = "/" + "/".join(random.choice(letters) for _ in range(random.randint(1, 3)))
            target = read_target(text)
            for deny in (False, True):
                within = matches(wide, "GET", target, deny=deny)
                assert within or not matches(narrow, "GET", target, deny=deny), (texts, text, deny)
    assert covered > 300


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
