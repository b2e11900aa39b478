"""Commands: programs that a client starts in the sandbox, in the foreground of a stream or in the background.

Each command is a run of the library in the living sandbox, with a receipt. The output of one in the
foreground goes to its client alone, who may be slow; that of one in the background goes to a log. A client
that leaves ends its command: TERM, grace, KILL.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from datetime import datetime

import msgspec

from stockade.result import Outcome, Result
from stockade.runs.command import words
from stockade.runs.options import RunOptions, directory, variables
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.identity import AsyncSandboxView
from stockade.server.execd.output_log import LogPage, OutputLog
from stockade.server.execd.streamed_run import StreamedRun
from stockade.server.execd.variables import SandboxVariables
from stockade.server.wire.errors import INVALID_REQUEST, NOT_FOUND, ApiError
from stockade.server.wire.events import EventResponse, EventStream
from stockade.server.wire.line_endings import LineRule

#: How many commands are remembered, for how many seconds, and how many bytes their logs have together.
MOST_REMEMBERED, LONGEST_REMEMBERED, MOST_LOGGED = 1000, 24 * 3600, 256 << 20
#: How many can run at the same time.
MOST_RUNNING = 512
#: The shells for a command that is text; the second if the first is not inside.
SHELLS = ("bash", "sh")
#: The exit code of a program that is not inside.
NO_PROGRAM = 127
HIGHEST_ID = (1 << 32) - 2
#: Seconds that commands have to end by themselves when their sandbox ends.
PATIENCE = 0.3
#: The longest time limit, in milliseconds: a year.
LONGEST_TIMEOUT = 365 * 24 * 3600 * 1000


class CommandRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What to run: text for a shell in `command`, or a program and its arguments in `argv`."""

    command: str | None = None
    argv: list[str] | None = None
    #: Where it starts; `~` and `$NAME` are expanded.
    cwd: str | None = None
    background: bool = False
    #: Milliseconds; 0 and none are no limit.
    timeout: int | None = None
    uid: int | None = None
    gid: int | None = None
    envs: dict[str, str] | None = None

    @property
    def content(self) -> str:
        """The command, as its status shows it."""
        return self.command if self.command is not None else " ".join(self.argv or ())

    def check(self) -> None:
        """Refuse a request that names no command, two of them, or impossible values."""
        if (self.command is None) == (self.argv is None):
            raise invalid("command: give either command or argv, and not both")
        if self.command is not None and not self.command.strip():
            raise invalid("command: must not be empty")
        if self.gid is not None and self.uid is None:
            raise invalid("gid: needs uid")
        for name, number in (("uid", self.uid), ("gid", self.gid)):
            if number is not None and not 0 <= number <= HIGHEST_ID:
                raise invalid(f"{name}: must be from 0 to {HIGHEST_ID}")
        words(self.argv if self.argv is not None else [self.command or ""])
        variables(self.envs)
        directory(self.cwd)
        seconds_of_milliseconds(self.timeout)


class CommandStatus(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is known about a command."""

    id: str
    content: str
    running: bool
    started_at: datetime
    exit_code: int | None = None
    error: str | None = None
    finished_at: datetime | None = None


def invalid(message: str) -> ApiError:
    """Return the answer for a request that is wrong in itself."""
    return ApiError(400, INVALID_REQUEST, message)


def seconds_of_milliseconds(timeout: int | None) -> float | None:
    """Return a timeout of a request in seconds; 0 is none."""
    if timeout is not None and not 0 <= timeout <= LONGEST_TIMEOUT:
        raise invalid(f"timeout: must be a number of milliseconds from 0 to {LONGEST_TIMEOUT}")
    return timeout / 1000 if timeout else None


class CommandTable:
    """The commands of one sandbox: those that run, and for a day those that have ended."""

    def __init__(self, box: AsyncSandbox, variables: SandboxVariables, logs: str | None = None) -> None:
        """Make an empty table. `logs` is a directory of the host for logs."""
        self._box = box
        self._variables = variables
        self._logs = logs
        self._runs: dict[str, StreamedRun] = {}
        self._shell = SHELLS[0]
        self._closed = False

    async def start(self, request: CommandRequest, rule: LineRule) -> EventResponse:
        """Start a command and return the answer that streams it."""
        request.check()
        added = await self._variables.added(request.envs)
        options: RunOptions = {
            "env": added,
            "cwd": self._variables.directory(request.cwd, added),
            "timeout": seconds_of_milliseconds(request.timeout),
        }
        stream = EventStream(rule)
        if not request.background:
            options |= {"on_stdout": stream.stdout, "on_stderr": stream.stderr}
            run = self.begin(request.content, stream, lambda: self._run(request, options))
            return EventResponse(stream, run.interrupt)
        log = OutputLog(self._logs)
        options |= {"on_stdout": log, "on_stderr": log}
        run = self._add(StreamedRun(request.content, log))
        run.begin(lambda: self._run(request, options), lambda end, result: None, self._forget_old)
        stream.init(run.id)
        stream.complete(run.milliseconds)
        return EventResponse(stream, lambda: None)

    def begin(self, content: str, stream: EventStream, work: Callable[[], Awaitable[Result]]) -> StreamedRun:
        """Start a run whose events go to a stream; a session's run is in the table like a command."""
        run = self._add(StreamedRun(content))
        stream.init(run.id)
        run.begin(work, lambda end, result: run.tell_stream(stream, end), self._forget_old)
        return run

    async def _run(self, request: CommandRequest, options: RunOptions) -> Result:
        box = self._box if request.uid is None else AsyncSandboxView(self._box, request.uid, request.gid)
        if request.argv is not None:
            return await box.run(request.argv, **options)
        assert request.command is not None
        result = await box.run([self._shell, "-c", request.command], **options)
        if self._shell == SHELLS[0] and _is_missing(result):
            result = await box.run([SHELLS[1], "-c", request.command], **options)
            # If neither is found, it is the PATH of this request that is wrong.
            self._shell = SHELLS[0] if _is_missing(result) else SHELLS[1]
        return result

    def interrupt(self, identifier: str) -> None:
        """End a command; its stream then ends by itself. One that has ended stays as it is."""
        self._find(identifier).interrupt()

    def status(self, identifier: str) -> CommandStatus:
        """Return what is known about a command, in the foreground or in the background."""
        run = self._find(identifier)
        return CommandStatus(
            id=run.id,
            content=run.content,
            running=run.running,
            started_at=run.started_at,
            exit_code=None if run.end is None else run.end.exit_code,
            error=run.end.reason or None if run.end is not None else None,
            finished_at=run.finished_at,
        )

    def logs(self, identifier: str, cursor: int) -> LogPage:
        """Return the output of a command in the background from a byte on."""
        run = self._find(identifier)
        if run.log is None:
            raise invalid("id: only a command that was started with background has logs")
        return run.log.read(cursor, ended=not run.running)

    async def close(self) -> None:
        """End every command and free the logs."""
        self._closed = True
        runs = tuple(self._runs.values())
        for run in runs:
            run.interrupt()
        await asyncio.gather(*(run.wait(PATIENCE) for run in runs))
        for run in runs:
            run.kill()
            await run.wait()
            if run.log is not None:
                run.log.close()
        self._runs.clear()

    def _find(self, identifier: str) -> StreamedRun:
        run = self._runs.get(identifier)
        if run is None:
            raise ApiError(404, NOT_FOUND, "there is no such command, or it ended more than a day ago")
        return run

    def _add(self, run: StreamedRun) -> StreamedRun:
        if self._closed or sum(other.running for other in self._runs.values()) >= MOST_RUNNING:
            if run.log is not None:
                run.log.close()
            raise ApiError(429, "LIMIT_EXCEEDED", f"{MOST_RUNNING} commands are running")
        self._runs[run.id] = run
        return run

    def _forget_old(self, _: StreamedRun) -> None:
        """Forget what ended long ago, and the oldest if there are too many or their logs are too large."""
        ended = [run for run in self._runs.values() if not run.running]
        logged = sum(run.log.kept for run in ended if run.log is not None)
        now = time.time()
        for place, run in enumerate(ended):
            assert run.finished_at is not None
            old = now - run.finished_at.timestamp() > LONGEST_REMEMBERED
            if not old and len(ended) - place <= MOST_REMEMBERED and logged <= MOST_LOGGED:
                break
            if run.log is not None:
                logged -= run.log.kept
                run.log.close()
            del self._runs[run.id]


def _is_missing(result: Result) -> bool:
    """Whether the program was not found inside, so that nothing has run."""
    return result.outcome is Outcome.SETUP_FAILED and result.exit_code == NO_PROGRAM
