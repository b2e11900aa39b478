"""Requests and answers of the lifecycle. Answers have no nulls: the Python SDK fails on them."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from stockade.server.record import ServerRecord
from stockade.server.wire.network import NetworkPolicySpec
from stockade.server.wire.request_policy import RequestPolicy

#: Ten years.
LONGEST = 315_360_000
#: The entrypoint of a sandbox whose request names none.
ENTRYPOINT = ("tail", "-f", "/dev/null")


class ImageSpec(Struct, frozen=True):
    """The image of a sandbox. Credentials of a registry are not needed here, and not kept."""

    uri: Annotated[str, Meta(min_length=1, max_length=512)]


class PlatformSpec(Struct, frozen=True):
    """The system that a client wants."""

    os: str = "linux"
    arch: str | None = None


class CreateRequest(Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """A request for a new sandbox."""

    image: ImageSpec | None = None
    snapshot_id: str | None = None
    template_id: str | None = None
    timeout: Annotated[int, Meta(ge=1, le=LONGEST)] | None = None
    resource_limits: dict[str, str] | None = None
    resource_requests: dict[str, str] | None = None
    entrypoint: list[str] | None = None
    env: dict[str, str | None] | None = None
    metadata: dict[str, str] | None = None
    extensions: dict[str, str] | None = None
    network_policy: NetworkPolicySpec | None = None
    credential_proxy: dict[str, Any] | None = None
    volumes: list[Any] | None = None
    platform: PlatformSpec | None = None
    secure_access: bool | None = None
    lifecycle: dict[str, Any] | None = None
    #: Beyond the contract: further limits and refused system calls.
    policy: RequestPolicy | None = None


class RenewRequest(Struct, frozen=True, rename="camel"):
    """A new expiry."""

    expires_at: datetime


class StatusAnswer(Struct, frozen=True, rename="camel"):
    """The state of a sandbox."""

    state: str
    reason: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    last_transition_at: datetime | UnsetType = UNSET


class SandboxAnswer(Struct, frozen=True, rename="camel"):
    """One sandbox."""

    id: str
    status: StatusAnswer
    created_at: datetime
    entrypoint: tuple[str, ...]
    image: ImageSpec | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET
    extensions: dict[str, str] | UnsetType = UNSET
    platform: PlatformSpec | UnsetType = UNSET
    expires_at: datetime | UnsetType = UNSET


class Pagination(Struct, frozen=True, rename="camel"):
    """Which part of a list an answer holds."""

    page: int
    page_size: int
    total_items: int
    total_pages: int
    has_next_page: bool


class ListAnswer(Struct, frozen=True):
    """A page of the client's sandboxes."""

    items: list[SandboxAnswer]
    pagination: Pagination


class RenewAnswer(Struct, frozen=True, rename="camel"):
    """The new expiry."""

    expires_at: datetime


class EndpointAnswer(Struct, frozen=True):
    """Where a port of a sandbox is reached, and what to send with every request."""

    endpoint: str
    headers: dict[str, str]


def sandbox_answer(record: ServerRecord) -> SandboxAnswer:
    """Return a sandbox as clients see it."""
    message: str | UnsetType = UNSET
    if record.state == "Failed":
        message = "the sandbox's supervisor died; what ran in it has ended"
    return SandboxAnswer(
        id=record.id,
        status=StatusAnswer(
            record.state, record.reason or UNSET, message, record.changed_at or record.created_at
        ),
        created_at=record.created_at,
        entrypoint=record.entrypoint,
        image=ImageSpec(record.image),
        metadata=record.metadata or UNSET,
        extensions=record.extensions or UNSET,
        platform=PlatformSpec(**record.platform) if record.platform else UNSET,
        expires_at=record.expires_at or UNSET,
    )
