"""Calls about commands in the background, and what their answers mean."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from stockade.client import run_calls
from stockade.client.calls import ServerCall
from stockade.client.run_calls import LogPiece
from stockade.client.values import BackgroundStatus, RemoteResult
from stockade.errors import TimeoutError
from stockade.result import Outcome

#: The first and the longest pause, in seconds, between two questions whether a command has ended.
FIRST_PAUSE, LONGEST_PAUSE = 0.02, 0.5


class BackgroundCalls(NamedTuple):
    """The calls about one command in the background: of a sandbox, or of an isolated session."""

    id: str
    status: ServerCall[BackgroundStatus]
    logs: Callable[[int], ServerCall[LogPiece]]
    kill: ServerCall[None]


def of_command(sandbox: str, run: str) -> BackgroundCalls:
    """Return the calls about a command of a sandbox."""
    return BackgroundCalls(
        run,
        run_calls.command_status(sandbox, run),
        lambda cursor: run_calls.command_logs(sandbox, run, cursor),
        run_calls.interrupt(sandbox, run),
    )


def of_session(sandbox: str, session: str, run: str) -> BackgroundCalls:
    """Return the calls about a run of an isolated session."""
    return BackgroundCalls(
        run,
        run_calls.session_run_status(sandbox, session, run),
        lambda cursor: run_calls.session_run_logs(sandbox, session, run, cursor),
        run_calls.interrupt_session_run(sandbox, session, run),
    )


def pauses(timeout: float | None) -> Iterator[float]:
    """Yield how long to wait before each question; raise a `TimeoutError` when the time is over."""
    end = None if timeout is None else time.monotonic() + timeout
    pause = FIRST_PAUSE
    while end is None or time.monotonic() < end:
        yield pause
        pause = min(LONGEST_PAUSE, pause * 1.5)
    raise TimeoutError("the command is still running", hint="wait longer, or end it with kill()")


def ended(run: str, status: BackgroundStatus) -> RemoteResult:
    """Return the result of a background command; its output is in the logs."""
    code = 0 if status.exit_code is None else status.exit_code
    outcome = Outcome.CANCELLED if status.exit_code is None and status.error else Outcome.EXITED
    reason = status.error or (f"exited with {code}" if code else "")
    return RemoteResult(
        id=run, outcome=outcome, exit_code=code if outcome is Outcome.EXITED else 1, reason=reason
    )
