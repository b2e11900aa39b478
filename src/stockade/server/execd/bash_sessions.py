"""Bash sessions: shells whose directory, variables and functions stay from run to run.

A session that was created has a shell that runs: its first run sets the variables of the `EXECD_ENVS` file.
Runs of one session take turns. A timeout, or a client that leaves, interrupts the code; the session lives on.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Mapping
from shlex import quote

import msgspec

from stockade.result import Result
from stockade.runs.options import ShellOptions, directory
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.server.execd.commands import CommandTable, invalid, seconds_of_milliseconds
from stockade.server.execd.variables import SandboxVariables
from stockade.server.wire.errors import RUNTIME_ERROR, ApiError, ServerPaths
from stockade.server.wire.events import EventResponse, EventStream
from stockade.server.wire.line_endings import LineRule
from stockade.sessions.shell import AsyncShell

#: How many sessions a sandbox can have.
MOST_SESSIONS = 128
SESSION_NOT_FOUND = "SESSION_NOT_FOUND"
#: Seconds that a new shell has to start.
START = 30.0
#: Variables that bash does not let code set.
READ_ONLY = re.compile(r"(?:BASHOPTS|BASH_VERSINFO|EUID|PPID|SHELLOPTS|UID)\Z")


class BashSessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Where a new session starts."""

    cwd: str | None = None


class BashSessionAnswer(msgspec.Struct, frozen=True):
    """The id of a new session."""

    session_id: str


class BashRunRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One run of a session."""

    command: str
    #: The directory of this run; the session returns to its own.
    cwd: str | None = None
    #: Milliseconds; 0 and none are no limit.
    timeout: int | None = None


class BashSessions:
    """The bash sessions of one sandbox."""

    def __init__(self, box: AsyncSandbox, variables: SandboxVariables, commands: CommandTable) -> None:
        self._box, self._variables, self._commands = box, variables, commands
        self._shells: dict[str, AsyncShell] = {}

    async def create(self, request: BashSessionRequest) -> BashSessionAnswer:
        """Start a session; the answer comes when its shell runs."""
        if len(self._shells) >= MOST_SESSIONS:
            raise ApiError(429, "LIMIT_EXCEEDED", f"the sandbox has {MOST_SESSIONS} sessions already")
        directory(request.cwd)
        identifier = str(uuid.uuid4())
        shell = self._shells[identifier] = self._box.shell()
        try:
            result = await shell.run(await self._beginning(request), timeout=START)
        except BaseException:
            await self._end(identifier)
            raise
        if not result.ok:
            await self._end(identifier)
            words = result.stderr_text.strip() or result.reason
            raise ApiError(400 if request.cwd else 500, RUNTIME_ERROR, ServerPaths.hide(words))
        return BashSessionAnswer(identifier)

    async def _beginning(self, request: BashSessionRequest) -> str:
        """Return the code of a session's first run."""
        added = await self._variables.added()
        place = self._variables.directory(request.cwd, added)
        return export_code(added) + (f"cd -- {quote(place)}\n" if place else "")

    async def run(self, identifier: str, request: BashRunRequest, rule: LineRule) -> EventResponse:
        """Run code in a session and return the answer that streams it."""
        shell = self._find(identifier)
        if not request.command.strip():
            raise invalid("command: must not be empty")
        if "\0" in request.command:
            raise invalid("command: contains a NUL byte")
        directory(request.cwd)
        added = await self._variables.added() if request.cwd else {}
        stream = EventStream(rule)
        options: ShellOptions = {
            "cwd": self._variables.directory(request.cwd, added),
            "timeout": seconds_of_milliseconds(request.timeout),
            "on_stdout": stream.stdout,
            "on_stderr": stream.stderr,
        }

        async def work() -> Result:
            return await shell.run(request.command, **options)

        run = self._commands.begin(request.command, stream, work)
        return EventResponse(stream, run.interrupt)

    async def delete(self, identifier: str) -> None:
        """End a session and what it has started."""
        self._find(identifier)
        await self._end(identifier)

    async def close(self) -> None:
        """End all sessions."""
        await asyncio.gather(*(self._end(identifier) for identifier in tuple(self._shells)))

    async def _end(self, identifier: str) -> None:
        shell = self._shells.pop(identifier, None)
        if shell is not None:
            await shell.close()

    def _find(self, identifier: str) -> AsyncShell:
        shell = self._shells.get(identifier)
        if shell is None:
            raise ApiError(404, SESSION_NOT_FOUND, "there is no such session")
        return shell


def export_code(added: Mapping[str, str]) -> str:
    """Return shell code that exports variables."""
    return "".join(
        f"export {name}={quote(value)}\n" for name, value in added.items() if not READ_ONLY.match(name)
    )
