"""What a verify command's run says about an attempt, compared with the baseline."""

from __future__ import annotations

import re

import msgspec

from stockade.loop.reports import Report, TestOutcome

#: How many test ids a reason names.
MOST_NAMED = 5


class JudgeBaseline(msgspec.Struct, frozen=True, kw_only=True):
    """What the verify command said about the project before an attempt.

    `landed` is how many items had landed then: after the next one it is out of date.
    """

    command: str
    exit_code: int
    reported: bool = False
    passed: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    landed: int = 0


class VerifyRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a verify command: how it ended, the end of what it printed, and its report if it made one.

    `problem` says why a report cannot be relied on, or why the run was ended.
    """

    exit_code: int
    output: str = ""
    report: Report | None = None
    problem: str = ""
    receipt: str = ""
    ended: bool = False


class Judgement(msgspec.Struct, frozen=True):
    """Whether an attempt passed, and why in one sentence."""

    passed: bool
    reason: str
    #: The words of an error, for the user alone: they may name files of the host.
    error: str = ""


class JudgedRun(msgspec.Struct, frozen=True):
    """A judgement, the run that it is about, and the judge's files that the attempt had changed."""

    judgement: Judgement
    run: VerifyRun | None = None
    restored: tuple[str, ...] = ()


def make_baseline(command: str, run: VerifyRun, landed: int) -> JudgeBaseline:
    """Return the baseline that a run of the verify command gives."""
    tests = {} if run.report is None else run.report.tests
    return JudgeBaseline(
        command=command,
        exit_code=run.exit_code,
        reported=bool(tests),
        passed=frozenset(name for name, outcome in tests.items() if outcome == "passed"),
        failed=frozenset(name for name, outcome in tests.items() if outcome == "failed"),
        landed=landed,
    )


def judge_run(
    run: VerifyRun, before: JudgeBaseline, *, strict: bool = False, touched: tuple[str, ...] = ()
) -> Judgement:
    """Compare a run of the verify command with the baseline.

    An attempt passes if the command exits with 0 and its report, if the baseline had one, has every test that
    passed before, passed, and no failure that is new. Tests that failed before may fail again, but must run,
    unless `strict` is set or the attempt has `touched` the judge's files: then the exit code must be 0.
    """
    if run.ended:
        return Judgement(False, run.problem)
    still = ""
    if before.reported:
        if run.report is None:
            why = run.problem or "it left no report"
            return Judgement(
                False, f"the verify command exited with {run.exit_code}, but its report is missing: {why}"
            )
        tests = run.report.tests
        if gone := sorted(name for name in before.passed if name not in tests):
            return Judgement(False, f"{_count(gone)} that passed before did not run: {_named(gone)}")
        if worse := sorted(name for name in before.passed if tests[name] != "passed"):
            return Judgement(False, f"{_count(worse)} that passed before did not pass: {_named(worse)}")
        if avoided := sorted(name for name in before.failed if _is_avoided(name, tests)):
            return Judgement(
                False, f"{_count(avoided)} that failed before did not run or were skipped: {_named(avoided)}"
            )
        failed = {name for name, outcome in tests.items() if outcome == "failed"}
        if new := sorted(failed - before.failed):
            return Judgement(False, f"{_count(new)} failed that did not fail before: {_named(new)}")
        still = _named(sorted(failed))
    if run.exit_code == 0:
        return Judgement(True, "the verify command exited with 0")
    if not still or run.exit_code != before.exit_code:
        return Judgement(False, f"the verify command exited with {run.exit_code}")
    if strict:
        return Judgement(False, f"the verify command exited with {run.exit_code}; these fail: {still}")
    if touched:
        return Judgement(
            False,
            f"these tests fail as before: {still}; the attempt changed the judge's files "
            f"({_named(list(touched))}), which the judge took from the project",
        )
    return Judgement(True, f"no test failed that did not fail before the attempt; these did: {still}")


#: The ids under which runners report a file of tests that they cannot load, without its tests.
_LOADING = re.compile(r".*_FailedTest::|.*failed to (run|load)|(?P<file>.*)::(?P=file)\Z", re.DOTALL)


def _is_avoided(name: str, tests: dict[str, TestOutcome]) -> bool:
    """Whether a test that failed before has not run, so code under test may have left it out or skipped it.

    A file that could not be loaded is reported as one failed test, which is gone when its tests run.
    """
    if name in tests:
        return tests[name] == "skipped"
    return "::" in name and _LOADING.match(name) is None


def _count(names: list[str]) -> str:
    return "1 test" if len(names) == 1 else f"{len(names)} tests"


def _named(names: list[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more
