"""The endpoints of commands, bash sessions, code contexts and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from litestar import Controller, Request, Response, delete, get, post
from litestar.response import Stream

from stockade.server.execd.bash_sessions import BashRunRequest, BashSessionAnswer, BashSessionRequest
from stockade.server.execd.code_contexts import CodeRequest, ContextAnswer, ContextRequest
from stockade.server.execd.commands import CommandRequest, CommandStatus, invalid
from stockade.server.execd.metrics import SandboxMetrics
from stockade.server.supervisor.supervisor import SandboxSupervisor
from stockade.server.wire.errors import MISSING_QUERY, ApiError
from stockade.server.wire.events import EventResponse
from stockade.server.wire.identity import require_ids
from stockade.server.wire.line_endings import LineRule, line_rule

#: The header with the cursor for the next piece of a log.
CURSOR = "EXECD-COMMANDS-TAIL-CURSOR"


def rule_of(supervisor: SandboxSupervisor, request: Request[Any, Any, Any]) -> LineRule:
    """Return whether this client gets line endings."""
    agent = request.headers.get("user-agent", "")
    return line_rule(agent, supervisor.record.extensions, supervisor.config.line_endings)


def empty() -> Response[bytes]:
    """Return a success without a body, which says so by its length."""
    return Response(b"", status_code=200, media_type="text/plain")


def _required(name: str, value: str | None) -> str:
    if not value:
        raise ApiError(400, MISSING_QUERY, f"{name}: is missing in the query")
    return value


class CommandController(Controller):
    """Commands in the sandbox."""

    path = "/command"

    @post("/", status_code=200)
    async def run(
        self, supervisor: SandboxSupervisor, request: Request[Any, Any, Any], data: CommandRequest
    ) -> EventResponse:
        """Run a command and stream its events; one in the background ends its stream at once."""
        require_ids(supervisor.environment.ids, data.uid, data.gid)
        return await supervisor.commands.start(data, rule_of(supervisor, request))

    @delete("/", status_code=200)
    async def interrupt(self, supervisor: SandboxSupervisor, id: str | None = None) -> Response[bytes]:
        """Interrupt a command; its stream ends with a terminal event."""
        supervisor.commands.interrupt(_required("id", id))
        return empty()

    @get("/status/{identifier:str}")
    async def status(self, supervisor: SandboxSupervisor, identifier: str) -> CommandStatus:
        """Return how a command stands."""
        return supervisor.commands.status(identifier)

    @get("/{identifier:str}/logs")
    async def logs(
        self, supervisor: SandboxSupervisor, identifier: str, cursor: str | None = None
    ) -> Response[bytes]:
        """Return the output of a command in the background from a byte on."""
        page = supervisor.commands.logs(identifier, _cursor(cursor))
        headers = {CURSOR: str(page.cursor)}
        return Response(page.data, status_code=200, media_type="text/plain", headers=headers)


def _cursor(text: str | None) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise invalid("cursor: must be a number of bytes, 0 or more")
    return int(text)


class BashSessionController(Controller):
    """Bash sessions in the sandbox."""

    path = "/session"

    @post("/", status_code=200)
    async def create(
        self, supervisor: SandboxSupervisor, data: BashSessionRequest | None = None
    ) -> BashSessionAnswer:
        """Start a session."""
        return await supervisor.shells.create(data or BashSessionRequest())

    @post("/{identifier:str}/run", status_code=200)
    async def run(
        self,
        supervisor: SandboxSupervisor,
        request: Request[Any, Any, Any],
        identifier: str,
        data: BashRunRequest,
    ) -> EventResponse:
        """Run code in a session and stream its events."""
        return await supervisor.shells.run(identifier, data, rule_of(supervisor, request))

    @delete("/{identifier:str}", status_code=200)
    async def end(self, supervisor: SandboxSupervisor, identifier: str) -> Response[bytes]:
        """End a session."""
        await supervisor.shells.delete(identifier)
        return empty()


class CodeController(Controller):
    """Code contexts in the sandbox."""

    path = "/code"

    @post("/", status_code=200)
    async def run(
        self, supervisor: SandboxSupervisor, request: Request[Any, Any, Any], data: CodeRequest
    ) -> EventResponse:
        """Run code in a context and stream its events, one JSON object per line."""
        return supervisor.code.run(data, rule_of(supervisor, request))

    @delete("/", status_code=200)
    async def interrupt(self, supervisor: SandboxSupervisor, id: str | None = None) -> Response[bytes]:
        """Interrupt what runs in a context; the context lives on."""
        supervisor.code.interrupt(_required("id", id))
        return empty()

    @post("/context", status_code=200)
    async def create(self, supervisor: SandboxSupervisor, data: ContextRequest) -> ContextAnswer:
        """Make a context."""
        return supervisor.code.create(data)

    @get("/contexts")
    async def contexts(
        self, supervisor: SandboxSupervisor, language: str | None = None
    ) -> list[ContextAnswer]:
        """List the contexts, or those of one language."""
        return supervisor.code.list(language)

    @delete("/contexts", status_code=200)
    async def end_all(self, supervisor: SandboxSupervisor, language: str | None = None) -> Response[bytes]:
        """End the contexts of one language."""
        await supervisor.code.delete_all(_required("language", language))
        return empty()

    @get("/contexts/{identifier:str}")
    async def context(self, supervisor: SandboxSupervisor, identifier: str) -> ContextAnswer:
        """Return one context."""
        return supervisor.code.get(identifier)

    @delete("/contexts/{identifier:str}", status_code=200)
    async def end(self, supervisor: SandboxSupervisor, identifier: str) -> Response[bytes]:
        """End a context."""
        await supervisor.code.delete(identifier)
        return empty()


class MetricsController(Controller):
    """What the sandbox uses."""

    path = "/metrics"

    @get("/")
    async def metrics(self, supervisor: SandboxSupervisor) -> SandboxMetrics:
        """Return processors and memory: limits and use."""
        return await supervisor.meter.measure()

    @get("/watch")
    async def watch(self, supervisor: SandboxSupervisor) -> Stream:
        """Stream the same, one JSON object per line each second."""
        lines: AsyncIterator[bytes] = supervisor.meter.watch()
        return Stream(lines, media_type="text/event-stream")
