"""The lifecycle of sandboxes: create, get, list, change, pause, resume, endpoints, delete."""

from __future__ import annotations

import asyncio
import hashlib
from datetime import UTC
from typing import Annotated, Any
from urllib.parse import unquote

import msgspec
from litestar import Controller, Request, Response, delete, get, patch, post
from litestar.params import Parameter

from stockade.server.front.creation import SandboxFactory
from stockade.server.front.sandbox_table import KnownSandbox, SandboxTable
from stockade.server.front.telemetry import Telemetry
from stockade.server.record import ServerRecord
from stockade.server.wire.create_checks import invalid
from stockade.server.wire.errors import NOT_SUPPORTED, ApiError
from stockade.server.wire.lifecycle import (
    CreateRequest,
    EndpointAnswer,
    ListAnswer,
    Pagination,
    RenewAnswer,
    RenewRequest,
    SandboxAnswer,
    sandbox_answer,
)

STATES = ("Pending", "Running", "Pausing", "Paused", "Resuming", "Stopping", "Terminated", "Failed")
TOKEN_HEADER = "X-EXECD-ACCESS-TOKEN"


def empty(status: int) -> Response[bytes]:
    """Return an answer without a body, which says so."""
    return Response(b"", status_code=status, headers={"content-length": "0"}, media_type="application/json")


class SandboxController(Controller):
    """The sandboxes of a client."""

    path = "/v1/sandboxes"

    @post("/", status_code=202)
    async def create(
        self,
        owner: str,
        factory: SandboxFactory,
        request: Request[Any, Any, Any],
        data: CreateRequest,
        idempotency_key: Annotated[str | None, Parameter(header="Idempotency-Key", max_length=255)] = None,
    ) -> SandboxAnswer:
        """Make a sandbox; the answer comes when it can run commands."""
        digest = hashlib.sha256(await request.body()).hexdigest() if idempotency_key else ""
        return sandbox_answer(await factory.create(owner, data, idempotency_key or "", digest))

    @get("/")
    async def list_sandboxes(
        self,
        owner: str,
        table: SandboxTable,
        states: Annotated[list[str] | None, Parameter(query="state")] = None,
        metadata: str | None = None,
        page: Annotated[int, Parameter(ge=1, le=1_000_000)] = 1,
        page_size: Annotated[int, Parameter(query="pageSize", ge=1, le=200)] = 20,
    ) -> ListAnswer:
        """List the client's sandboxes, newest first."""
        for one in states or ():
            if one not in STATES:
                raise invalid("state", f"{one[:40]!r} is not a state: {', '.join(STATES)}")
        wanted = _metadata_filter(metadata)
        found = [
            record for known in table.of_owner(owner) if _matches(record := known.refresh(), states, wanted)
        ]
        pages = -(-len(found) // page_size)
        shown = found[(page - 1) * page_size : page * page_size]
        return ListAnswer(
            [sandbox_answer(record) for record in shown],
            Pagination(page, page_size, len(found), pages, page < pages),
        )

    @get("/{sandbox_id:str}")
    async def show(self, owner: str, table: SandboxTable, sandbox_id: str) -> SandboxAnswer:
        """Show one sandbox."""
        return sandbox_answer(table.find(owner, sandbox_id).refresh())

    @delete("/{sandbox_id:str}", status_code=204)
    async def remove(self, owner: str, table: SandboxTable, telemetry: Telemetry, sandbox_id: str) -> None:
        """End a sandbox and remove everything of it."""
        known = table.find(owner, sandbox_id)
        if known.lives:
            try:
                last = await known.upstream.call("DELETE", "/control")
                table.forget(sandbox_id)
                telemetry.note_end(sandbox_id, last)
                return
            except ApiError:
                # It may have died meanwhile; its pidfd says so at once.
                await asyncio.sleep(0.05)
                if known.lives:
                    raise
        if table.any(sandbox_id) is not None:
            await table.remove(known)

    @patch("/{sandbox_id:str}/metadata", status_code=200)
    async def patch_metadata(
        self, owner: str, table: SandboxTable, sandbox_id: str, data: dict[str, str | None]
    ) -> SandboxAnswer:
        """Change metadata by a JSON merge patch."""
        known = table.living(owner, sandbox_id)
        return sandbox_answer(await _call(known, "PATCH", "/control/metadata", data))

    @post("/{sandbox_id:str}/renew-expiration", status_code=200)
    async def renew(
        self, owner: str, table: SandboxTable, sandbox_id: str, data: RenewRequest
    ) -> RenewAnswer:
        """Set the moment at which the sandbox ends."""
        known, at = table.living(owner, sandbox_id), data.expires_at
        try:
            at = at.astimezone(UTC) if at.tzinfo is not None else at.replace(tzinfo=UTC)
        except OverflowError:
            raise invalid("expiresAt", "must be a time before the year 10000") from None
        await _call(known, "POST", "/control/renew", {"expires_at": at})
        return RenewAnswer(at)

    @post("/{sandbox_id:str}/pause", status_code=202)
    async def pause(self, owner: str, table: SandboxTable, sandbox_id: str) -> Response[bytes]:
        """Stop every process in the sandbox."""
        await table.living(owner, sandbox_id).upstream.call("POST", "/control/pause")
        return empty(202)

    @post("/{sandbox_id:str}/resume", status_code=202)
    async def resume(self, owner: str, table: SandboxTable, sandbox_id: str) -> Response[bytes]:
        """Continue every process in the sandbox."""
        await table.living(owner, sandbox_id).upstream.call("POST", "/control/resume")
        return empty(202)

    @get("/{sandbox_id:str}/endpoints/{port:int}")
    async def endpoint(
        self,
        owner: str,
        table: SandboxTable,
        request: Request[Any, Any, Any],
        sandbox_id: str,
        port: Annotated[int, Parameter(ge=1, le=65535)],
        expires: str | None = None,
        use_server_proxy: bool = False,
    ) -> EndpointAnswer:
        """Say where a port of the sandbox is reached: always through this server."""
        known = table.find(owner, sandbox_id)
        if expires is not None:
            raise ApiError(400, NOT_SUPPORTED, "expires: this version does not sign endpoints")
        host = request.headers["host"]
        return EndpointAnswer(
            f"{host}/sandboxes/{sandbox_id}/proxy/{port}", {TOKEN_HEADER: known.record.token}
        )


async def _call(known: KnownSandbox, method: str, path: str, content: object) -> ServerRecord:
    known.record = msgspec.json.decode(await known.upstream.call(method, path, content), type=ServerRecord)
    return known.record


def _metadata_filter(text: str | None) -> dict[str, str]:
    """Parse `k=v&k2=v2`; Python's SDK percent-encodes keys and values in it, JavaScript's does not."""
    found = {}
    for part in filter(None, (text or "").split("&")):
        key, equals, value = part.partition("=")
        if not equals or not key:
            raise invalid("metadata", "must be KEY=VALUE pairs, joined by &")
        found[unquote(key)] = unquote(value)
    return found


def _matches(record: ServerRecord, states: list[str] | None, metadata: dict[str, str]) -> bool:
    if states and record.state not in states:
        return False
    return all(record.metadata.get(key) == value for key, value in metadata.items())
