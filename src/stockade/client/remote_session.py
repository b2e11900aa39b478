"""What lives in a sandbox of the server: background commands, shells, interpreters, isolated sessions."""

from __future__ import annotations

import time
from typing import Unpack

from stockade.client import run_calls
from stockade.client.background_calls import BackgroundCalls, ended, of_session, pauses
from stockade.client.calls import execd_path
from stockade.client.event_stream import EventCollector, Handler
from stockade.client.remote_files import RemoteFiles
from stockade.client.run_calls import LogPiece, RemoteRunOptions
from stockade.client.transport import Transport
from stockade.client.values import BackgroundStatus, RemoteCodeResult, RemoteCommit, RemoteResult
from stockade.result import Change


class RemoteBackground:
    """A command in the background.

    >>> job = box.background("echo built")
    >>> job.wait().exit_code, job.logs().text
    (0, 'built\\n')
    """

    def __init__(self, transport: Transport, calls: BackgroundCalls) -> None:
        self._transport = transport
        self._calls = calls
        self.id = calls.id

    def status(self) -> BackgroundStatus:
        """Whether the command runs, and how it ended."""
        return self._transport.send(self._calls.status)

    def logs(self, cursor: int = 0) -> LogPiece:
        """Read what the command has printed from a byte on. The piece says where the next one begins."""
        return self._transport.send(self._calls.logs(cursor))

    def wait(self, timeout: float | None = None) -> RemoteResult:
        """Wait for the end and return the result. A `TimeoutError` after the timeout leaves it running."""
        questions = pauses(timeout)
        while (status := self.status()).running:
            time.sleep(next(questions))
        return ended(self.id, status)

    def kill(self) -> None:
        """End the command."""
        self._transport.send(self._calls.kill)


class RemoteShell:
    """A shell that keeps its directory and variables between runs.

    >>> with box.shell() as shell:
    ...     _ = shell.run("cd /tmp; export NAME=ada")
    ...     shell.run("echo $NAME in $PWD").text
    'ada in /tmp\\n'
    """

    def __init__(self, transport: Transport, sandbox: str, shell: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self.id = shell

    def __enter__(self) -> RemoteShell:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, code: str, **options: Unpack[RemoteRunOptions]) -> RemoteResult:
        """Run a piece of shell code."""
        events = run_calls.collector(options)
        call = run_calls.run_in_shell(self._sandbox, self.id, code, options, events)
        return self._transport.follow(call, events)

    def close(self) -> None:
        """End the shell."""
        self._transport.send(run_calls.close_shell(self._sandbox, self.id))


class RemoteInterpreter:
    """An interpreter that keeps its variables between runs.

    >>> with box.python() as python:
    ...     _ = python.run("x = 6 * 7")
    ...     python.run("x").value_text
    '42'
    """

    def __init__(self, transport: Transport, sandbox: str, context: str, language: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self.id = context
        self.language = language

    def __enter__(self) -> RemoteInterpreter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self, code: str, *, on_stdout: Handler | None = None, on_stderr: Handler | None = None
    ) -> RemoteCodeResult:
        """Run code. The value of its last line is the last of the result's `displays`."""
        events = EventCollector(on_stdout, on_stderr)
        call = run_calls.run_code(self._sandbox, self.id, self.language, code, events)
        return self._transport.follow(call, events)

    def interrupt(self) -> None:
        """Interrupt the code that runs; the variables stay."""
        self._transport.send(run_calls.interrupt_code(self._sandbox, self.id))

    def close(self) -> None:
        """End the interpreter."""
        self._transport.send(run_calls.close_context(self._sandbox, self.id))


class RemoteSession:
    """An isolated session: a shell behind walls of its own, with a view of the sandbox's directories.

    >>> with box.session("/workspace", mode="overlay") as session:
    ...     _ = session.run("echo 1 > /workspace/new")
    ...     session.changes()
    (Change(path='/workspace/new', kind='added'),)
    """

    def __init__(self, transport: Transport, sandbox: str, session: str) -> None:
        self._transport = transport
        self._sandbox = sandbox
        self.id = session

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def files(self) -> RemoteFiles:
        """The files as the session sees them."""
        return RemoteFiles(self._transport, execd_path(self._sandbox, run_calls.session_prefix(self.id)))

    def run(self, code: str, **options: Unpack[RemoteRunOptions]) -> RemoteResult:
        """Run a piece of shell code; directory and variables stay for the next run."""
        events = run_calls.collector(options)
        call = run_calls.run_in_session(self._sandbox, self.id, code, options, events)
        return self._transport.follow(call, events)

    def background(self, code: str, **options: Unpack[RemoteRunOptions]) -> RemoteBackground:
        """Start a piece of shell code without waiting for its end."""
        run = self._transport.send(run_calls.session_background(self._sandbox, self.id, code, options))
        return RemoteBackground(self._transport, of_session(self._sandbox, self.id, run))

    def changes(self) -> tuple[Change, ...]:
        """List what the session added, modified and deleted in its overlays."""
        return self._transport.send(run_calls.changes(self._sandbox, self.id))

    def diff(self) -> str:
        """Show the changes as a patch."""
        return self._transport.send(run_calls.patch(self._sandbox, self.id))

    def archive(self) -> bytes:
        """Return the changed files as a tar.gz."""
        return self._transport.send(run_calls.archive(self._sandbox, self.id))

    def commit(self, *, reset: bool | None = None) -> RemoteCommit:
        """Write the changes to the sandbox's own directories; `reset` empties the overlay afterwards.

        If the sandbox's files have changed meanwhile, it raises a `ConflictError` and writes nothing.
        """
        return self._transport.send(run_calls.commit(self._sandbox, self.id, reset=reset))

    def close(self) -> None:
        """End the session. What it did not commit is gone."""
        self._transport.send(run_calls.close_session(self._sandbox, self.id))
