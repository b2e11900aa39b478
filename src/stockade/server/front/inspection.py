"""What the contract does not have: receipts of every run, the policy of a sandbox, what this machine
enforces.

And `networkpolicy`, which is `/policy` of the sandbox's egress plane under another name.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import msgspec
from litestar import Controller, Response, delete, get, patch, put
from litestar.params import Parameter

from stockade import backends
from stockade._version import __version__
from stockade.backends.selection import select
from stockade.errors import NotFoundError, ReceiptError, UnsupportedError
from stockade.host import host
from stockade.linux.id_maps import IdMaps
from stockade.policy import Policy
from stockade.receipt import chain
from stockade.server.front.sandbox_table import SandboxTable
from stockade.server.wire.errors import ServerPaths
from stockade.server.wire.network import NetworkPolicySpec, NetworkRule, NetworkStatus

#: The most receipts of one answer.
MOST_RECEIPTS = 1000
BACKEND = "native"
#: What this version answers with 501.
NOT_YET = ("snapshots", "templates", "pools", "volumes", "credentialProxy", "lifecycle hooks", "pty", "ports")


class ReceiptRow(msgspec.Struct, frozen=True):
    """One receipt in a list."""

    id: str
    started: str
    program: str
    outcome: str


class ReceiptList(msgspec.Struct, frozen=True):
    """The receipts of a sandbox, oldest first."""

    receipts: list[ReceiptRow]


class PolicyAnswer(msgspec.Struct, frozen=True):
    """The policy that a sandbox's programs are held to."""

    policy: dict[str, Any]
    toml: str


class ControlAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Whether this machine enforces a control, by what, or why not."""

    available: bool
    mechanism: str = ""
    reason: str = ""


class CapabilitiesAnswer(msgspec.Struct, frozen=True):
    """What this server does."""

    version: str
    backend: str
    #: Whether sandboxes can be made here.
    available: bool
    controls: dict[str, ControlAnswer]
    #: Whether files inside can belong to users other than root, and if not, why.
    several_ids: bool
    ids_reason: str
    not_supported: tuple[str, ...]


class InspectionController(Controller):
    """Receipts and policies of sandboxes."""

    path = "/v1/sandboxes/{sandbox_id:str}"
    tags = ("beyond the contract",)

    @get("/receipts")
    async def receipts(
        self,
        owner: str,
        table: SandboxTable,
        sandbox_id: str,
        limit: Annotated[int, Parameter(ge=1, le=MOST_RECEIPTS)] = 100,
    ) -> ReceiptList:
        """List the receipts of the newest runs of a sandbox and its isolated sessions, oldest first."""
        table.find(owner, sandbox_id)
        log = chain.of(table.home)
        rows = await asyncio.to_thread(log.rows, chain.Filter(agent=sandbox_id), newest=limit)
        return ReceiptList([ReceiptRow(row.id, row.started, row.program, row.outcome) for row in rows])

    @get("/receipts/{receipt:str}")
    async def receipt(
        self, owner: str, table: SandboxTable, sandbox_id: str, receipt: str
    ) -> Response[bytes]:
        """Return one receipt: a DSSE envelope, which `stockade verify` checks."""
        table.find(owner, sandbox_id)
        try:
            found = await asyncio.to_thread(chain.of(table.home).find, receipt)
            mine = found.predicate.who.agent == sandbox_id
        except (NotFoundError, ReceiptError):  # its words may name a receipt of another client
            mine = False
        if not mine:
            raise NotFoundError("the sandbox has no such receipt")
        return Response(found.encode(), media_type="application/json")

    @get("/policy")
    async def policy(self, owner: str, table: SandboxTable, sandbox_id: str) -> PolicyAnswer:
        """Show the policy that the sandbox's programs are held to."""
        answer = await table.living(owner, sandbox_id).upstream.call("GET", "/control/policy")
        return msgspec.json.decode(answer, type=PolicyAnswer)

    @get("/networkpolicy", tags=["network"])
    async def network(self, owner: str, table: SandboxTable, sandbox_id: str) -> NetworkStatus:
        """Show what the sandbox reaches."""
        return await _network(owner, table, sandbox_id, "GET")

    @put("/networkpolicy", status_code=200, tags=["network"])
    async def set_network(
        self, owner: str, table: SandboxTable, sandbox_id: str, data: NetworkPolicySpec
    ) -> NetworkStatus:
        """Replace what the sandbox reaches."""
        return await _network(owner, table, sandbox_id, "PUT", data)

    @patch("/networkpolicy", status_code=200, tags=["network"])
    async def merge_network(
        self, owner: str, table: SandboxTable, sandbox_id: str, data: list[NetworkRule]
    ) -> NetworkStatus:
        """Add rules, or replace those with the same target."""
        return await _network(owner, table, sandbox_id, "PATCH", data)

    @delete("/networkpolicy", status_code=200, tags=["network"])
    async def remove_network(
        self, owner: str, table: SandboxTable, sandbox_id: str, data: list[str]
    ) -> NetworkStatus:
        """Remove the rules with these targets."""
        return await _network(owner, table, sandbox_id, "DELETE", data)


class CapabilitiesController(Controller):
    """What this server does."""

    tags = ("beyond the contract",)

    @get("/v1/capabilities")
    async def capabilities(self) -> CapabilitiesAnswer:
        """Say which controls this machine enforces, and what this version does not have."""
        return await asyncio.to_thread(capabilities)


def capabilities() -> CapabilitiesAnswer:
    """Return what this machine enforces."""
    machine = host()
    offers = backends.table(BACKEND).offers(machine)
    controls = {
        control.value: ControlAnswer(
            offer.available, offer.mechanism, ServerPaths.hide(offer.reason) if not offer.available else ""
        )
        for control, offer in offers.items()
    }
    ids = IdMaps.of_caller()
    try:
        select(Policy(backend=BACKEND), machine)
        usable = True
    except UnsupportedError:
        usable = False
    return CapabilitiesAnswer(__version__, BACKEND, usable, controls, ids.several, ids.reason, NOT_YET)


async def _network(
    owner: str, table: SandboxTable, sandbox_id: str, method: str, content: object = None
) -> NetworkStatus:
    known = table.living(owner, sandbox_id)
    return msgspec.json.decode(
        await known.upstream.call(method, "/egress/policy", content), type=NetworkStatus
    )
