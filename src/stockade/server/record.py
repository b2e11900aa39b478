"""The record of one sandbox of the server: a file in the sandbox's directory that survives server and
supervisor.

Only the sandbox's supervisor writes it, each time as a whole: a reader sees one version or the next. The file
holds the sandbox's token, so the directory belongs to the caller alone.
"""

from __future__ import annotations

import os
import uuid
from datetime import UTC, datetime
from typing import Any

import msgspec

from stockade.server.wire.network import NetworkRule
from stockade.server.wire.request_policy import RequestPolicy

RECORD = "record.json"
SOCKET = "socket"
LOCK = "lock"
#: The largest record: a request's environment and metadata are in it.
LARGEST = 32 << 20


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a sandbox that outlives a process."""

    id: str
    #: The name of the API key that the sandbox belongs to.
    owner: str
    #: What clients of the sandbox's endpoints send.
    token: str
    created_at: datetime
    #: The name of the image as the client wrote it, and what it stands for.
    image: str
    root: str = "host"
    entrypoint: tuple[str, ...] = ()
    env: dict[str, str] = {}
    metadata: dict[str, str] = {}
    extensions: dict[str, str] = {}
    platform: dict[str, str] = {}
    #: Limits as clauses of a policy.
    limits: dict[str, Any] = {}
    #: The clauses that the request has written itself.
    policy: RequestPolicy = RequestPolicy()
    #: The rules of the network policy; None for the server's own.
    network: tuple[NetworkRule, ...] | None = None
    expires_at: datetime | None = None
    #: Seconds by which each access moves the expiry.
    renew_seconds: int = 0
    state: str = "Running"
    reason: str = ""
    changed_at: datetime | None = None
    #: What the client sent as Idempotency-Key, and the digest of the body that came with it.
    idempotency_key: str = ""
    body_digest: str = ""
    #: The supervisor's process, its start time, and the boot and namespace in which its number is valid.
    supervisor: int = 0
    supervisor_born: int = 0
    where: str = ""
    #: The id of the sandbox in the register, which `stockade ps` shows.
    register_id: str = ""


def now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


def new_id() -> str:
    """Return a new id for a sandbox."""
    return str(uuid.uuid4())


def is_id(text: str) -> bool:
    """Whether text is the id of a sandbox, in its one spelling."""
    try:
        return str(uuid.UUID(text)) == text
    except ValueError:
        return False


def write_record(directory: int, record: ServerRecord) -> None:
    """Replace the record in a sandbox's directory."""
    part = f"{RECORD}.new"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    file = os.open(part, flags, 0o600, dir_fd=directory)
    with os.fdopen(file, "wb") as stream:
        stream.write(msgspec.json.encode(record))
    os.rename(part, RECORD, src_dir_fd=directory, dst_dir_fd=directory)


def read_record(directory: int) -> ServerRecord | None:
    """Read the record of a sandbox's directory; None if there is none that is whole."""
    try:
        file = os.open(RECORD, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except FileNotFoundError:
        return None
    with os.fdopen(file, "rb") as stream:
        content = stream.read(LARGEST)
    try:
        return msgspec.json.decode(content, type=ServerRecord)
    except msgspec.DecodeError:
        return None


def open_directory(path: str, parent: int | None = None) -> int:
    """Open a directory of ours, which must not be a link."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
