"""What a run of the verify command says, compared with the baseline."""

from __future__ import annotations

from typing import Any

import pytest

from stockade.loop.judge.judgement import JudgeBaseline, VerifyRun, judge_run, make_baseline
from stockade.loop.reports import Report, TestOutcome

BEFORE = JudgeBaseline(
    command="x", exit_code=1, reported=True, passed=frozenset({"a", "b"}), failed=frozenset({"old"})
)


def run(code: int, tests: dict[str, TestOutcome] | None = None, **more: Any) -> VerifyRun:
    return VerifyRun(exit_code=code, report=None if tests is None else Report(tests), **more)


@pytest.mark.parametrize(
    ("code", "tests", "passed", "words"),
    [
        (0, {"a": "passed", "b": "passed", "old": "passed"}, True, "exited with 0"),
        (1, {"a": "passed", "b": "passed", "old": "failed"}, True, "these did: old"),
        (
            1,
            {"a": "passed", "b": "passed", "new": "failed", "old": "failed"},
            False,
            "did not fail before: new",
        ),
        (0, {"a": "passed", "b": "skipped"}, False, "did not pass: b"),
        (0, {"a": "passed"}, False, "did not run: b"),
        (0, {}, False, "2 tests that passed before did not run"),
        (0, None, False, "report is missing"),
        (2, {"a": "passed", "b": "passed", "old": "failed"}, False, "exited with 2"),
        (1, {"a": "passed", "b": "passed", "old": "passed"}, False, "exited with 1"),
    ],
)
def test_success_needs_every_test_that_passed_and_no_new_failure(
    code: int, tests: dict[str, TestOutcome] | None, passed: bool, words: str
) -> None:
    found = judge_run(run(code, tests), BEFORE)
    assert found.passed is passed and words in found.reason


@pytest.mark.parametrize(
    ("failed", "tests", "passed"),
    [
        ("t.py::new", {"t.py::new": "passed"}, True),
        ("t.py::new", {"t.py::new": "skipped"}, False),
        ("t.py::new", {"t.py": "skipped"}, False),
        ("t", {"t": "skipped"}, False),
        ("t", {"t::new": "passed"}, True),
        ("unittest.loader._FailedTest::t", {"t::new": "passed"}, True),
        ("a.test.js::a.test.js", {"a.test.js::new": "passed"}, True),
    ],
)
def test_a_test_that_failed_before_cannot_be_skipped_or_left_out(
    failed: str, tests: dict[str, TestOutcome], passed: bool
) -> None:
    before = JudgeBaseline(command="x", exit_code=1, reported=True, failed=frozenset({failed}))
    found = judge_run(run(0, tests), before)
    assert found.passed is passed and (passed or failed in found.reason)


def test_failures_from_before_count_if_asked_or_if_the_attempt_touched_the_judge() -> None:
    same = run(1, {"a": "passed", "b": "passed", "old": "failed"})
    assert judge_run(same, BEFORE).passed
    assert not judge_run(same, BEFORE, strict=True).passed
    assert "tests/test_old.py" in judge_run(same, BEFORE, touched=("tests/test_old.py",)).reason


def test_without_a_report_only_the_exit_code_counts() -> None:
    before = JudgeBaseline(command="x", exit_code=1)
    assert judge_run(run(0), before).passed and not judge_run(run(1), before).passed


def test_a_run_that_was_ended_never_passes() -> None:
    ended = run(0, {"a": "passed", "b": "passed"}, ended=True, problem="it took too long")
    assert judge_run(ended, BEFORE).reason == "it took too long"
    assert not judge_run(ended, BEFORE).passed


def test_a_baseline_has_what_passed_and_what_failed() -> None:
    made = make_baseline("x", run(1, {"a": "passed", "b": "failed", "c": "skipped"}), 3)
    assert (made.passed, made.failed, made.landed) == (frozenset("a"), frozenset("b"), 3)
