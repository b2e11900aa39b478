"""Receipts of what lives longer than one command: each run of a shell, an interpreter, in the background."""

from __future__ import annotations

import asyncio
import os

import pytest

import stockade
from stockade import Policy, Receipt, Result, Sandbox, state
from stockade.receipt import keys
from stockade.receipt.statement import Predicate

POLICY = Policy(limits={"files": 99})
WHO = {"agent": "a", "action": "first"}


def told(result: Result, *, whole: bool = True) -> Predicate:
    """What the receipt of a result says; it is of that result, if that is `whole` with its output."""
    receipt = result.receipt
    assert isinstance(receipt, Receipt)
    home = state.state_dir(os.environ, os.path.expanduser("~"))
    stockade.verify(receipt, keys.find(home, "").public, result=result if whole else None)
    return receipt.predicate


def endings(box: Sandbox) -> list[tuple[str, str]]:
    return [(one.predicate.command.program, one.predicate.ending.outcome) for one in box.receipts]


def test_every_run_of_a_shell_has_one() -> None:
    with Sandbox(POLICY, who={"agent": "a"}) as box, box.shell() as shell:
        one = shell.run("echo hello; echo loud >&2; sleep 0.1", who={"action": "first"})
        other = shell.run("echo hello; echo loud >&2")
        late = shell.run("sleep 60", timeout=0.1, grace=0)
        gone = shell.run("exec sh -c 'exit 3'")
        fresh = shell.run("true")
        with pytest.raises(ZeroDivisionError):
            shell.run("echo x; sleep 60", on_stdout=lambda data: 1 // 0)
        runs = [told(result) for result in (one, other, late, gone, fresh)]
        assert endings(box) == [
            *(("shell", outcome) for outcome in ("exited", "exited", "timed-out", "exited", "exited")),
            ("shell", "cancelled"),
        ]
    assert [run.ending.exit_code for run in runs] == [0, 0, 124, 3, 0]
    assert {run.policy for run in runs} == {POLICY.hash}
    assert [run.who.action for run in runs[:2]] == ["first", ""] and runs[1].who.agent == "a"
    # What was asked for is told apart, and when: not that a shell was there.
    assert len({run.command.words for run in runs}) == 5
    assert runs[0].duration > 100_000 and sorted(run.started for run in runs) == [run.started for run in runs]


def test_every_run_of_an_interpreter_has_one() -> None:
    with Sandbox(POLICY, who=WHO) as box:
        with box.python() as python:
            one, other = python.run("x = 1; print('hi'); x"), python.run("raise KeyError('y \ud800 \0')")
        with box.python(preload=["there_is_no_such_module"]) as python:
            missing = python.run("1")
        assert endings(box) == [("interpreter", outcome) for outcome in ("exited", "exited", "setup-failed")]
        runs = [told(result) for result in (one, other, missing)]
    assert one.value == 1 and missing.reason.startswith("preload: ")
    assert {(run.who.agent, run.who.action, run.policy) for run in runs} == {("a", "first", POLICY.hash)}


def test_a_command_in_the_background_has_one_from_its_start() -> None:
    with Sandbox(POLICY) as box:
        with box.background(["sh", "-c", "echo x; sleep 0.1"], who=WHO) as job:
            run = told(job.wait(), whole=False)
        with box.background(["sleep", "60"]) as job:
            pass
        assert [ending for _, ending in endings(box)] == ["exited", "cancelled"]
    assert run.who.action == "first" and run.duration > 100_000


def test_a_cancelled_task_leaves_one() -> None:
    async def cancelled(box: stockade.AsyncSandbox) -> None:
        async with box.shell() as shell, box.python() as python:
            for run in (shell.run("sleep 60", grace=0), python.run("import time; time.sleep(60)", grace=0)):
                task = asyncio.ensure_future(run)
                await asyncio.sleep(0.1)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

    async def main() -> list[str]:
        async with stockade.AsyncSandbox(POLICY) as box:
            await cancelled(box)
            return [one.predicate.ending.outcome for one in box.receipts]

    assert asyncio.run(main()) == ["cancelled", "cancelled"]
