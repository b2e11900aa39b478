"""What the egress recorded, as decisions and denials; and the rule that a hint names."""

from __future__ import annotations

import pytest

from stockade.egress.records import REASONS, RawRecord
from stockade.result import Denial
from stockade.runs.explain.refused_connections import FAILURES, hint
from stockade.runs.network.decisions import (
    ALLOWED_BY_ADDRESS,
    LOOKED_INTO,
    MOST_DENIALS,
    REASON_TEXTS,
    decisions,
    denials,
)

RULES = ("api.example.com:443", "!ads.example.com")


def record(**fields: object) -> RawRecord:
    usual: dict[str, object] = {
        "slot": 0, "kind": "connect", "time": 1000.0, "name": "api.example.com", "address": "192.0.2.1",
        "port": 443, "verdict": "allowed", "reason": "", "rule": 0, "sent": 10, "received": 20,
        "duration": 0.5, "open": False, "times": 1,
    }  # fmt: skip
    return RawRecord(**{**usual, **fields})  # type: ignore[arg-type]


def test_a_record_becomes_a_decision_with_the_text_of_its_rule() -> None:
    (one,) = decisions([record()], RULES)
    assert (one.verdict, one.rule, one.target) == ("allowed", "api.example.com:443", "api.example.com:443")
    assert (one.sent, one.received, one.duration, one.count) == (10, 20, 0.5, 1)


@pytest.mark.parametrize("rule", [-1, 2, 1 << 30])
def test_a_rule_that_does_not_exist_is_none(rule: int) -> None:
    assert decisions([record(rule=rule)], RULES)[0].rule == ""


def test_what_a_terminal_would_obey_does_not_pass() -> None:
    (one,) = decisions([record(name="\x1b[2Ja\nb\u202e", reason="\x07", port=-5, sent=-1, times=0)], RULES)
    assert one.name == "?[2Ja?b?" and one.reason == "?" and one.port == 0
    assert (one.sent, one.count) == (0, 1)


def test_an_address_of_ipv6_is_in_brackets() -> None:
    (one,) = decisions([record(name="", address="2001:db8::1")], RULES)
    assert one.target == "[2001:db8::1]:443"


def denied(**fields: object) -> Denial:
    usual = {"verdict": "denied", "reason": "no rule", "rule": -1, "name": "evil.example"}
    (found,) = denials(decisions([record(**{**usual, **fields})], RULES))
    return found


def test_a_denial_names_the_rule_that_would_allow_it() -> None:
    assert denied().hint == "--net evil.example:443"
    assert denied(kind="name", port=53).hint == "--net evil.example"
    assert denied(kind="name", port=53).target == "evil.example"
    assert denied(name="", address="203.0.113.7").hint == "--net 203.0.113.7:443"


def test_a_deny_rule_is_the_clause_and_no_option_is_named() -> None:
    found = denied(name="ads.example.com", rule=1, reason="deny rule")
    assert (found.clause, found.hint) == ('net = "!ads.example.com"', "")
    assert found.reason == "the rule !ads.example.com denies it"


def test_a_name_that_leads_to_a_private_address_needs_a_rule_for_the_address() -> None:
    found = denied(name="build.example", address="10.0.0.5", reason="private address")
    assert found.hint == "--net 10.0.0.5:443"
    assert found.reason == "the name leads to the private address 10.0.0.5"


def test_no_hint_opens_the_metadata_server_of_a_cloud() -> None:
    found = denied(name="build.example", address="169.254.169.254", reason="metadata address")
    assert (found.hint, found.reason) == ("", "the name leads to the metadata address 169.254.169.254")


@pytest.mark.parametrize("reason", ["SNI differs", "Host differs", "limit", "too many names"])
def test_what_no_rule_would_change_has_a_reason_and_no_option(reason: str) -> None:
    found = denied(name="api.example.com", rule=0, reason=reason)
    assert found.hint == "" and found.reason and found.reason != reason


def test_a_request_that_is_not_passed_on_is_told_from_a_connection_without_http() -> None:
    words = "the server could misread it, and the response to the program says why"
    assert denied(kind="request", reason="not HTTP").reason == words
    assert denied(reason="not HTTP").reason == "it does not speak HTTP"


def test_every_reason_with_words_of_its_own_is_one_of_the_records() -> None:
    assert set(REASON_TEXTS) | LOOKED_INTO | ALLOWED_BY_ADDRESS | FAILURES <= set(REASONS)


def test_a_name_that_is_no_name_is_in_no_hint() -> None:
    assert denied(name="$(reboot)").hint == ""


def test_equal_targets_are_one_denial() -> None:
    raw = record(verdict="denied", rule=-1, name="evil.example", times=2)
    (found,) = denials(decisions([raw, raw], RULES))
    assert found.count == 4 and found.wall == "network.rules"


def test_the_number_of_denials_is_bounded() -> None:
    many = [record(verdict="denied", rule=-1, name=f"n{number}.example") for number in range(1000)]
    assert len(denials(decisions(many, RULES))) == MOST_DENIALS


EVIL = Denial(
    what="name", target="evil.example", wall="network.rules", clause="net", hint="--net evil.example"
)


@pytest.mark.parametrize(
    "last",
    [
        b"curl: (6) Could not resolve host: evil.example",
        b"getaddrinfo ENOTFOUND evil.example",
        b"Connection reset by peer",
    ],
)
def test_the_last_words_of_a_failed_program_choose_the_refusal(last: bytes) -> None:
    assert hint(last, [EVIL], RULES) == (
        "the network rules refused the lookup of evil.example: `--net evil.example` allows it"
    )


def test_other_last_words_get_no_hint() -> None:
    assert hint(b"KeyError: 'evil.example'", [EVIL], RULES) == ""
    assert hint(b"Connection refused", [], RULES) == ""


def test_a_port_that_no_rule_names_is_found_in_the_words() -> None:
    last = b"curl: (7) Failed to connect to api.example.com port 8080 after 0 ms: Couldn't connect to server"
    assert "`--net api.example.com:8080` allows it" in hint(last, [], RULES)
    assert hint(last.replace(b"8080", b"443"), [], RULES) == ""
    psql = b'connection to server at "db.example.com" (198.18.0.3), port 5432 failed: Connection refused'
    assert "`--net db.example.com:5432` allows it" in hint(psql, [], RULES)
    assert hint(last.replace(b"api.example.com", b"198.18.0.7"), [], RULES) == ""


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_server_on_the_machine_is_reached_by_a_rule_for_its_address(host: str) -> None:
    last = f"curl: (7) Failed to connect to {host} port 5432 after 0 ms: Couldn't connect to server".encode()
    assert hint(last, [], RULES) == (
        f"{host} is the sandbox itself, and nothing listens there on port 5432: "
        "`--net 127.0.0.1:5432` leads to a server on your machine"
    )
    assert hint(last, [], (*RULES, "127.0.0.1:5432")) == ""


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("name not found", "this machine finds no such name"),
        ("connection refused", "192.0.2.1 refused the connection"),
        ("timed out", "192.0.2.1 did not answer in time"),
    ],
)
def test_an_allowed_connection_that_failed_is_explained(reason: str, said: str) -> None:
    found = decisions([record(verdict="failed", reason=reason)], RULES)
    last = b"curl: (56) Recv failure: Connection reset by peer"
    wanted = f"the network rules allow api.example.com:443, but {said}"
    assert hint(last, [], RULES, found) == wanted
    assert hint(b"curl: (35) api.example.com: connection reset", [EVIL], RULES, found) == wanted
    assert "refused the lookup of evil.example" in hint(last, [EVIL], RULES, found)
    assert hint(b"KeyError", [], RULES, found) == ""


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (b"OSError: [Errno 98] Address already in use", "ports 80, 443, 8080"),
        (b"at x.js:51:3\n code: 'EADDRINUSE',\n port: 8080\n}", "port 8080"),
        (b"listen tcp 127.0.0.1:443: bind: address already in use", "port 443"),
        (b"Error: listen EADDRINUSE: address already in use :::3000", ""),
    ],
)
def test_a_port_that_the_rules_take_is_named_to_a_server_that_wants_it(last: bytes, said: str) -> None:
    found = hint(last, [], ("a.example", "b.example:8080", "!c.example"))
    wanted = f"the network rules take {said} inside: a server there needs another port" if said else ""
    assert found == wanted
