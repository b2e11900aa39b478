"""`AsyncSandbox`: `Sandbox` over asyncio, without a thread for each run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import IO, TYPE_CHECKING, Unpack

import stockade
from stockade.errors import SetupError
from stockade.policy.model import PolicyLike
from stockade.result import Result
from stockade.runs.command import command, still_running_error
from stockade.runs.io.async_eventloop import drive, watch
from stockade.runs.io.eventloop import Events
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.options import (
    BackgroundOptions,
    OneShotOptions,
    ProcessOptions,
    RunOptions,
    refuse_unknown,
)
from stockade.runs.prepare import RunPreparation
from stockade.runs.supervise import RunEnding
from stockade.sandbox.process import ProcessBase, ProcessHandles
from stockade.sandbox.sandbox import NO_EXTRAS, SandboxBase, run_once_steps

if TYPE_CHECKING:
    from stockade.sessions.session import AsyncLivingSandbox

LONGEST_LINE = 1 << 20


async def run_async(
    cmd: Sequence[str], policy: PolicyLike | None = None, **options: Unpack[OneShotOptions]
) -> Result:
    """Run one command in its own sandbox: `stockade.run` with `await`, and with the same options.

    >>> import asyncio, stockade
    >>> asyncio.run(stockade.run_async(["cat"], input="hello")).text
    'hello'

    Cancelling it ends the command first: TERM, grace, KILL.
    """
    refuse_unknown("run_async", options, OneShotOptions.__optional_keys__)
    with Events() as events:
        return await drive(run_once_steps(cmd, policy, options, NO_EXTRAS, events), events)


class AsyncSandbox(SandboxBase):
    """`Sandbox` for asyncio.

    >>> import asyncio, stockade
    >>> async def main():
    ...     async with stockade.AsyncSandbox(stockade.Policy()) as box:
    ...         results = await asyncio.gather(*(box.run(["echo", str(n)]) for n in range(3)))
    ...     return [result.text for result in results]
    >>> asyncio.run(main())
    ['0\\n', '1\\n', '2\\n']

    A cancelled run ends like one whose time is over: TERM, grace, KILL; then the cancellation is raised.
    """

    def _set_up(self) -> None:
        self._quiet = asyncio.Event()

    @property
    def files(self) -> stockade.workspace.AsyncFiles:
        """The files inside, as programs see them; those of the workspace also after the sandbox has ended."""
        from stockade.workspace.files.async_files import AsyncFiles

        return AsyncFiles(self._open_files())

    @property
    def net(self) -> stockade.sandbox.AsyncSandboxNetwork:
        """The network: rules that can change while the sandbox lives, and published ports."""
        from stockade.sandbox.network import AsyncSandboxNetwork

        return AsyncSandboxNetwork(self)

    @property
    def secrets(self) -> stockade.sandbox.AsyncSandboxSecrets:
        """The secrets: their placeholders, and values that can be read again while the sandbox lives."""
        from stockade.sandbox.secrets import AsyncSandboxSecrets

        return AsyncSandboxSecrets(self)

    async def __aenter__(self) -> AsyncSandbox:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left_by(kind)
        await self.close()

    def __del__(self) -> None:
        if self._box is not None:
            from stockade.sandbox import finalize

            finalize.warn_unclosed("an AsyncSandbox was not closed: use `async with`", self._box.owner)
            self._left_by(ResourceWarning)
            self._end(*self._detach())

    async def open(self) -> None:
        """Raise the walls. `async with` calls this."""
        with Events() as events:
            await drive(self._open_steps(events), events)

    async def close(self) -> None:
        """End everything inside; harmless when repeated. A cancellation is raised after that."""
        box, prepared = self._detach()
        ending = asyncio.ensure_future(self._ending(box, prepared))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)
            raise

    async def _ending(self, box: LaunchedSandbox | None, prepared: RunPreparation | None) -> None:
        try:
            if box is not None:
                while self._using and box.owner == os.getpid():
                    self._quiet.clear()
                    await self._quiet.wait()
                with Events() as events:
                    await drive(box.closed(events), events)
        finally:
            if prepared is None:
                pass
            elif not prepared.layers and not prepared.resolved.repositories.trees:
                self._put_away(prepared)
            else:  # this may remove or walk a whole tree
                await asyncio.get_running_loop().run_in_executor(None, self._put_away, prepared)

    async def run(self, cmd: Sequence[str], **options: Unpack[RunOptions]) -> Result:
        """Run a command to its end, as `Sandbox.run` does. The sandbox and its other programs live on."""
        refuse_unknown("run", options, RunOptions.__optional_keys__)
        self._require_observer(options.get("explain", False))
        account = self._account(cmd, options.get("who"), advise=options.get("advise", False))
        with account.telling():
            async with self._in_use() as (box, prepared):
                await self._snapshot_before_run()
                run = command(prepared, cmd, options, kept=True, meanwhile=account.ready)
                with Events() as events:
                    return await drive(self._run_steps(box, prepared, run, events, account), events)

    async def start(self, cmd: Sequence[str], **options: Unpack[ProcessOptions]) -> AsyncProcess:
        """Start a command without waiting for its end, as `Sandbox.start` does; its streams are asyncio's."""
        account, run, stdio = self._start_request(cmd, options)
        with account.telling():
            async with self._in_use() as (box, prepared):
                await self._snapshot_before_run()
                with Events() as events:
                    steps = self._start_steps(box, run.program, stdio, options.get("pty", False), events)
                    parts = await drive(steps, events)
                process = AsyncProcess(
                    parts,
                    lambda ended: self._make_result(ended, run.program, prepared, box, account),
                    account.abandoned,
                )
                try:
                    await process._connect()
                except BaseException:
                    await process.close()
                    raise
                return process

    def shell(self, *, first: bool = False) -> stockade.sandbox.AsyncShell:
        """Return one bash for many runs: directory, variables and functions stay. The first run starts it.

        With `first` it is process 2, right after init: nothing else may have run in the sandbox before.
        """
        from stockade.sessions.shell import AsyncShell

        return AsyncShell(self._living(), first=first)

    def python(
        self, *, preload: Iterable[str] = (), executable: str = "python3", ipython: bool | None = None
    ) -> stockade.sandbox.AsyncInterpreter:
        """Return one Python for many runs; its variables stay. The first run starts it and imports `preload`.

        IPython's shell runs the code if it is installed inside; `ipython` forces or forbids that.
        """
        from stockade.sessions.interpreter import AsyncInterpreter

        return AsyncInterpreter(self._living(), preload, executable, ipython)

    async def background(
        self, cmd: Sequence[str], **options: Unpack[BackgroundOptions]
    ) -> stockade.sandbox.AsyncBackground:
        """Start a command whose output goes to logs outside, as `Sandbox.background` does."""
        from stockade.sessions.background import AsyncBackground

        return AsyncBackground(self._living(), cmd, options)

    def _run_as(self, uid: int | None, gid: int | None = None) -> AsyncSandbox:
        """Return a view of this sandbox whose runs, processes, shells and backgrounds are another user's.

        The ids are those inside a private environment, and need no entry in its /etc/passwd. None means root.
        """
        from stockade.sandbox.identity import AsyncSandboxView

        return AsyncSandboxView(self, uid, gid)

    def _living(self) -> AsyncLivingSandbox:
        """Return the calls into this sandbox that a session needs."""
        from stockade.sessions.session import AsyncLivingSandbox

        return AsyncLivingSandbox(
            self._require_open,
            self._account,
            self._run_steps,
            self._make_result,
            self._snapshot_before_run,
            self._in_use,
        )

    async def _snapshot_before_run(self) -> None:
        if self._snapshot:
            await asyncio.get_running_loop().run_in_executor(None, self._before_run)

    @contextlib.asynccontextmanager
    async def _in_use(self) -> AsyncIterator[tuple[LaunchedSandbox, RunPreparation]]:
        """Yield the open sandbox and keep `close` waiting until the call is done."""
        opened = self._require_open()
        self._using += 1
        try:
            yield opened
        finally:
            self._using -= 1
            self._quiet.set()


class AsyncProcess(ProcessBase):
    """A command running in a living `AsyncSandbox`; stdin is a StreamWriter, the others StreamReaders."""

    stdin: asyncio.StreamWriter | None = None
    stdout: asyncio.StreamReader | None = None
    stderr: asyncio.StreamReader | None = None

    def __init__(
        self, parts: ProcessHandles, make_result: Callable[[RunEnding], Result], abandoned: Callable[[], None]
    ) -> None:
        super().__init__(parts, make_result, abandoned)
        self._lock = asyncio.Lock()
        self._transports: list[asyncio.BaseTransport] = []
        self._files = [
            None if stream < 0 else os.fdopen(stream, mode, 0)
            for stream, mode in zip(parts.streams, ("wb", "rb", "rb"), strict=True)
        ]

    def __del__(self) -> None:
        self._close_channel()

    async def _connect(self) -> None:
        stdin, stdout, stderr = self._files
        loop = asyncio.get_running_loop()
        # Try it first: inside a transport the loop would only log the error, and never read anything.
        for file in filter(None, self._files):
            if not watch(file.fileno(), lambda: None):
                raise SetupError(
                    "the event loop cannot watch the streams: this user has used up all epoll watches",
                    stage="supervisor",
                    errno=errno.ENOSPC,
                    hint="end the programs that use them, or raise sysctl fs.epoll.max_user_watches",
                )
            loop.remove_reader(file.fileno())
        if stdin is not None:
            writing = asyncio.streams.FlowControlMixin()
            transport, _ = await loop.connect_write_pipe(lambda: writing, stdin)
            self.stdin = asyncio.StreamWriter(transport, writing, None, loop)
            self._transports.append(transport)
        self.stdout = await self._reader(stdout)
        self.stderr = await self._reader(stderr)
        self._files = []

    async def _reader(self, file: IO[bytes] | None) -> asyncio.StreamReader | None:
        if file is None:
            return None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(LONGEST_LINE, loop)
        transport, _ = await loop.connect_read_pipe(lambda: _AsyncTerminalReader(reader, loop=loop), file)
        self._transports.append(transport)
        return reader

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end and return the result. A `TimeoutError` after the timeout leaves it running."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise still_running_error(timeout) from None
        try:
            with Events() as events:
                return await drive(self._wait_steps(events, timeout, began), events)
        finally:
            self._lock.release()

    async def close(self) -> None:
        """End its remaining processes and close its streams."""
        self._hang_up()
        async with self._lock:
            self._close_channel()
        self._terminal = -1
        while self._transports:
            self._transports.pop().close()
        for file in self._files:  # streams that were never connected
            if file is not None:
                file.close()
        await asyncio.sleep(0)  # the transports close their files in the loop's next round


class _AsyncTerminalReader(asyncio.StreamReaderProtocol):
    """Treats EIO, which the kernel reports when a terminal's last user has gone, as the end of file."""

    def connection_lost(self, exc: Exception | None) -> None:
        gone = isinstance(exc, OSError) and exc.errno == errno.EIO
        super().connection_lost(None if gone else exc)
