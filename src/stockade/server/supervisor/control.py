"""The private plane of a supervisor, which only the server reaches: state, expiry, metadata, end."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import msgspec
from litestar import Controller, delete, get, patch, post

from stockade.server.record import ServerRecord
from stockade.server.supervisor.supervisor import SandboxSupervisor
from stockade.server.tally import TALLY, TallyReport


class Renewal(msgspec.Struct, frozen=True):
    """The new expiry of a sandbox."""

    expires_at: datetime


class ControlController(Controller):
    """What the server asks of a supervisor."""

    path = "/control"

    @get("/record")
    async def record(self, supervisor: SandboxSupervisor) -> ServerRecord:
        """Return the sandbox's record as it is now."""
        return supervisor.record

    @get("/policy")
    async def policy(self, supervisor: SandboxSupervisor) -> dict[str, Any]:
        """Return the policy that the sandbox's programs are held to."""
        return {"policy": supervisor.policy.table(full=True), "toml": supervisor.policy.to_toml()}

    @post("/pause", status_code=202)
    async def pause(self, supervisor: SandboxSupervisor) -> None:
        """Stop every process inside."""
        supervisor.pause()

    @post("/resume", status_code=202)
    async def resume(self, supervisor: SandboxSupervisor) -> None:
        """Continue every process inside."""
        supervisor.resume()

    @post("/renew", status_code=200)
    async def renew(self, supervisor: SandboxSupervisor, data: Renewal) -> ServerRecord:
        """Set the expiry."""
        supervisor.renew(data.expires_at)
        return supervisor.record

    @patch("/metadata", status_code=200)
    async def metadata(self, supervisor: SandboxSupervisor, data: dict[str, str | None]) -> ServerRecord:
        """Change the metadata by a JSON merge patch."""
        supervisor.patch_metadata(data)
        return supervisor.record

    @get("/tally")
    async def tally(self, supervisor: SandboxSupervisor) -> TallyReport:
        """Return what has been counted in the sandbox."""
        return await supervisor.isolated.report()

    @delete("/", status_code=200)
    async def end(self, supervisor: SandboxSupervisor) -> TallyReport:
        """End the sandbox; the answer follows when nothing of it is left, and has its last counts."""
        await supervisor.end()
        return TallyReport(TALLY)
