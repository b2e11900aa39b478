"""`RemoteSandbox`: a sandbox of the server, with the names of `stockade.Sandbox`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Unpack

import stockade
from stockade.client import run_calls, sandbox_calls
from stockade.client.background_calls import of_command
from stockade.client.calls import execd_path
from stockade.client.remote_errors import RemoteNotFoundError
from stockade.client.remote_files import RemoteFiles
from stockade.client.remote_session import (
    RemoteBackground,
    RemoteInterpreter,
    RemoteSession,
    RemoteShell,
)
from stockade.client.run_calls import RemoteRunOptions, SessionOptions
from stockade.client.transport import Transport
from stockade.client.values import Endpoint, RemoteReceipt, RemoteResult, SandboxInfo


class RemoteSandbox:
    """A sandbox of the server. As a context manager it deletes the sandbox at the end.

    >>> with client.create(timeout=600) as box:
    ...     box.run(["python3", "-c", "print(6 * 7)"]).text
    '42\\n'
    """

    def __init__(self, transport: Transport, sandbox: str) -> None:
        self._transport = transport
        self.id = sandbox

    def __repr__(self) -> str:
        return f"<RemoteSandbox {self.id} at {self._transport.address.url}>"

    def __enter__(self) -> RemoteSandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Delete the sandbox and its files; harmless if it is gone already."""
        try:
            self.delete()
        except RemoteNotFoundError:
            return

    def delete(self) -> None:
        """Delete the sandbox and its files; raise a `NotFoundError` if there is none."""
        self._transport.send(sandbox_calls.delete(self.id))

    def info(self) -> SandboxInfo:
        """Ask for its state, its end and its metadata."""
        return self._transport.send(sandbox_calls.get(self.id))

    @property
    def files(self) -> RemoteFiles:
        """The files inside."""
        return RemoteFiles(self._transport, execd_path(self.id, "").rstrip("/"))

    def run(self, cmd: str | Sequence[str], **options: Unpack[RemoteRunOptions]) -> RemoteResult:
        """Run a command to its end: text is for the shell, a list is the words of the command itself.

        The options are `env`, `cwd`, `timeout`, and `on_stdout` and `on_stderr`, which get the text as it
        comes.
        """
        events = run_calls.collector(options)
        return self._transport.follow(run_calls.command(self.id, cmd, options, events), events)

    def background(self, cmd: str | Sequence[str], **options: Unpack[RemoteRunOptions]) -> RemoteBackground:
        """Start a command without waiting for its end."""
        events = run_calls.collector(options)
        run = self._transport.follow(run_calls.background(self.id, cmd, options, events), events)
        return RemoteBackground(self._transport, of_command(self.id, run))

    def shell(self, *, cwd: str | None = None) -> RemoteShell:
        """Start a shell that keeps its directory and variables between runs."""
        shell = self._transport.send(run_calls.open_shell(self.id, cwd))
        return RemoteShell(self._transport, self.id, shell)

    def python(self, *, language: str = "python") -> RemoteInterpreter:
        """Start an interpreter that keeps its variables between runs."""
        context = self._transport.send(run_calls.open_context(self.id, language))
        return RemoteInterpreter(self._transport, self.id, context, language)

    def session(self, workspace: str | None = None, **options: Unpack[SessionOptions]) -> RemoteSession:
        """Start an isolated session on a directory of the sandbox.

        What you leave out is the server's to decide: the strict profile, an overlay as the workspace.
        """
        session = self._transport.send(run_calls.open_session(self.id, workspace, options))
        return RemoteSession(self._transport, self.id, session)

    def pause(self) -> None:
        """Freeze every process inside until `resume`."""
        self._transport.send(sandbox_calls.pause(self.id))

    def resume(self) -> None:
        """Let every process inside go on."""
        self._transport.send(sandbox_calls.resume(self.id))

    def renew(self, until: float | datetime) -> datetime:
        """Move the sandbox's end to a time, or to so many seconds from now; return it."""
        return self._transport.send(sandbox_calls.renew(self.id, until))

    def patch_metadata(self, changes: Mapping[str, str | None]) -> SandboxInfo:
        """Change the metadata; None removes a key."""
        return self._transport.send(sandbox_calls.patch_metadata(self.id, changes))

    def receipts(self, *, limit: int | None = None) -> tuple[RemoteReceipt, ...]:
        """List the receipts of the newest runs of the sandbox and its sessions, oldest first."""
        return self._transport.send(sandbox_calls.receipts(self.id, limit))

    def receipt(self, identifier: str) -> stockade.Receipt:
        """Return one receipt, for `stockade.verify`."""
        return self._transport.send(sandbox_calls.receipt(self.id, identifier))

    def endpoint(self, port: int) -> Endpoint:
        """Say where a port of the sandbox is reached."""
        return self._transport.send(sandbox_calls.endpoint(self.id, port))
