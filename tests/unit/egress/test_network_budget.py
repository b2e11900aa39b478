"""The limits on the network, as the egress process counts them."""

from __future__ import annotations

import random

import pytest

from stockade.egress import network_budget
from stockade.egress.network_budget import CLAUSES, KINDS, MOST_HOSTS, HostBudget, NetworkBudget
from stockade.policy.model import NETWORK_LIMITS


def of_host(budget: NetworkBudget, host: str) -> HostBudget:
    found = budget.of_host(host)
    assert found is not None
    return found


def test_the_policy_and_the_egress_name_the_same_limits() -> None:
    assert CLAUSES == NETWORK_LIMITS


def test_without_limits_nothing_is_counted() -> None:
    assert NetworkBudget({}).of_host("a.example") is None


def test_all_hosts_share_one_limit_and_each_has_its_own() -> None:
    budget = NetworkBudget({"upload": 10, "host_upload": 6})
    first, second = of_host(budget, "a.example"), of_host(budget, "b.example")
    assert first.spend("upload", 6) and not first.spend("upload", 1)
    assert first.refusal("upload") == "limits.host_upload"
    assert second.left("upload") == 4 and second.spend("upload", 4) and not second.spend("upload")
    assert second.refusal("upload") == "limits.upload" == second.exhausted()
    assert first.left("download") > 1 << 40


def test_hosts_without_number_are_refused_rather_than_forgotten() -> None:
    budget = NetworkBudget({"host_connections": 1})
    for number in range(MOST_HOSTS):
        assert of_host(budget, f"h{number}").spend("connections")
    assert of_host(budget, "one-more").exhausted() == "limits.host_connections"
    assert not of_host(budget, "h0").spend("connections")


@pytest.mark.parametrize("busy", [True, False])
def test_two_processes_never_spend_more_than_one_could(busy: bool) -> None:
    chance = random.Random(7)
    for _ in range(200):
        limits = {name: chance.randrange(1, 100) for name in chance.sample(CLAUSES, 3)}
        old, new = NetworkBudget(limits), NetworkBudget(limits)
        spent = dict.fromkeys(CLAUSES, 0)

        def spend(budget: NetworkBudget, spent: dict[str, int] = spent) -> None:
            for _ in range(30):
                host, kind, amount = chance.choice("ab"), chance.choice(KINDS), chance.randrange(20)
                if of_host(budget, host).spend(kind, amount):
                    spent[kind] += amount
                    if host == "a":
                        spent[f"host_{kind}"] += amount

        spend(old)
        new.take_over(old.hand_over(busy=busy))
        spend(new)
        if busy:
            spend(old)
        assert all(spent[name] <= limit for name, limit in limits.items())


def test_a_host_that_is_met_after_the_handover_is_met_by_one_process_alone() -> None:
    old, new = NetworkBudget({"host_upload": 10}), NetworkBudget({"host_upload": 10})
    new.take_over(old.hand_over(busy=True))
    assert of_host(new, "late").spend("upload", 10)
    assert of_host(old, "late").exhausted() == "limits.host_connections"


@pytest.mark.parametrize(
    "written",
    [b"", b"[]", b"{}", b"[[1,2,3],{}]", b'[[1,2,3,"4"],{}]', b"[[1,2,3,true],{}]", b"[[1,2,3,4],{}", b"\xff",
     b'[[0,0,0,0],{"a":5}]', b"[" * 100_000, b"[[1e400,0,0,0],{}]"],
)  # fmt: skip
def test_a_process_that_hands_over_nonsense_has_spent_everything(written: bytes) -> None:
    budget = NetworkBudget({"upload": 10})
    budget.take_over(written)
    assert of_host(budget, "a").left("upload") == 0


def test_what_is_handed_over_fits() -> None:
    budget = NetworkBudget({"host_upload": 1 << 62})
    for number in range(MOST_HOSTS):
        of_host(budget, f"{number}".rjust(253, "x")).spend("upload", 1 << 61)
    assert len(budget.hand_over(busy=False)) <= network_budget.SPENT_SIZE
