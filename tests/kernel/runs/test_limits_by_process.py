"""What stands in for a cgroup where the policy accepts it: a limit for each process, kept by the kernel."""

from __future__ import annotations

import msgspec
import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.host import CGROUP_PROBES, Probe, host
from stockade.runs import prepare

PYTHON = "/usr/bin/python3"


@pytest.fixture(autouse=True)
def by_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a host without cgroups."""
    known = host()
    without = {name: Probe(ok=False, errno=1, reason="pretend", fix="pretend") for name in CGROUP_PROBES}
    weak = msgspec.structs.replace(known, probes=known.probes | without)
    monkeypatch.setattr(prepare, "host", lambda **_: weak)
    monkeypatch.setattr(prepare, "_selected", prepare._selected.__wrapped__)


def policy(**limits: object) -> Policy:
    return Policy(limits=limits, accept=[f"limits.{name}" for name in limits])


def test_a_process_gets_no_more_address_space() -> None:
    allocate = "x = bytearray(200 << 20)"
    result = stockade.run([PYTHON, "-c", allocate], policy(memory="64M"))
    assert result.exit_code == 1 and b"MemoryError" in result.stderr
    assert stockade.run([PYTHON, "-c", allocate]).exit_code == 0


def test_a_process_gets_no_more_processor_time() -> None:
    result = stockade.run([PYTHON, "-c", "while True: pass"], policy(cpu_time=0.3), timeout=30)
    assert (result.outcome, result.exit_code) == ("limit-exceeded", 137)
    assert 'limits.cpu_time = "300ms"' in result.reason


def test_the_budget_of_a_profile_holds_for_each_process_and_the_result_says_so() -> None:
    worker = Policy(profile="worker")
    result = stockade.run([PYTHON, "-c", "import json, re; print(6 * 7)"], worker)
    assert result.text == "42\n"
    for control, means in (("limits.memory", "RLIMIT_AS"), ("limits.cpu_time", "RLIMIT_CPU")):
        assert result.controls[control].grade == "accepted weaker"
        assert means in result.controls[control].mechanism
    assert b"MemoryError" in stockade.run([PYTHON, "-c", "x = bytearray(200 << 20)"], worker).stderr
    result = stockade.run([PYTHON, "-c", "while True: pass"], worker, timeout=60)
    assert (result.outcome, result.exit_code) == ("limit-exceeded", 137)


def test_a_budget_that_the_policy_writes_is_refused() -> None:
    with pytest.raises(stockade.UnsupportedError) as caught:
        stockade.run(["true"], Policy(profile="worker", limits={"memory": "64M"}))
    assert "limits.memory" in str(caught.value)


def test_a_program_cannot_lift_them() -> None:
    for what in ("RLIMIT_AS", "RLIMIT_CPU"):
        lift = f"import resource as r; r.setrlimit(r.{what}, (1 << 40, 1 << 40))"
        result = stockade.run([PYTHON, "-c", lift], policy(memory="64M", cpu_time=5))
        assert result.exit_code == 1 and b"not allowed to raise maximum limit" in result.stderr


def test_the_gate_works_within_the_least_memory_that_a_policy_can_write() -> None:
    with Sandbox(policy(memory="2M")) as box:
        # A shell is too large for it, and the gate is not.
        for _ in range(20):
            assert box.run(["/bin/sh", "-c", "true"]).exit_code == 127
    with Sandbox(policy(memory="4M")) as box:
        assert [box.run(["/bin/sh", "-c", "true"]).exit_code for _ in range(20)] == [0] * 20
