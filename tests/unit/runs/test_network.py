"""What the egress recorded, as decisions and denials; and the rule that a hint names."""

from __future__ import annotations

import pytest

from stockade.egress.records import RawRecord
from stockade.result import Denial
from stockade.runs.explain.refused_connections import hint
from stockade.runs.network import MOST_DENIALS, decisions, denials

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
