"""The judgement of one request: what it says about a request that is refused, and how much work it takes."""

from __future__ import annotations

import pytest

from stockade.egress.active_rules import ActiveRules
from stockade.egress.termination.judge import HostJudge, JudgedRequest, RequestJudge
from stockade.egress.termination.messages import RequestHead
from stockade.policy.http_targets import MOST_WORK, Target
from stockade.policy.net_rule_set import NetDecision
from stockade.policy.net_rules import parse_rule


class CountedRules(ActiveRules):
    """Rules that note the targets which they judge."""

    def __init__(self, *texts: str) -> None:
        super().__init__([parse_rule(text) for text in texts], range(len(texts)))
        self.targets: list[Target] = []

    def for_request(self, name: str, port: int, method: str, target: Target) -> tuple[NetDecision, int]:
        self.targets.append(target)
        return super().for_request(name, port, method, target)


def judge(rules: CountedRules, target: str) -> JudgedRequest:
    head = RequestHead("GET", "https", "a.test", 443, target, ())
    return RequestJudge(lambda: rules, "https", "a.test", 443).judge(head)


@pytest.mark.parametrize(
    ("target", "reason", "status"),
    [
        ("/ok/x?_method=get", "", 0),
        ("/ok/x?_method=DELETE", "no rule", 403),
        ("/ok/x%3F_method=DELETE", "no rule", 403),
        ("/ok/x%3F_method=D%20", "ambiguous request", 400),
        ("/ok/../x", "ambiguous request", 400),
        ("/ok/" + "x" * 20000, "limit", 400),
    ],
)
def test_a_refusal_has_its_reason(target: str, reason: str, status: int) -> None:
    judged = judge(CountedRules("GET https://a.test/ok/**"), target)
    assert (judged.reason, judged.status) == (reason, status)


@pytest.mark.parametrize(
    "target",
    ["/" + "a/" * 8000, "/?" + "&".join(f"_method=A{number:05}" for number in range(1000))],
)
def test_the_work_for_one_request_is_bounded_whatever_it_asks_for(target: str) -> None:
    rules = CountedRules("* https://a.test/**", *(f"!GET https://a.test/**/a/a/b{n}" for n in range(255)))
    judged = judge(rules, target)
    assert (judged.reason, judged.status) == ("limit", 400)
    assert len(rules.targets) < 1000 and len(set(map(id, rules.targets))) == 1
    assert rules.targets[0].work <= MOST_WORK + 64


@pytest.mark.parametrize(
    ("field", "allowed"),
    [
        ((b"x-forwarded-host", b"evil.test"), False),
        ((b"x-forwarded-host", b"a.test:80, evil.test"), False),
        ((b"forwarded", b"host=evil.test"), False),
        ((b"transfer_encoding", b"chunked"), False),
        ((b"x-forwarded-host", b"a.test"), True),
        ((b"x-original-url", b"/anything/there"), True),
    ],
)
def test_a_plain_rule_allows_everything_at_its_host_and_no_other_host(
    field: tuple[bytes, bytes], allowed: bool
) -> None:
    head = RequestHead("GET", "http", "a.test", 80, "/", (field,))
    judged = HostJudge("a.test", 80, None).judge(head)
    assert judged.reason == ("" if allowed else "ambiguous request")
