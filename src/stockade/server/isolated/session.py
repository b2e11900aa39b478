"""One isolated session: a sandbox of its own whose first process is the shell that serves its runs.

Runs take turns: the shell serves one at a time, and a commit or a reset waits
for its turn too. The idle clock starts when the last use has ended and stands
still during a use. The shell is the session: when it has ended, the session is
dead, its background runs are ended, and what is left is its changes, to read
or to delete.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.errors import ConflictError, PolicyError
from stockade.result import Outcome, Result
from stockade.server.execd.output_log import OutputLog
from stockade.server.isolated.background_run import TERMINATED, BackgroundRun
from stockade.server.isolated.session_request import RunRequest, SessionSpec
from stockade.server.isolated.shell_state import save_state
from stockade.server.record import new_id
from stockade.server.tally import TALLY
from stockade.server.wire.errors import ServerPaths

if TYPE_CHECKING:
    from stockade.runs.io.streams import Sink
    from stockade.sandbox.file_worker import FileWorker
    from stockade.server.isolated.session_sandbox import SessionSandbox

#: What a client reads when it runs something in a session whose shell has ended.
EXITED = "session process has exited"
#: How many background runs of a session may be known at once; the oldest finished one is forgotten first.
MOST_RUNS = 64
#: Seconds from the interrupt of a run to its kill.
GRACE = 2.0


class IsolatedRunEnd(msgspec.Struct, frozen=True):
    """How a run ended, as the event stream says it: the name and value of an error, or neither."""

    milliseconds: float
    ename: str = ""
    evalue: str = ""
    traceback: tuple[str, ...] = ()


class IsolatedSession:
    """A session as the server keeps it."""

    def __init__(
        self,
        id: str,
        spec: SessionSpec,
        sandbox: SessionSandbox,
        logs: str,
        expire: Callable[[IsolatedSession], object],
    ) -> None:
        """Keep an open sandbox as a session. Background runs write to `logs`; `expire` ends the session."""
        self.id, self.spec, self.sandbox = id, spec, sandbox
        self.created_at = self.last_run_at = datetime.now(UTC)
        self.runs: dict[str, BackgroundRun] = {}
        self._logs, self._expire = logs, expire
        self._turn = asyncio.Lock()
        #: Held while the sandbox is replaced or its layers are read: it is not closed meanwhile.
        self._steady = asyncio.Lock()
        self._closed = False
        self._foreground: dict[str, asyncio.Task[IsolatedRunEnd]] = {}
        self._uses, self._idle_since = 0, time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._start_clock()

    @property
    def status(self) -> Literal["active", "dead"]:
        """Whether its shell lives."""
        return "dead" if self.sandbox.ended else "active"

    def check(self) -> None:
        """End the background runs of a session whose shell has ended."""
        if self.sandbox.ended:
            self._end_runs(TERMINATED)

    @property
    def idle_remaining(self) -> int | None:
        """Seconds until the session expires if nothing uses it; None if it does not expire."""
        if not self.spec.idle_timeout_seconds:
            return None
        idle = 0.0 if self._uses else time.monotonic() - self._idle_since
        return max(0, round(self.spec.idle_timeout_seconds - idle))

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the idle clock at zero."""
        self._uses += 1
        self._stop_clock()
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._idle_since = time.monotonic()
                self._start_clock()

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Wait until no run, commit or reset is going on, and keep others out."""
        with self.in_use():
            async with self._turn:
                yield

    @contextlib.asynccontextmanager
    async def steady(self) -> AsyncIterator[None]:
        """Use the layers, which a deletion of the session waits for; refused if the session is ending."""
        with self.in_use():
            async with self._steady:
                self._require_open()
                yield

    def _require_open(self) -> None:
        if self._closed:
            raise ConflictError("the session has been deleted")

    async def file_worker(self) -> FileWorker:
        """Return what makes the session's file calls, with the rights of its user."""
        return await self.sandbox.workers.of(self.spec.uid, self.spec.gid)

    def start(
        self, request: RunRequest, on_stdout: Sink, on_stderr: Sink
    ) -> tuple[str, asyncio.Task[IsolatedRunEnd]]:
        """Start a run as soon as it is its turn; return its id and the task that ends with it."""
        id = new_id()
        task = asyncio.ensure_future(self._run(request, on_stdout, on_stderr))
        self._foreground[id] = task
        task.add_done_callback(lambda _: self._foreground.pop(id, None))
        return id, task

    async def _run(self, request: RunRequest, on_stdout: Sink, on_stderr: Sink) -> IsolatedRunEnd:
        async with self.turn():
            began = time.monotonic()
            self.last_run_at = datetime.now(UTC)
            if self.sandbox.ended:
                self.check()
                return IsolatedRunEnd(0.0, "SessionError", EXITED)
            result = await self.sandbox.shell.run(
                request.code,
                env=request.envs,
                timeout=request.timeout_seconds or None,
                grace=GRACE,
                on_stdout=on_stdout,
                on_stderr=on_stderr,
            )
            self.check()
            milliseconds = (time.monotonic() - began) * 1000
            TALLY.note_run("isolated", milliseconds, result)
            return run_end(result, milliseconds, died=self.sandbox.ended)

    def interrupt(self, run_id: str) -> bool:
        """Begin to end a run, in the foreground or the background; return whether there is such a run."""
        if (task := self._foreground.get(run_id)) is not None:
            task.cancel()
        elif (run := self.runs.get(run_id)) is not None:
            run.end("interrupted")
        return task is not None or run_id in self.runs

    async def start_background(self, request: RunRequest) -> BackgroundRun:
        """Start a run that goes on by itself; it begins with the shell's state, so it waits for its turn."""
        first = self.spec.overlays[0]
        if first.mode == "ro" or first.persist is False:
            kind = "read-only" if first.mode == "ro" else "not kept (persist = false)"
            raise PolicyError(f"background: the session's first mount, {first.path}, is {kind}")
        async with self.turn():
            if self.sandbox.ended:
                raise ConflictError(EXITED)
            self._forget_finished()
            state = await save_state(self.sandbox.shell)
            self._require_open()
            self.last_run_at = datetime.now(UTC)
            use = contextlib.ExitStack()
            use.enter_context(self.in_use())
            run = BackgroundRun(
                new_id(), self.id, self.sandbox.view, request.code, request.envs or {}, state,
                OutputLog(self._logs), use.close,
            )  # fmt: skip
            self.runs[run.id] = run
            return run

    def _forget_finished(self) -> None:
        """Make room for one more background run, or refuse it."""
        for id, run in list(self.runs.items()):
            if len(self.runs) >= MOST_RUNS and not run.running:
                self.runs.pop(id).close()
        if len(self.runs) >= MOST_RUNS:
            raise ConflictError(f"{MOST_RUNS} background runs of this session are going on already")

    async def replace_sandbox(self, reopen: Callable[[], Awaitable[SessionSandbox]]) -> None:
        """Go on in a new sandbox with empty layers; the shell keeps its state. The caller has the turn, and
        keeps the session `steady`.
        """
        if any(run.running for run in self.runs.values()):
            raise ConflictError("a background run of this session is going on: wait for it, or interrupt it")
        state = b"" if self.sandbox.ended else await save_state(self.sandbox.shell)
        fresh = await reopen()
        try:
            await fresh.restore(state)
        except BaseException:
            await fresh.close()
            raise
        old, self.sandbox = self.sandbox, fresh
        await old.close()

    def _end_runs(self, reason: str) -> None:
        for run in self.runs.values():
            run.end(reason)

    async def close(self) -> None:
        """End everything in it and remove everything of it."""
        self._closed = True
        self._stop_clock()
        self._uses += 1  # the clock never starts again
        for task in tuple(self._foreground.values()):
            task.cancel()
        self._end_runs(TERMINATED)
        async with self._steady:
            await self.sandbox.close()
        for run in self.runs.values():
            await run.wait()
            run.close()

    def restart_clock(self) -> None:
        """Begin to count the idle time anew, unless something uses the session."""
        if not self._uses:
            self._idle_since = time.monotonic()
            self._start_clock()

    def _start_clock(self) -> None:
        if self.spec.idle_timeout_seconds:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.spec.idle_timeout_seconds, self._expire, self)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def run_end(result: Result, milliseconds: float, *, died: bool) -> IsolatedRunEnd:
    """Say how a run ended: nothing for success, else an error whose value is the exit code, if any."""
    reason = ServerPaths.hide(result.reason)
    words = (reason,) if reason else ()
    if died:
        return IsolatedRunEnd(milliseconds, "SessionError", EXITED, words)
    if result.outcome is Outcome.TIMED_OUT:
        return IsolatedRunEnd(milliseconds, "TimeoutError", reason, words)
    if result.ok:
        return IsolatedRunEnd(milliseconds)
    return IsolatedRunEnd(milliseconds, "ExitError", str(result.exit_code), words)
