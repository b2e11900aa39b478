"""Which hosts a learned policy allows: public ones, at the ports that were used."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stockade.observe.access import Access, Action
from stockade.observe.learning.hosts import MOST_HOSTS, RECORDING, HostLearner
from stockade.policy.net_rule_set import RuleSet
from stockade.policy.net_rules import parse_rule
from stockade.result import Decision


def name(host: str, verdict: str = "denied", reason: str = "no rule") -> Decision:
    return Decision(kind="name", time=0.0, name=host, verdict=verdict, reason=reason)  # type: ignore[arg-type]


def connected(
    host: str, port: int, verdict: str = "allowed", reason: str = "", address: str = ""
) -> Decision:
    return Decision(
        time=0.0,
        name=host,
        port=port,
        address=address,
        verdict=verdict,  # type: ignore[arg-type]
        reason=reason,
        process="curl (7)",
    )


def connect(target: str) -> Access:
    return Access(action=Action.CONNECT, target=target, error=errno.ECONNREFUSED, program="/usr/bin/nc")


def rules(learner: HostLearner, *, settled: bool = True) -> list[str]:
    return [one.text for one in learner.rules(settled=settled)]


def test_a_name_that_was_refused_gets_the_ports_of_the_web_at_first() -> None:
    learner = HostLearner()
    learner.add([name("api.example.com")])
    assert rules(learner, settled=False) == [parse_rule("api.example.com:80,443").text]
    assert not learner.knows_ports


def test_in_the_end_it_has_only_the_port_that_was_used() -> None:
    learner = HostLearner()
    learner.add([name("api.example.com")])
    learner.add([name("api.example.com", "allowed", ""), connected("api.example.com", 443)])
    assert [(one.text, one.reason) for one in learner.rules(settled=True)] == [
        ("api.example.com:443", "curl")
    ]
    assert learner.knows_ports


def test_a_port_that_the_egress_does_not_listen_on_is_tried_in_the_next_run() -> None:
    learner = HostLearner()
    learner.add([name("db.example.com")])
    learner.add([name("db.example.com", "allowed", "")], [connect("198.18.0.7:5432")])
    assert rules(learner, settled=False) == [parse_rule("db.example.com:80,443,5432").text]
    learner.add([connected("db.example.com", 5432)])
    assert rules(learner) == ["db.example.com:5432"]


def test_a_public_address_is_allowed_at_its_port() -> None:
    learner = HostLearner()
    learner.add([], [connect("93.184.216.34:8443"), connect("[2606:2800::1]:443")])
    assert rules(learner) == ["93.184.216.34:8443", "[2606:2800::1]:443"]


@pytest.mark.parametrize(
    "target",
    ["127.0.0.1:8080", "10.1.2.3:443", "169.254.169.254:80", "[::1]:80", "192.168.1.1:22", "[fd00::1]:1"],
)
def test_an_address_of_the_own_machine_or_network_is_a_question(target: str) -> None:
    learner = HostLearner()
    learner.add([], [connect(target)])
    assert rules(learner) == [] and learner.questions[0].wanted == f"connect to {target}"
    assert learner.questions[0].allow == f'net = ["{target}"]'


def test_a_name_that_leads_to_a_private_address_is_a_question() -> None:
    learner = HostLearner()
    learner.add([name("evil.example")])
    learner.add([connected("evil.example", 443, "denied", "private address", "10.0.0.5")])
    assert rules(learner) == [] and "private address" in learner.questions[0].why
    assert learner.questions[0].allow == 'net = ["evil.example:443", "10.0.0.5:443"]'


def test_a_connection_that_does_not_name_its_host_is_a_question_about_a_tcp_rule() -> None:
    learner = HostLearner()
    learner.add([name("odd.example"), connected("odd.example", 443, "denied", "not TLS")])
    assert rules(learner) == [] and learner.questions[0].allow == 'net = ["tcp://odd.example:443"]'


def test_a_host_that_the_policy_denies_stays_denied() -> None:
    learner = HostLearner(["*.example.com", "!ads.example.com"])
    learner.add([name("ads.example.com", "denied", "deny rule"), connected("api.example.com", 443)])
    assert rules(learner) == [] and "denies it" in learner.questions[0].why


@pytest.mark.parametrize(
    "target", ["198.18.0.1:53", "1.1.1.1:53", "1.1.1.1:0", "x:1", "1.1.1.1:99999", ":", ""]
)
def test_questions_about_names_and_what_is_no_address_are_no_hosts(target: str) -> None:
    learner = HostLearner()
    learner.add([], [connect(target)])
    assert (rules(learner, settled=False), learner.questions) == ([], ())


def test_a_program_that_asks_for_thousands_of_hosts_gets_few() -> None:
    learner = HostLearner()
    learner.add([name(f"h{n}.evil.example") for n in range(5000)])
    learner.add([], [connect(f"9.9.{n}.1:443") for n in range(255)])
    assert len(rules(learner)) == MOST_HOSTS and len(learner.questions) == 1


def test_the_rule_that_records_allows_nothing() -> None:
    decided = RuleSet([parse_rule(RECORDING)])
    assert not decided.for_name("example.com", 443).allowed
    assert not decided.for_address("1.1.1.1", 443).allowed


@given(
    hosts=st.lists(st.text(max_size=40), max_size=20),
    targets=st.lists(st.text(max_size=40), max_size=20),
    ports=st.lists(st.integers(-5, 70000), max_size=20),
)
def test_whatever_a_program_names_the_rules_can_be_written(
    hosts: list[str], targets: list[str], ports: list[int]
) -> None:
    learner = HostLearner()
    learner.add([name(host) for host in hosts], [connect(target) for target in targets])
    learner.add([connected(host, port % 65536) for host, port in zip(hosts, ports, strict=False)])
    for rule in (*rules(learner), *rules(learner, settled=False)):
        assert parse_rule(rule).text == rule and "*" not in rule
