"""What lives in an `AsyncRemoteSandbox`: background commands, shells, interpreters, isolated sessions."""

from __future__ import annotations

import asyncio
from typing import Unpack

from stockade.client import run_calls
from stockade.client.async_remote_files import AsyncRemoteFiles
from stockade.client.background_calls import BackgroundCalls, ended, of_session, pauses
from stockade.client.calls import execd_path
from stockade.client.event_stream import EventCollector, Handler
from stockade.client.run_calls import LogPiece, RemoteRunOptions
from stockade.client.transport import AsyncTransport
from stockade.client.values import BackgroundStatus, RemoteCodeResult, RemoteCommit, RemoteResult
from stockade.result import Change


class AsyncRemoteBackground:
    """A command in the background: `RemoteBackground` with `await`."""

    def __init__(self, transport: AsyncTransport, calls: BackgroundCalls) -> None:
        self._transport = transport
        self._calls = calls
        self.id = calls.id

    async def status(self) -> BackgroundStatus:
        """Whether the command runs, and how it ended."""
        return await self._transport.send(self._calls.status)

    async def logs(self, cursor: int = 0) -> LogPiece:
        """Read what the command has printed from a byte on. The piece says where the next one begins."""
        return await self._transport.send(self._calls.logs(cursor))

    async def wait(self, timeout: float | None = None) -> RemoteResult:
        """Wait for the end and return the result. A `TimeoutError` after the timeout leaves it running."""
        questions = pauses(timeout)
        while (status := await self.status()).running:
            await asyncio.sleep(next(questions))
        return ended(self.id, status)

    async def kill(self) -> None:
        """End the command."""
        await self._transport.send(self._calls.kill)


class AsyncRemoteShell:
    """A shell that keeps its state: `RemoteShell` with `await`."""

    def __init__(self, transport: AsyncTransport, sandbox: str, shell: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self.id = shell

    async def __aenter__(self) -> AsyncRemoteShell:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(self, code: str, **options: Unpack[RemoteRunOptions]) -> RemoteResult:
        """Run a piece of shell code."""
        events = run_calls.collector(options)
        call = run_calls.run_in_shell(self._sandbox, self.id, code, options, events)
        return await self._transport.follow(call, events)

    async def close(self) -> None:
        """End the shell."""
        await self._transport.send(run_calls.close_shell(self._sandbox, self.id))


class AsyncRemoteInterpreter:
    """An interpreter that keeps its variables: `RemoteInterpreter` with `await`."""

    def __init__(self, transport: AsyncTransport, sandbox: str, context: str, language: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self.id = context
        self.language = language

    async def __aenter__(self) -> AsyncRemoteInterpreter:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def run(
        self, code: str, *, on_stdout: Handler | None = None, on_stderr: Handler | None = None
    ) -> RemoteCodeResult:
        """Run code. The value of its last line is the last of the result's `displays`."""
        events = EventCollector(on_stdout, on_stderr)
        call = run_calls.run_code(self._sandbox, self.id, self.language, code, events)
        return await self._transport.follow(call, events)

    async def interrupt(self) -> None:
        """Interrupt the code that runs; the variables stay."""
        await self._transport.send(run_calls.interrupt_code(self._sandbox, self.id))

    async def close(self) -> None:
        """End the interpreter."""
        await self._transport.send(run_calls.close_context(self._sandbox, self.id))


class AsyncRemoteSession:
    """An isolated session: `RemoteSession` with `await`."""

    def __init__(self, transport: AsyncTransport, sandbox: str, session: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self.id = session

    async def __aenter__(self) -> AsyncRemoteSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def files(self) -> AsyncRemoteFiles:
        """The files as the session sees them."""
        return AsyncRemoteFiles(self._transport, execd_path(self._sandbox, run_calls.session_prefix(self.id)))

    async def run(self, code: str, **options: Unpack[RemoteRunOptions]) -> RemoteResult:
        """Run a piece of shell code; directory and variables stay for the next run."""
        events = run_calls.collector(options)
        call = run_calls.run_in_session(self._sandbox, self.id, code, options, events)
        return await self._transport.follow(call, events)

    async def background(self, code: str, **options: Unpack[RemoteRunOptions]) -> AsyncRemoteBackground:
        """Start a piece of shell code without waiting for its end."""
        run = await self._transport.send(run_calls.session_background(self._sandbox, self.id, code, options))
        return AsyncRemoteBackground(self._transport, of_session(self._sandbox, self.id, run))

    async def changes(self) -> tuple[Change, ...]:
        """List what the session added, modified and deleted in its overlays."""
        return await self._transport.send(run_calls.changes(self._sandbox, self.id))

    async def diff(self) -> str:
        """Show the changes as a patch."""
        return await self._transport.send(run_calls.patch(self._sandbox, self.id))

    async def archive(self) -> bytes:
        """Return the changed files as a tar.gz."""
        return await self._transport.send(run_calls.archive(self._sandbox, self.id))

    async def commit(self, *, reset: bool | None = None) -> RemoteCommit:
        """Write the changes to the sandbox's own directories; `reset` empties the overlay afterwards.

        If the sandbox's files have changed meanwhile, it raises a `ConflictError` and writes nothing.
        """
        return await self._transport.send(run_calls.commit(self._sandbox, self.id, reset=reset))

    async def close(self) -> None:
        """End the session. What it did not commit is gone."""
        await self._transport.send(run_calls.close_session(self._sandbox, self.id))
