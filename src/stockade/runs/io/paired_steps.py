"""Two activities whose steps are taken in turn, with the same events, until both have ended."""

from __future__ import annotations

from typing import Any, NamedTuple

from stockade.runs.io.eventloop import Steps


class BothResults(NamedTuple):
    """What two activities returned: None for one that failed, and the first failure."""

    first: Any
    second: Any
    failure: BaseException | None


def take_turns(first: Steps[Any], second: Steps[Any]) -> Steps[BothResults]:
    """Take the steps of two activities in turn until both have ended.

    If one fails, or an exception arrives from outside, the other gets it too and is taken to its end.
    """
    activities = [first, second]
    results: list[Any] = [None, None]
    waiting: dict[int, float | None] = {0: 0.0, 1: 0.0}
    failure: BaseException | None = None

    def step(number: int, error: BaseException | None) -> BaseException | None:
        """Take one step of an activity; return the exception that ended it, if one did."""
        try:
            activity = activities[number]
            waiting[number] = next(activity) if error is None else activity.throw(error)
        except StopIteration as done:
            del waiting[number]
            results[number] = done.value
        except BaseException as problem:
            del waiting[number]
            return problem
        return None

    for number in (0, 1):
        if failure is None:
            failure = step(number, None)
        else:
            activities[number].close()  # it has not begun
            del waiting[number]
    news = failure
    while waiting:
        if news is None:
            try:
                yield min((wait for wait in waiting.values() if wait is not None), default=None)
            except BaseException as interruption:
                news = interruption
        error, news = news, None
        failure = failure or error
        for number in tuple(waiting):
            problem = step(number, error)
            if problem is not None and failure is None:
                failure = news = problem
    return BothResults(results[0], results[1], failure)
