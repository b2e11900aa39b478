"""`AsyncSandbox`: the same over asyncio, with no thread for a run."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, TypeVar

from stockade.policy import Policy
from stockade.receipt.account import Account, named
from stockade.sandbox.launch import Box, Prepared, prepare
from stockade.sandbox.process import PIPE, Parts, Started, late
from stockade.sandbox.result import Result
from stockade.sandbox.sandbox import Living, OnExit, command, one_shot, way, words
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.streams import Sink
from stockade.sandbox.supervise import GRACE, Ended, Run, template_of

if TYPE_CHECKING:
    from stockade.live.background import AsyncBackground
    from stockade.live.interpreter import AsyncInterpreter
    from stockade.live.shell import AsyncShell
    from stockade.receipt.statement import Who
    from stockade.workspace.files_async import AsyncFiles
    from stockade.workspace.workspace import Workspace

T = TypeVar("T")
LONGEST_LINE = 1 << 20


async def drive(work: Steps[T], events: Events) -> T:
    """Take every step, waiting in the running event loop."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] | None = None

    def wake() -> None:
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    loop.add_reader(events.fileno(), wake)
    try:
        patience = next(work)
        while True:
            waiter = loop.create_future()
            timer = None
            if events.busy or patience is not None:
                timer = loop.call_later(0 if events.busy else patience or 0, wake)
            try:
                await waiter
            except BaseException as error:
                events.ready = []
                patience = work.throw(error)
            else:
                events.wait(0)
                patience = next(work)
            finally:
                if timer is not None:
                    timer.cancel()
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]
    finally:
        loop.remove_reader(events.fileno())


async def run(
    cmd: Sequence[str],
    policy: Policy,
    *,
    input: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
    grace: float = GRACE,
    on_stdout: Sink | None = None,
    on_stderr: Sink | None = None,
    on_exit: OnExit = "keep",
    who: Who | Mapping[str, str] | None = None,
) -> Result:
    """Run one command in a sandbox of its own, as `sandbox.run` does. A cancelled one is ended first."""
    account = Account(policy, words(cmd), named(who))
    with account.telling(), Events() as events:
        prepared = account.prepared = prepare(policy, command=words(cmd), template=template_of(cmd))

        def made() -> Run:
            return command(
                prepared, cmd, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace,
                on_stdout=on_stdout, on_stderr=on_stderr, kept=False, meanwhile=account.ready,
            )  # fmt: skip

        return await drive(one_shot(prepared, made, account, events, way(on_exit)), events)


class AsyncSandbox(Living):
    """`Sandbox` for asyncio.

    >>> import asyncio, stockade
    >>> async def main():
    ...     async with stockade.AsyncSandbox(stockade.Policy()) as box:
    ...         results = await asyncio.gather(*(box.run(["echo", str(n)]) for n in range(3)))
    ...     return [result.text for result in results]
    >>> asyncio.run(main())
    ['0\\n', '1\\n', '2\\n']

    A cancelled run is ended as one whose time is over: TERM, grace, KILL; then the cancellation goes on.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        on_exit: OnExit = "keep",
        workspace: Workspace | str | None = None,
        snapshot: bool = False,
        who: Who | Mapping[str, str] | None = None,
        pinned: bool = False,
    ) -> None:
        super().__init__(
            policy, on_exit=on_exit, workspace=workspace, snapshot=snapshot, who=who, pinned=pinned
        )
        self._using = 0
        self._quiet = asyncio.Event()

    @property
    def files(self) -> AsyncFiles:
        """The files inside, as its programs see them; those of the workspace also when it has ended."""
        from stockade.workspace.files_async import AsyncFiles

        return AsyncFiles(self._found_files())

    async def __aenter__(self) -> AsyncSandbox:
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._left_by(kind)
        await self.close()

    def __del__(self) -> None:
        if self._box is not None:
            from stockade.sandbox import unclosed

            unclosed.tell("an AsyncSandbox was not closed: use `async with`", self._box.owner)
            self._left_by(ResourceWarning)
            self._end(*self._taken())

    async def open(self) -> None:
        """Raise the walls. `async with` does it."""
        with Events() as events:
            await drive(self._opening(events), events)

    async def close(self) -> None:
        """End everything inside; harmless when repeated. A cancellation is raised when that is done."""
        box, prepared = self._taken()
        ending = asyncio.ensure_future(self._ending(box, prepared))
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            while not ending.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(ending)
            raise

    async def _ending(self, box: Box | None, prepared: Prepared | None) -> None:
        try:
            if box is not None:
                while self._using and box.owner == os.getpid():
                    self._quiet.clear()
                    await self._quiet.wait()
                with Events() as events:
                    await drive(box.closed(events), events)
        finally:
            if prepared is not None and prepared.layer is None:
                self._put_away(prepared)
            elif prepared is not None:  # a tree may have to be removed
                await asyncio.get_running_loop().run_in_executor(None, self._put_away, prepared)

    async def run(
        self,
        cmd: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        on_stdout: Sink | None = None,
        on_stderr: Sink | None = None,
        who: Who | Mapping[str, str] | None = None,
    ) -> Result:
        """Run a command to its end. The sandbox and what is in it live on."""
        account = self._account(cmd, who)
        with account.telling():
            async with self._used() as (box, prepared):
                await self._snapshotted()
                run = command(
                    prepared, cmd, given=input, env=env, cwd=cwd, timeout=timeout, grace=grace,
                    on_stdout=on_stdout, on_stderr=on_stderr, kept=True, meanwhile=account.ready,
                )  # fmt: skip
                with Events() as events:
                    return await drive(self._running(box, prepared, run, events, account), events)

    async def start(
        self,
        cmd: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = PIPE,
        stderr: int | None = PIPE,
        pty: bool | tuple[int, int] = False,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        who: Who | Mapping[str, str] | None = None,
    ) -> AsyncProcess:
        """Start a command and go on, as `Sandbox.start` does; its streams are asyncio's."""
        account = self._account(cmd, who)
        with account.telling():
            async with self._used() as (box, prepared):
                await self._snapshotted()
                run = command(prepared, cmd, env=env, cwd=cwd, timeout=timeout, grace=grace, kept=True)
                with Events() as events:
                    stdio = (stdin, stdout, stderr)
                    parts = await drive(self._starting(box, run.program, stdio, pty, events), events)
                process = AsyncProcess(
                    parts,
                    lambda ended: self._judged(ended, run.program, prepared, box, account),
                    account.abandoned,
                )
                try:
                    await process._connect()
                except BaseException:
                    await process.close()
                    raise
                return process

    def shell(self, *, first: bool = False) -> AsyncShell:
        """One bash for many runs: directory, variables and functions stay. It starts with the first.

        With `first` it is process 2, the first one after the gate: nothing else may have been run before.
        """
        from stockade.live.shell import AsyncShell

        return AsyncShell(self, first=first)

    def python(
        self, *, preload: Iterable[str] = (), executable: str = "python3", ipython: bool | None = None
    ) -> AsyncInterpreter:
        """One Python for many runs: its variables stay. It starts with the first, and imports `preload`.

        IPython's shell runs the code where that is installed inside, or as `ipython` says.
        """
        from stockade.live.interpreter import AsyncInterpreter

        return AsyncInterpreter(self, preload, executable, ipython)

    async def background(
        self,
        cmd: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        who: Who | Mapping[str, str] | None = None,
    ) -> AsyncBackground:
        """Start a command whose output is kept aside, outside, to be read from any byte on."""
        from stockade.live.background import AsyncBackground

        return AsyncBackground(
            self, cmd, input=input, env=env, cwd=cwd, timeout=timeout, grace=grace, who=who
        )

    async def _snapshotted(self) -> None:
        if self._snapshot:
            await asyncio.get_running_loop().run_in_executor(None, self._before_run)

    @contextlib.asynccontextmanager
    async def _used(self) -> AsyncIterator[tuple[Box, Prepared]]:
        """The sandbox for the time of one call: it is not closed meanwhile."""
        opened = self._opened()
        self._using += 1
        try:
            yield opened
        finally:
            self._using -= 1
            self._quiet.set()


class AsyncProcess(Started):
    """A command that runs in a living `AsyncSandbox`; stdin is a StreamWriter, the others StreamReaders."""

    stdin: asyncio.StreamWriter | None = None
    stdout: asyncio.StreamReader | None = None
    stderr: asyncio.StreamReader | None = None

    def __init__(
        self, parts: Parts, judged: Callable[[Ended], Result], abandoned: Callable[[], None]
    ) -> None:
        super().__init__(parts, judged, abandoned)
        self._lock = asyncio.Lock()
        self._transports: list[asyncio.BaseTransport] = []
        self._files = [
            None if stream < 0 else os.fdopen(stream, mode, 0)
            for stream, mode in zip(parts.streams, ("wb", "rb", "rb"), strict=True)
        ]

    def __del__(self) -> None:
        self._let_go()

    async def _connect(self) -> None:
        stdin, stdout, stderr = self._files
        loop = asyncio.get_running_loop()
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
        transport, _ = await loop.connect_read_pipe(lambda: _Screen(reader, loop=loop), file)
        self._transports.append(transport)
        return reader

    async def __aenter__(self) -> AsyncProcess:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def wait(self, timeout: float | None = None) -> Result:
        """How it ended, once it has. A `TimeoutError` after the timeout leaves it running."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout):
                await self._lock.acquire()
        except TimeoutError:
            raise late(timeout) from None
        try:
            with Events() as events:
                return await drive(self._waiting(events, timeout, began), events)
        finally:
            self._lock.release()

    async def close(self) -> None:
        """End what still runs of it, and close its streams."""
        self._hang_up()
        async with self._lock:
            self._let_go()
        self._terminal = -1
        while self._transports:
            self._transports.pop().close()
        for file in self._files:  # those that were not connected
            if file is not None:
                file.close()
        await asyncio.sleep(0)  # they close their files in the loop's next round


class _Screen(asyncio.StreamReaderProtocol):
    """Takes a terminal whose last user has gone, where the kernel says EIO, for one that has ended."""

    def connection_lost(self, exc: Exception | None) -> None:
        gone = isinstance(exc, OSError) and exc.errno == errno.EIO
        super().connection_lost(None if gone else exc)
