"""Spawners: many runs, asked about by number. Much of this went wrong in a system that had one before."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stockade
from stockade import NotFoundError, Policy, PolicyError, SetupError, Spawner
from stockade.sandbox.spawner import SpawnStage, State
from support import leaks


@pytest.fixture
def spawner() -> Iterator[Spawner]:
    with Spawner() as made:
        yield made


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit, "that never happened"
        time.sleep(0.005)


def running(spawner: Spawner, number: int) -> State:
    until(lambda: spawner.state(number).stage != SpawnStage.PENDING)
    return spawner.state(number)


def test_a_deadline_fires_though_nobody_asks(spawner: Spawner) -> None:
    one = spawner.spawn(["sleep", "300"], timeout=0.3, grace=0)
    state = running(spawner, one)
    assert state.stage == "running" and state.pid and state.elapsed >= 0
    # Nothing is asked of the spawner from here on.
    until(lambda: not Path(f"/proc/{state.pid}").exists())
    until(lambda: spawner.state(one).stage != "running")
    assert spawner.state(one) == State(stage=SpawnStage.TIMED_OUT, reason="ended after 0.3 s, its time limit")
    result = spawner.collect(one)
    assert result.outcome == "timed-out" and result.receipt is not None
    assert result.receipt.predicate.ending.outcome == "timed-out"


def test_a_killed_run_is_killed_and_its_receipt_has_its_own_policy() -> None:
    policy = Policy(limits={"files": 77})
    with Spawner(policy, who={"agent": "a"}) as spawner:
        one, two = (spawner.spawn(["sleep", "300"], who={"action": word}) for word in ("x", "y"))
        running(spawner, one)
        spawner.terminate(one, "it was too loud")
        spawner.terminate(two, "before it began, or soon after")
        result, other = spawner.collect(one), spawner.collect(two)
    assert (result.outcome, result.reason) == ("cancelled", "it was too loud")
    assert (other.outcome, other.reason) == ("cancelled", "before it began, or soon after")
    for ended, action in ((result, "x"), (other, "y")):
        assert ended.receipt is not None
        told = ended.receipt.predicate
        assert (told.policy, told.ending.outcome) == (policy.hash, "cancelled")
        assert told.who is not None and (told.who.agent, told.who.action) == ("a", action)


def test_states_say_how_it_ended(spawner: Spawner) -> None:
    words = {
        "fine": ["sh", "-c", "exit 3"],
        "signal": ["sh", "-c", "kill -SEGV $$"],
        "missing": ["there-is-no-such-command"],
    }
    numbers = {name: spawner.spawn(cmd) for name, cmd in words.items()}
    until(lambda: all(spawner.state(number).stage.over for number in numbers.values()))
    assert spawner.state(numbers["fine"]) == State(stage=SpawnStage.COMPLETED, exit_code=3)
    assert spawner.state(numbers["signal"]).stage == "killed"
    assert "SIGSEGV" in spawner.state(numbers["signal"]).reason
    assert spawner.state(numbers["missing"]).stage == "failed"
    assert "no such command" in spawner.state(numbers["missing"]).reason
    # One that is over cannot be killed any more.
    spawner.terminate(numbers["fine"], "too late")
    assert spawner.collect(numbers["fine"]).exit_code == 3


def test_a_result_is_whole_and_collected_once(spawner: Spawner) -> None:
    # Far more than a pipe holds, on both streams, and nobody reads before it has ended.
    one = spawner.spawn(["sh", "-c", "head -c 1000000 /dev/zero | tee /dev/stderr"])
    until(lambda: spawner.state(one).stage.over)
    result = spawner.collect(one)
    assert (len(result.stdout), len(result.stderr)) == (1_000_000, 1_000_000)
    for ask in (spawner.collect, spawner.state, spawner.terminate):
        with pytest.raises(NotFoundError, match=rf"no run {one}\b"):
            ask(one)


def test_of_many_collectors_one_gets_it_and_one_that_does_not_wait_leaves_it(spawner: Spawner) -> None:
    one = spawner.spawn(["cat"], input=b"x", timeout=60)
    waits = spawner.spawn(["sleep", "300"], grace=0)
    with pytest.raises(stockade.TimeoutError):
        spawner.collect(waits, timeout=0.01)
    got: list[object] = []

    def collect() -> None:
        try:
            got.append(spawner.collect(one).text)
        except NotFoundError:
            got.append(None)

    threads = [threading.Thread(target=collect) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, got)) == ["None", "None", "None", "x"]


def test_one_thread_looks_after_them_all_and_closing_ends_them() -> None:
    before = threading.active_count()
    with Spawner(most=12) as spawner:
        numbers = [spawner.spawn(["sleep", "300"], grace=0) for _ in range(12)]
        assert threading.active_count() == before + 1
        with pytest.raises(SetupError, match="12 runs have not been collected"):
            spawner.spawn(["true"])
        pids = [running(spawner, number).pid for number in numbers]
        with spawner._change:  # as the thread may have it at that moment
            child = os.fork()
            if child == 0:
                with contextlib.suppress(BaseException):
                    for ask in (
                        lambda: spawner.spawn(["true"]),
                        lambda: spawner.state(numbers[0]),
                        lambda: spawner.terminate(numbers[0]),
                        lambda: spawner.collect(numbers[0]),
                    ):
                        with pytest.raises(SetupError, match="forked from"):
                            ask()
                    leaks.let_go_of_register()
                    os._exit(0)
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    spawner.close()
    with pytest.raises(SetupError, match="closed"):
        spawner.spawn(["true"])


def test_what_is_refused_is_raised_at_once(spawner: Spawner) -> None:
    with pytest.raises(PolicyError, match="one string"):
        spawner.spawn("true")
    with pytest.raises(PolicyError, match="grace"):
        spawner.spawn(["true"], grace=-1)
    with pytest.raises(PolicyError, match="most = 0"):
        Spawner(most=0)
    with Spawner(Policy(read=["/there/is/nothing"])) as other, pytest.raises(PolicyError, match="nothing"):
        other.spawn(["true"])


def test_a_thread_that_fails_takes_its_runs_with_it_and_lets_nobody_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Spawner() as spawner:
        one = spawner.spawn(["sleep", "300"], grace=0)
        pid = running(spawner, one).pid
        failing = ValueError("no more")

        def fails(*_: object) -> None:
            raise failing

        told: list[object] = []
        monkeypatch.setattr(threading, "excepthook", lambda args: told.append(args.exc_value))
        monkeypatch.setattr(spawner, "_patience", fails)
        two = spawner.spawn(["sleep", "300"], grace=0)
        assert spawner.collect(one, timeout=30).reason == "the spawner has failed: no more"
        assert spawner.collect(two, timeout=30).outcome == "cancelled"
        assert not Path(f"/proc/{pid}").exists()
        with pytest.raises(SetupError, match="closed"):
            spawner.spawn(["true"])
    assert told == [failing]
