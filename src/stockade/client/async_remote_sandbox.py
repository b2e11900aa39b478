"""`AsyncRemoteSandbox`: `RemoteSandbox` with `await`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Unpack

import stockade
from stockade.client import run_calls, sandbox_calls
from stockade.client.async_remote_files import AsyncRemoteFiles
from stockade.client.async_remote_session import (
    AsyncRemoteBackground,
    AsyncRemoteInterpreter,
    AsyncRemoteSession,
    AsyncRemoteShell,
)
from stockade.client.background_calls import of_command
from stockade.client.calls import execd_path
from stockade.client.remote_errors import RemoteNotFoundError
from stockade.client.run_calls import RemoteRunOptions, SessionOptions
from stockade.client.transport import AsyncTransport
from stockade.client.values import Endpoint, RemoteReceipt, RemoteResult, SandboxInfo


class AsyncRemoteSandbox:
    """A sandbox of the server: `RemoteSandbox` with `await`."""

    def __init__(self, transport: AsyncTransport, sandbox: str) -> None:
        self._transport = transport
        self.id = sandbox

    def __repr__(self) -> str:
        return f"<AsyncRemoteSandbox {self.id} at {self._transport.address.url}>"

    async def __aenter__(self) -> AsyncRemoteSandbox:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Delete the sandbox and its files; harmless if it is gone already."""
        try:
            await self.delete()
        except RemoteNotFoundError:
            return

    async def delete(self) -> None:
        """Delete the sandbox and its files; raise a `NotFoundError` if there is none."""
        await self._transport.send(sandbox_calls.delete(self.id))

    async def info(self) -> SandboxInfo:
        """Ask for its state, its end and its metadata."""
        return await self._transport.send(sandbox_calls.get(self.id))

    @property
    def files(self) -> AsyncRemoteFiles:
        """The files inside."""
        return AsyncRemoteFiles(self._transport, execd_path(self.id, "").rstrip("/"))

    async def run(self, cmd: str | Sequence[str], **options: Unpack[RemoteRunOptions]) -> RemoteResult:
        """Run a command to its end: text is for the shell, a list is the words of the command itself.

        The options are `env`, `cwd`, `timeout`, and `on_stdout` and `on_stderr`, which get the text as it
        comes.
        """
        events = run_calls.collector(options)
        return await self._transport.follow(run_calls.command(self.id, cmd, options, events), events)

    async def background(
        self, cmd: str | Sequence[str], **options: Unpack[RemoteRunOptions]
    ) -> AsyncRemoteBackground:
        """Start a command without waiting for its end."""
        events = run_calls.collector(options)
        run = await self._transport.follow(run_calls.background(self.id, cmd, options, events), events)
        return AsyncRemoteBackground(self._transport, of_command(self.id, run))

    async def shell(self, *, cwd: str | None = None) -> AsyncRemoteShell:
        """Start a shell that keeps its directory and variables between runs."""
        shell = await self._transport.send(run_calls.open_shell(self.id, cwd))
        return AsyncRemoteShell(self._transport, self.id, shell)

    async def python(self, *, language: str = "python") -> AsyncRemoteInterpreter:
        """Start an interpreter that keeps its variables between runs."""
        context = await self._transport.send(run_calls.open_context(self.id, language))
        return AsyncRemoteInterpreter(self._transport, self.id, context, language)

    async def session(
        self, workspace: str | None = None, **options: Unpack[SessionOptions]
    ) -> AsyncRemoteSession:
        """Start an isolated session on a directory of the sandbox.

        What you leave out is the server's to decide: the strict profile, an overlay as the workspace.
        """
        session = await self._transport.send(run_calls.open_session(self.id, workspace, options))
        return AsyncRemoteSession(self._transport, self.id, session)

    async def pause(self) -> None:
        """Freeze every process inside until `resume`."""
        await self._transport.send(sandbox_calls.pause(self.id))

    async def resume(self) -> None:
        """Let every process inside go on."""
        await self._transport.send(sandbox_calls.resume(self.id))

    async def renew(self, until: float | datetime) -> datetime:
        """Move the sandbox's end to a time, or to so many seconds from now; return it."""
        return await self._transport.send(sandbox_calls.renew(self.id, until))

    async def patch_metadata(self, changes: Mapping[str, str | None]) -> SandboxInfo:
        """Change the metadata; None removes a key."""
        return await self._transport.send(sandbox_calls.patch_metadata(self.id, changes))

    async def receipts(self, *, limit: int | None = None) -> tuple[RemoteReceipt, ...]:
        """List the receipts of the newest runs of the sandbox and its sessions, oldest first."""
        return await self._transport.send(sandbox_calls.receipts(self.id, limit))

    async def receipt(self, identifier: str) -> stockade.Receipt:
        """Return one receipt, for `stockade.verify`."""
        return await self._transport.send(sandbox_calls.receipt(self.id, identifier))

    async def endpoint(self, port: int) -> Endpoint:
        """Say where a port of the sandbox is reached."""
        return await self._transport.send(sandbox_calls.endpoint(self.id, port))
