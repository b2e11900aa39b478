"""A Ctrl-C while a run is recorded: one receipt of the run, and a log that says the same."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.receipt import account, builder, chain, tail
from stockade.runs import finish, launch, living_networks
from stockade.runs.register import runlog

RECORDING = frozenset(str(module.__file__) for module in (account, builder, chain, finish, runlog, tail))


class CtrlC:
    """Raises KeyboardInterrupt before the `at`th line of code that `meant` names, from a first call on."""

    def __init__(self, at: int, since: CodeType, meant: Callable[[CodeType], bool]) -> None:
        self.left, self.since, self.meant = at, since, meant
        self.begun = False

    def __enter__(self) -> CtrlC:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, _: str, __: Any) -> Any:
        self.begun = self.begun or frame.f_code is self.since
        return self._line if self.begun and self.meant(frame.f_code) else None

    def _line(self, _: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self._line


def interrupt_everywhere(
    state: Path, run: Callable[[str], object], since: CodeType = runlog.line.__code__
) -> None:
    """Interrupt runs before each line that records their end, then compare the receipts with the log."""
    for at in itertools.count(1):
        with (
            contextlib.suppress(KeyboardInterrupt),
            CtrlC(at, since, lambda code: code.co_filename in RECORDING) as interruption,
        ):
            run(str(at))
        if interruption.left > 0:
            break
    receipts, lines = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for one in chain.of(str(state)).all():
        receipts[one.receipt.predicate.who.action].append(one.receipt.predicate.ending.outcome)
    for ran in runlog.read(str(state))[0]:
        lines[ran.command[1]].append(ran.outcome)
    assert at > 50
    for number in map(str, range(1, at + 1)):
        assert len(receipts[number]) == 1, f"line {number}"
        assert lines[number] == receipts[number] or (not lines[number] and receipts[number] == ["cancelled"])


@pytest.mark.parametrize("receipts", ["each", "batched"])
def test_a_run_has_one_receipt_and_a_log_that_agrees(
    stockade_home: Path, receipts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOCKADE_LOG", "full")
    with Sandbox(Policy(receipts=receipts)) as box:
        interrupt_everywhere(stockade_home, lambda at: box.run(["true", at], who={"action": at}))


def test_a_run_that_one_ctrl_c_ends_has_one_also_after_another(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: bytes) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("STOCKADE_LOG", "full")
    with Sandbox() as box:
        interrupt_everywhere(
            stockade_home,
            lambda at: box.run(["echo", at], who={"action": at}, on_stdout=interrupt),
            account.FailureRecorder._record.__code__,
        )


def test_a_process_that_is_waited_for_or_closed_has_one_too(
    stockade_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start_and_wait(at: str) -> None:
        with box.start(["true", at], who={"action": at}) as process:
            process.wait()

    monkeypatch.setenv("STOCKADE_LOG", "full")
    with Sandbox() as box:
        interrupt_everywhere(stockade_home, start_and_wait)


def test_a_launch_that_is_interrupted_when_the_walls_are_up_is_cancelled(stockade_home: Path) -> None:
    """Its descriptors have one owner at any time: none is closed twice."""
    before = dict(living_networks._networks)
    taking_over = (launch._launched_sandbox.__code__, launch.LaunchedSandbox.__init__.__code__)
    for at in itertools.count(1):
        with CtrlC(at, taking_over[0], taking_over.__contains__) as interruption:
            try:
                stockade.run(["true"])
            except KeyboardInterrupt:
                continue
        assert interruption.left > 0 and at > 10
        break
    outcomes = [one.receipt.predicate.ending.outcome for one in chain.of(str(stockade_home)).all()]
    assert outcomes == ["cancelled"] * (at - 1) + ["exited"]
    assert living_networks._networks == before
