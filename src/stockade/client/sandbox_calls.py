"""Calls that make, find and change sandboxes."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict
from urllib.parse import urlencode

import msgspec

import stockade
from stockade.client.calls import ServerCall, decoded, nothing, present, sandbox_path
from stockade.client.values import Endpoint, RemoteReceipt, SandboxInfo
from stockade.runs.options import refuse_unknown

#: How many sandboxes one page of the list has.
PAGE = 100


class CreateOptions(TypedDict, total=False):
    """The options of a new sandbox. The server decides about those that you leave out."""

    #: How many seconds it lives, rounded up; without it, until you delete it.
    timeout: float | None
    env: Mapping[str, str] | None
    #: Such as `{"cpu": 1, "memory": "2Gi"}`.
    limits: Mapping[str, str | int | float] | None
    #: The hosts that it may reach; `[]` is none.
    net: Sequence[str] | None
    metadata: Mapping[str, str] | None
    extensions: Mapping[str, str] | None
    #: Clauses of its policy: `{"limits": {"tasks": 32}, "syscalls": {"deny": ["ptrace"]}}`.
    policy: Mapping[str, Any] | None


class _Pagination(msgspec.Struct, rename="camel"):
    has_next_page: bool


class SandboxPage(msgspec.Struct):
    """One page of the list of sandboxes."""

    items: list[SandboxInfo]
    pagination: _Pagination


class _Receipts(msgspec.Struct):
    receipts: list[RemoteReceipt]


class _Expiry(msgspec.Struct, rename="camel"):
    expires_at: datetime


def create(image: str, options: CreateOptions) -> ServerCall[SandboxInfo]:
    """Make a sandbox. A lost answer is asked for again with the same key, so it makes one sandbox."""
    refuse_unknown("create", options, CreateOptions.__optional_keys__)
    timeout = options.get("timeout")
    body: dict[str, Any] = {"image": {"uri": image}} | present(
        timeout=None if timeout is None else math.ceil(timeout),
        env=options.get("env"),
        metadata=options.get("metadata"),
        extensions=options.get("extensions"),
        policy=options.get("policy"),
    )
    if (limits := options.get("limits")) is not None:
        body["resourceLimits"] = {name: str(value) for name, value in limits.items()}
    if (net := options.get("net")) is not None:
        rules = [{"action": "allow", "target": target} for target in net]
        body["networkPolicy"] = {"defaultAction": "deny", "egress": rules}
    headers = {"Idempotency-Key": uuid.uuid4().hex}
    return ServerCall(
        method="POST", path="/v1/sandboxes", json=body, headers=headers, read=decoded(SandboxInfo)
    )


def get(sandbox: str) -> ServerCall[SandboxInfo]:
    """Describe a sandbox."""
    return ServerCall(method="GET", path=sandbox_path(sandbox), read=decoded(SandboxInfo))


def page(number: int, states: Sequence[str], metadata: Mapping[str, str] | None) -> ServerCall[SandboxPage]:
    """List sandboxes, one page of them."""
    query: list[tuple[str, str | int]] = [("page", number), ("pageSize", PAGE)]
    query += [("state", state) for state in states]
    if metadata:
        query.append(("metadata", urlencode(metadata)))
    return ServerCall(method="GET", path="/v1/sandboxes", query=query, read=decoded(SandboxPage))


def delete(sandbox: str) -> ServerCall[None]:
    """End a sandbox and remove its files."""
    return ServerCall(method="DELETE", path=sandbox_path(sandbox), read=nothing)


def pause(sandbox: str) -> ServerCall[None]:
    """Freeze every process of a sandbox."""
    return ServerCall(method="POST", path=sandbox_path(sandbox, "pause"), read=nothing)


def resume(sandbox: str) -> ServerCall[None]:
    """Let the processes of a sandbox go on."""
    return ServerCall(method="POST", path=sandbox_path(sandbox, "resume"), read=nothing)


def renew(sandbox: str, until: float | datetime) -> ServerCall[datetime]:
    """Move the end of a sandbox: to a time, or to so many seconds from now."""
    end = until if isinstance(until, datetime) else datetime.now(UTC) + timedelta(seconds=until)
    body = {"expiresAt": end.astimezone(UTC).isoformat()}
    read = decoded(_Expiry)
    path = sandbox_path(sandbox, "renew-expiration")
    return ServerCall(method="POST", path=path, json=body, read=lambda answer: read(answer).expires_at)


def patch_metadata(sandbox: str, changes: Mapping[str, str | None]) -> ServerCall[SandboxInfo]:
    """Change the metadata of a sandbox; None removes a key."""
    path = sandbox_path(sandbox, "metadata")
    return ServerCall(method="PATCH", path=path, json=changes, read=decoded(SandboxInfo))


def receipts(sandbox: str, limit: int | None) -> ServerCall[tuple[RemoteReceipt, ...]]:
    """List the receipts of the newest runs of a sandbox, oldest first."""
    read = decoded(_Receipts)
    return ServerCall(
        method="GET", path=sandbox_path(sandbox, "receipts"),
        query=[] if limit is None else [("limit", limit)],
        read=lambda answer: tuple(read(answer).receipts),
    )  # fmt: skip


def receipt(sandbox: str, identifier: str) -> ServerCall[stockade.Receipt]:
    """Return one receipt."""
    from stockade.receipt.statement import Receipt

    path = sandbox_path(sandbox, "receipts", identifier)
    return ServerCall(method="GET", path=path, read=lambda answer: Receipt.decode(answer.content))


def endpoint(sandbox: str, port: int) -> ServerCall[Endpoint]:
    """Say where a port of a sandbox is reached."""
    path = sandbox_path(sandbox, "endpoints", str(port))
    return ServerCall(method="GET", path=path, read=decoded(Endpoint))
