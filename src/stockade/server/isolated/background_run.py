"""Runs of an isolated session that go on while the client does something else.

A background run is a bash of its own in the sandbox of its session, beside the
session's shell: the shell serves one run at a time and must stay free. It
begins with a copy of the shell's state, so it finds the same directory,
variables and functions; what it changes of them stays its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import StockadeError
from stockade.result import Outcome, Result
from stockade.runs.io.streams import StreamConsumer
from stockade.server.execd.output_log import LogPage, OutputLog
from stockade.server.isolated.shell_state import background_argv, background_input
from stockade.server.tally import TALLY
from stockade.server.wire.errors import ServerPaths

if TYPE_CHECKING:
    from stockade import AsyncSandbox

TERMINATED = "session terminated"
INTERRUPTED = "interrupted"


class RunStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer of `GET session/{id}/runs/{run}`."""

    session_id: str
    run_id: str
    running: bool
    started_at: datetime
    exit_code: int | None = None
    error: str = ""
    finished_at: datetime | None = None


class LogSink(StreamConsumer):
    """Takes the output of a run into its log; the run itself keeps nothing of it."""

    def __init__(self, log: OutputLog) -> None:
        self._log = log

    def __call__(self, data: bytes) -> None:
        self._log.write(data)


class BackgroundRun:
    """One background run: its task, its log and how it ended."""

    def __init__(
        self,
        id: str,
        session_id: str,
        box: AsyncSandbox,
        code: str,
        envs: Mapping[str, str],
        state: bytes,
        log: OutputLog,
        ended: Callable[[], object],
    ) -> None:
        """Start the code in the sandbox; `ended` is called once, when the run is over."""
        self.id, self.session_id, self._log = id, session_id, log
        self.started_at = datetime.now(UTC)
        self.finished_at: datetime | None = None
        self.exit_code: int | None = None
        self.error = ""
        self._given = background_input(state, envs, code)
        self._box, self._ended = box, ended
        self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        result: Result | None = None
        try:
            given, self._given = self._given, b""
            sink = LogSink(self._log)
            result = await self._box.run(background_argv(), input=given, on_stdout=sink, on_stderr=sink)
            self._judge(result)
        except StockadeError as error:
            self.error = self.error or error.message
        except asyncio.CancelledError:
            self.error = self.error or INTERRUPTED
        finally:
            self.finished_at = datetime.now(UTC)
            took = self.finished_at - self.started_at
            TALLY.note_run("isolated", took.total_seconds() * 1000, result)
            self._ended()

    def _judge(self, result: Result) -> None:
        if result.outcome in (Outcome.EXITED, Outcome.SIGNALLED, Outcome.OUT_OF_MEMORY):
            self.exit_code = result.exit_code
        if result.outcome is not Outcome.EXITED:
            self.error = self.error or result.reason

    @property
    def running(self) -> bool:
        """Whether it is still going on."""
        return self.finished_at is None

    @property
    def status(self) -> RunStatus:
        """The run as the client sees it."""
        return RunStatus(
            session_id=self.session_id,
            run_id=self.id,
            running=self.running,
            exit_code=self.exit_code,
            error=ServerPaths.hide(self.error),
            started_at=self.started_at,
            finished_at=self.finished_at,
        )

    def logs(self, cursor: int) -> LogPage:
        """Return what it has printed from a byte on."""
        return self._log.read(cursor, ended=not self.running)

    def end(self, reason: str) -> None:
        """Begin to end it, for this reason: TERM, and KILL after the grace."""
        if self.running and not self.error:
            self.error = reason
            self._task.cancel()

    async def wait(self) -> None:
        """Wait until it is over."""
        await asyncio.wait([self._task])

    def close(self) -> None:
        """Free its log."""
        self._log.close()
