"""Commands that run in the background, and the logs of what they print.

A log is a file of the state directory that has no name any more: nothing
inside can reach it, and nothing is left of it when whoever reads it has gone.
Somebody has to empty the pipes meanwhile: a thread for each command of a
`Sandbox`, a task for each of an `AsyncSandbox`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from stockade.errors import PolicyError, SetupError
from stockade.sandbox import scarce
from stockade.sandbox.process import late
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import command
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.streams import MOST_SPILLED
from stockade.sandbox.supervise import Run

if TYPE_CHECKING:
    from stockade.receipt.statement import Who
    from stockade.sandbox.aio import AsyncSandbox
    from stockade.sandbox.sandbox import Sandbox

Stream = Literal["stdout", "stderr"]
#: What one call reads of a log unless told otherwise.
AT_ONCE = 1 << 20


class Piece(msgspec.Struct, frozen=True):
    """A piece of a log: the bytes, where the next piece begins, and whether more can come."""

    data: bytes
    cursor: int
    ended: bool
    #: Bytes at the end that were not kept: the disk was full, or there were too many.
    lost: int = 0


class Log:
    """What one stream printed, from the first byte on."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.unlink(path)
        self._size = self.lost = 0

    def write(self, data: bytes) -> None:
        """Keep the data; what does not fit is counted, and with it all that follows."""
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
        """What is there from that byte on."""
        return os.pread(self._file, max(0, min(most, self._size - cursor)), cursor)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Killed(Exception):
    """Somebody wants it to end."""


class Kept:
    """What `Background` and `AsyncBackground` share: everything but the waiting."""

    _result: Result | None = None
    _failure: BaseException | None = None
    _ended = False
    _logs: dict[str, Log]

    def _open(self, run: Run, killed: type[BaseException]) -> Run:
        """The logs, and the run that prints into them. What is raised to kill it is part of its result."""
        self._logs = {}
        assert run.spill is not None
        with scarce.refused():
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

    @property
    def status(self) -> str:
        """ "running", or how it ended: the outcome of its result."""
        if not self._ended:
            return "running"
        return "failed" if self._result is None else self._result.outcome.value

    @property
    def result(self) -> Result | None:
        """Its result once it has ended; its output is in the logs."""
        return self._result

    def logs(self, cursor: int = 0, *, stream: Stream = "stdout", most: int = AT_ONCE) -> Piece:
        """What it has printed from a byte on. The piece says where the next one begins."""
        if stream not in self._logs:
            raise PolicyError(f"stream = {stream!r}: is not a stream", hint='write "stdout" or "stderr"')
        if cursor < 0 or most < 0:
            raise PolicyError(f"logs({cursor}, most={most}): is less than nothing", hint="begin with 0")
        log, ended = self._logs[stream], self._ended
        if log._file < 0:
            raise SetupError("the background command was closed", stage="background")
        data = log.read(cursor, most)
        # What had ended before it was read has nothing to add.
        whole = ended and cursor + len(data) >= log._size
        return Piece(data, cursor + len(data), whole, log.lost if whole else 0)

    def _close_logs(self) -> None:
        for log in getattr(self, "_logs", {}).values():
            log.close()

    def _said(self) -> Result:
        if self._failure is not None:
            raise self._failure
        if self._result is None:
            raise SetupError("it was killed before it began", stage="background")
        return self._result


class Background(Kept):
    """A command in the background of a `Sandbox`.

    >>> import stockade
    >>> with stockade.Sandbox() as box, box.background(["seq", "3"]) as job:
    ...     job.wait().ok, job.status
    ...     first = job.logs(most=4)
    ...     first.data, job.logs(first.cursor).data
    (True, 'exited')
    (b'1\\n2\\n', b'3\\n')

    It ends with its sandbox. Closing it, or leaving its `with` statement, ends it and lets go of its logs.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        cmd: Sequence[str],
        *,
        input: bytes,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        timeout: float | None,
        grace: float,
        who: Who | Mapping[str, str] | None,
    ) -> None:
        self._done, self._told = threading.Event(), -1
        self._telling = threading.Lock()
        self._sandbox = sandbox
        self._account = sandbox._account(cmd, who)
        run = command(
            sandbox._opened()[1], cmd, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace, kept=True
        )
        sandbox._before_run()
        self._run = self._open(run, _Killed)
        with scarce.refused():
            self._told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
            with self._account.telling(), self._sandbox._used() as (box, prepared), Events() as events:
                steps = self._sandbox._running(box, prepared, self._run, events, self._account)
                self._result = _driven(steps, events, self._told)
        except BaseException as error:
            self._failure = error
        finally:
            self._ended = True
            with self._telling:
                os.close(self._told)
                self._told = -1
            self._done.set()

    def wait(self, timeout: float | None = None) -> Result:
        """How it ended, once it has. A `TimeoutError` after the timeout leaves it running."""
        if not self._done.wait(timeout):
            raise late(timeout)
        return self._said()

    def kill(self) -> None:
        """Ask every process of it to end, and kill what is left after the grace."""
        with self._telling:
            if self._told >= 0:
                os.eventfd_write(self._told, 1)

    def close(self) -> None:
        """End it, and let go of its logs."""
        self.kill()
        self._thread.join()
        self._close_logs()


def _driven(steps: Steps[Result], events: Events, told: int) -> Result:
    """Take every step, waiting in this thread, until somebody wants it to end."""
    events.watch(told)
    try:
        patience = next(steps)
        while True:
            events.wait(patience)
            if told in events.ready:
                events.forget(told)
                told, events.ready = -1, []
                patience = steps.throw(_Killed())
            else:
                patience = next(steps)
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        if told >= 0:
            events.forget(told)


class AsyncBackground(Kept):
    """A command in the background of an `AsyncSandbox`; as `Background`, with `await`."""

    def __init__(
        self,
        sandbox: AsyncSandbox,
        cmd: Sequence[str],
        *,
        input: bytes,
        env: Mapping[str, str] | None,
        cwd: str | os.PathLike[str] | None,
        timeout: float | None,
        grace: float,
        who: Who | Mapping[str, str] | None,
    ) -> None:
        import asyncio

        self._sandbox, self._killed = sandbox, False
        self._account = sandbox._account(cmd, who)
        prepared = sandbox._opened()[1]
        run = command(prepared, cmd, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace, kept=True)
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
        from stockade.sandbox import aio

        try:
            with self._account.telling():
                async with self._sandbox._used() as (box, prepared):
                    await self._sandbox._snapshotted()
                    with Events() as events:
                        self._result = await aio.drive(
                            self._sandbox._running(box, prepared, self._run, events, self._account), events
                        )
        except BaseException as error:
            self._failure = error

    async def wait(self, timeout: float | None = None) -> Result:
        """How it ended, once it has. A `TimeoutError` after the timeout leaves it running."""
        import asyncio

        done, _ = await asyncio.wait([self._task], timeout=timeout)
        if not done:
            raise late(timeout)
        return self._said()

    def kill(self) -> None:
        """Ask every process of it to end, and kill what is left after the grace."""
        if not self._killed:  # once: the second time it would not be given its grace
            self._killed = True
            self._task.cancel()

    async def close(self) -> None:
        """End it, and let go of its logs."""
        import asyncio

        self.kill()
        await asyncio.wait([self._task])
        self._close_logs()
