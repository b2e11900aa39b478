"""Commands that run in the background, and the logs of what they print.

A log is an unlinked file in the state directory: the program cannot reach it,
and the kernel frees it when the supervisor ends. The pipes must be emptied
meanwhile: by a thread for each command of a `Sandbox`, by a task for each
command of an `AsyncSandbox`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Literal

import msgspec

from stockade.errors import PolicyError, SetupError
from stockade.linux import os_errors
from stockade.result import Result
from stockade.runs.command import command, still_running_error
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.io.streams import MOST_SPILLED
from stockade.runs.options import BackgroundOptions, refuse_unknown
from stockade.runs.supervise import Run
from stockade.sessions.session import AsyncLivingSandbox, LivingSandbox

Stream = Literal["stdout", "stderr"]
#: How many bytes of a log one call reads by default.
AT_ONCE = 1 << 20


class Piece(msgspec.Struct, frozen=True):
    """A piece of a log: the bytes, where the next piece begins, and whether more can come."""

    data: bytes
    cursor: int
    ended: bool
    #: Bytes at the end that were lost: the disk was full, or the log reached its limit.
    lost: int = 0


class Log:
    """Everything that the command has written to one stream."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        self._size = self.lost = 0

    def write(self, data: bytes) -> None:
        """Append the data. Once something does not fit, it and everything after it is only counted."""
        view = memoryview(data)
        try:
            while view and not self.lost and self._size < MOST_SPILLED:
                wrote = os.pwrite(self._file, view, self._size)
                self._size += wrote
                view = view[wrote:]
        except OSError:
            pass
        self.lost += len(view)

    def read(self, cursor: int, most: int) -> bytes:
        """Return up to `most` bytes from `cursor` on."""
        return os.pread(self._file, max(0, min(most, self._size - cursor)), cursor)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _KillRequest(Exception):
    """The caller wants the command to end."""


class BackgroundBase:
    """What `Background` and `AsyncBackground` share: everything but the waiting."""

    _result: Result | None = None
    _failure: BaseException | None = None
    _ended = False
    _logs: dict[str, Log]

    def _open(self, run: Run, killed: type[BaseException]) -> Run:
        """Open the logs and return the run that writes to them. `killed` is the exception that ends it."""
        self._logs = {}
        assert run.spill is not None
        with os_errors.setup_errors():
            try:
                for stream in ("stdout", "stderr"):
                    self._logs[stream] = Log(run.spill(stream)[0])
            except BaseException:
                self._close_logs()
                raise
        out, err = self._logs["stdout"], self._logs["stderr"]
        return msgspec.structs.replace(
            run,
            spill=None,
            on_stdout=out.write,
            on_stderr=err.write,
            cancelled_by=(killed,),
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.status}>"

    @property
    def status(self) -> str:
        """ "running", "failed", or the outcome of its result."""
        if not self._ended:
            return "running"
        return "failed" if self._result is None else self._result.outcome.value

    @property
    def result(self) -> Result | None:
        """The result, once the command has ended; its output is in the logs."""
        return self._result

    def logs(self, cursor: int = 0, *, stream: Stream = "stdout", most: int = AT_ONCE) -> Piece:
        """Read a log from a byte on. The piece says where the next one begins."""
        if stream not in self._logs:
            raise PolicyError(f"stream = {stream!r}: no such stream", hint='write "stdout" or "stderr"')
        if cursor < 0 or most < 0:
            raise PolicyError(
                f"logs({cursor}, most={most}): negative numbers are not allowed", hint="begin with 0"
            )
        log, ended = self._logs[stream], self._ended
        if log._file < 0:
            raise SetupError("the background command was closed", stage="background")
        data = log.read(cursor, most)
        # `ended` was read before the data: a command that had ended by then cannot have written more.
        whole = ended and cursor + len(data) >= log._size
        return Piece(data, cursor + len(data), whole, log.lost if whole else 0)

    def _close_logs(self) -> None:
        for log in getattr(self, "_logs", {}).values():
            log.close()

    def _finished_result(self) -> Result:
        if self._failure is not None:
            raise self._failure
        if self._result is None:
            raise SetupError("the background command was killed before it began", stage="background")
        return self._result


class Background(BackgroundBase):
    """A command in the background of a `Sandbox`.

    >>> import stockade
    >>> with stockade.Sandbox() as box, box.background(["seq", "3"]) as job:
    ...     job.wait().ok, job.status
    ...     first = job.logs(most=4)
    ...     first.data, job.logs(first.cursor).data
    (True, 'exited')
    (b'1\\n2\\n', b'3\\n')

    It ends with its sandbox. Closing it, or leaving its `with` statement, ends it and frees its logs.
    """

    def __init__(self, sandbox: LivingSandbox, cmd: Sequence[str], options: BackgroundOptions) -> None:
        refuse_unknown("background", options, BackgroundOptions.__optional_keys__)
        self._done, self._kill_fd = threading.Event(), -1
        self._kill_lock = threading.Lock()
        self._sandbox = sandbox
        self._account = sandbox.account(cmd, options.get("who"))
        run = command(sandbox.require_open()[1], cmd, options, kept=True)
        sandbox.before_run()
        self._run = self._open(run, _KillRequest)
        with os_errors.setup_errors():
            self._kill_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._work, name="stockade-background", daemon=True)
        self._thread.start()

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        self._close_logs()

    def _work(self) -> None:
        try:
            with self._account.telling(), self._sandbox.use() as (box, prepared), Events() as events:
                steps = self._sandbox.run(box, prepared, self._run, events, self._account)
                self._result = _drive_until_killed(steps, events, self._kill_fd)
        except BaseException as error:
            self._failure = error
        finally:
            self._ended = True
            with self._kill_lock:
                os.close(self._kill_fd)
                self._kill_fd = -1
            self._done.set()

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end and return the result. A `TimeoutError` after the timeout leaves it running."""
        if not self._done.wait(timeout):
            raise still_running_error(timeout)
        return self._finished_result()

    def kill(self) -> None:
        """Send TERM to all its processes, and KILL after the grace."""
        with self._kill_lock:
            if self._kill_fd >= 0:
                os.eventfd_write(self._kill_fd, 1)

    def close(self) -> None:
        """End the command and free its logs."""
        self.kill()
        self._thread.join()
        self._close_logs()


def _drive_until_killed(steps: Steps[Result], events: Events, kill_fd: int) -> Result:
    """Take every step in this thread, and end the run when the eventfd says so."""
    events.watch(kill_fd)
    try:
        patience = next(steps)
        while True:
            events.wait(patience)
            if kill_fd in events.ready:
                events.forget(kill_fd)
                kill_fd, events.ready = -1, []
                patience = steps.throw(_KillRequest())
            else:
                patience = next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        if kill_fd >= 0:
            events.forget(kill_fd)


class AsyncBackground(BackgroundBase):
    """A command in the background of an `AsyncSandbox`: `Background` with `await`."""

    def __init__(self, sandbox: AsyncLivingSandbox, cmd: Sequence[str], options: BackgroundOptions) -> None:
        import asyncio

        refuse_unknown("background", options, BackgroundOptions.__optional_keys__)
        self._sandbox, self._killed = sandbox, False
        self._account = sandbox.account(cmd, options.get("who"))
        run = command(sandbox.require_open()[1], cmd, options, kept=True)
        self._run = self._open(run, asyncio.CancelledError)
        self._task = asyncio.get_running_loop().create_task(self._work())
        self._task.add_done_callback(self._end)

    async def __aenter__(self) -> AsyncBackground:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __del__(self) -> None:
        self._close_logs()

    def _end(self, _: object) -> None:
        self._ended = True

    async def _work(self) -> None:
        from stockade.runs.io import async_eventloop

        try:
            with self._account.telling():
                async with self._sandbox.use() as (box, prepared):
                    await self._sandbox.before_run()
                    with Events() as events:
                        self._result = await async_eventloop.drive(
                            self._sandbox.run(box, prepared, self._run, events, self._account), events
                        )
        except BaseException as error:
            self._failure = error

    async def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end and return the result. A `TimeoutError` after the timeout leaves it running."""
        import asyncio

        done, _ = await asyncio.wait([self._task], timeout=timeout)
        if not done:
            raise still_running_error(timeout)
        return self._finished_result()

    def kill(self) -> None:
        """Send TERM to all its processes, and KILL after the grace."""
        if not self._killed:  # a second cancellation would cut the grace short
            self._killed = True
            self._task.cancel()

    async def close(self) -> None:
        """End the command and free its logs."""
        import asyncio

        self.kill()
        await asyncio.wait([self._task])
        self._close_logs()
