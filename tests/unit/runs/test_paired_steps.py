"""Two activities whose steps are taken in turn: both end, whatever happens to one of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stockade.runs.io.eventloop import Steps
from stockade.runs.io.paired_steps import BothResults, take_turns


def activity(log: list[str], name: str, steps: int, fails: bool = False) -> Steps[str]:
    try:
        for number in range(steps):
            log.append(f"{name}{number}")
            yield float(number)
        if fails:
            raise ValueError(name)
        return name
    except BaseException as error:
        log.append(f"{name} {type(error).__name__}")
        yield 0.0  # it cleans up
        log.append(f"{name} clean")
        raise


def finish(steps: Steps[BothResults]) -> tuple[BothResults, list[float | None]]:
    waits: list[float | None] = []
    while True:
        try:
            waits.append(next(steps))
        except StopIteration as done:
            return done.value, waits


def test_both_results_are_returned_and_the_shorter_wait_counts() -> None:
    log: list[str] = []
    pair, waits = finish(take_turns(activity(log, "a", 3), activity(log, "b", 2)))
    assert pair == BothResults("a", "b", None)
    assert log == ["a0", "b0", "a1", "b1", "a2"] and waits == [0.0, 1.0, 2.0]


def test_a_failure_of_one_is_raised_in_the_other_and_both_clean_up() -> None:
    log: list[str] = []
    pair, _ = finish(take_turns(activity(log, "a", 1, fails=True), activity(log, "b", 9)))
    assert isinstance(pair.failure, ValueError) and pair.first is pair.second is None
    assert "a clean" in log and "b ValueError" in log and "b clean" in log


def test_what_had_succeeded_is_returned_with_the_failure() -> None:
    log: list[str] = []
    pair, _ = finish(take_turns(activity(log, "a", 1), activity(log, "b", 3, fails=True)))
    assert pair.first == "a" and isinstance(pair.failure, ValueError)


def test_an_exception_from_outside_reaches_both() -> None:
    log: list[str] = []
    steps = take_turns(activity(log, "a", 5), activity(log, "b", 5))
    next(steps)
    steps.throw(KeyboardInterrupt())
    pair, _ = finish(steps)
    assert isinstance(pair.failure, KeyboardInterrupt)
    assert {"a KeyboardInterrupt", "b KeyboardInterrupt", "a clean", "b clean"} <= set(log)


def test_an_activity_that_has_not_begun_does_not_begin_after_a_failure() -> None:
    log: list[str] = []

    def broken() -> Steps[str]:
        raise ValueError("at once")
        yield 0.0

    pair, waits = finish(take_turns(broken(), activity(log, "b", 3)))
    assert isinstance(pair.failure, ValueError) and not log and not waits


@pytest.fixture(autouse=True)
def no_warnings(recwarn: pytest.WarningsRecorder) -> Iterator[None]:
    yield
    assert not recwarn.list
