"""Making sandboxes: the checks of a request, the image, idempotency, and the supervisor."""

from __future__ import annotations

import asyncio
import secrets
from datetime import timedelta
from weakref import WeakValueDictionary

from stockade.errors import NotFoundError, PolicyError
from stockade.images.names import HOST
from stockade.images.store import find
from stockade.server.config import ServerConfig
from stockade.server.front.sandbox_table import SandboxTable
from stockade.server.front.telemetry import Telemetry
from stockade.server.record import ServerRecord, new_id, now
from stockade.server.wire import create_checks
from stockade.server.wire.create_checks import invalid
from stockade.server.wire.errors import CONFLICT, ApiError
from stockade.server.wire.lifecycle import ENTRYPOINT, CreateRequest
from stockade.server.zygote import SupervisorRequest, Zygote

#: How long a key of a create is remembered, at most as long as its sandbox lives.
REMEMBERED = timedelta(hours=24)


class SandboxFactory:
    """Makes sandboxes for clients."""

    def __init__(
        self, config: ServerConfig, table: SandboxTable, zygote: Zygote, home: str, telemetry: Telemetry
    ) -> None:
        self._config = config
        self._table = table
        self._zygote = zygote
        self._home = home
        self._telemetry = telemetry
        #: Creates under way, by client and key; a lock lives as long as a request holds it or waits for it.
        self._running: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    async def create(self, owner: str, data: CreateRequest, key: str, digest: str) -> ServerRecord:
        """Make a sandbox; a key that came before with the same body returns the sandbox that it made."""
        if not key:
            return await self._make(owner, data, key, digest)
        lock = self._running.setdefault((owner, key), asyncio.Lock())
        async with lock:
            return await self._earlier(owner, key, digest) or await self._make(owner, data, key, digest)

    async def _earlier(self, owner: str, key: str, digest: str) -> ServerRecord | None:
        """Return the sandbox that an earlier request with this key made, also one of an earlier server."""
        await self._table.settle()
        for known in self._table.of_owner(owner):
            record = known.record
            if record.idempotency_key != key or now() - record.created_at > REMEMBERED:
                continue
            if record.body_digest != digest:
                raise ApiError(
                    409, CONFLICT, "Idempotency-Key: an earlier request had this key and another body"
                )
            return known.refresh()
        return None

    async def _make(self, owner: str, data: CreateRequest, key: str, digest: str) -> ServerRecord:
        try:
            made = await self._supervised(owner, data, key, digest)
        except Exception as error:
            self._telemetry.note_create(error)
            raise
        self._telemetry.note_create()
        return made

    async def _supervised(self, owner: str, data: CreateRequest, key: str, digest: str) -> ServerRecord:
        record = self._record(owner, data, key, digest)
        asked = SupervisorRequest(record, self._config, self._table.root, self._home, self._config.address[1])
        try:
            await self._zygote.supervise(asked)
        except BaseException:
            # It may still open, after the client's patience; or its supervisor has died and left something.
            self._table.look_for(record.id)
            raise
        return self._table.discover(record.id).record

    def _record(self, owner: str, data: CreateRequest, key: str, digest: str) -> ServerRecord:
        """Check a request and return the record of the sandbox to make."""
        create_checks.refuse_later(data)
        if data.image is None:
            raise invalid("image", "is missing")
        extensions, created = data.extensions or {}, now()
        created = created.replace(microsecond=created.microsecond // 1000 * 1000)
        record = ServerRecord(
            id=new_id(),
            owner=owner,
            token=secrets.token_urlsafe(32),
            created_at=created,
            image=data.image.uri,
            root=self._root_of(data.image.uri),
            entrypoint=tuple(data.entrypoint or ENTRYPOINT),
            env=create_checks.environment(data.env),
            metadata=create_checks.check_metadata(data.metadata or {}),
            extensions=extensions,
            platform=create_checks.platform(data.platform),
            limits=create_checks.limits_of(data.resource_limits),
            policy=create_checks.request_policy(data.policy),
            network=create_checks.network(data.network_policy),
            expires_at=None if data.timeout is None else created + timedelta(seconds=data.timeout),
            renew_seconds=create_checks.renew_seconds(extensions),
            idempotency_key=key,
            body_digest=digest,
        )
        create_checks.check_size(record)
        return record

    def _root_of(self, uri: str) -> str:
        """Return the root that an image's name stands for."""
        root = self._config.image_of(uri)
        if root == HOST:
            return root
        try:
            return find(root or uri, self._home).name
        except (NotFoundError, PolicyError):
            raise invalid("image.uri", _no_image(uri[:120], root)) from None


def _no_image(uri: str, root: str | None) -> str:
    """Say why a sandbox cannot have an image, and what the server's owner can do about it."""
    if root is not None:
        return (
            f"[images] of the server's configuration says that {uri!r} is {root!r}, which is not imported: "
            f"`stockade images import PATH {root}` does it on the server's machine"
        )
    path, slash, last = uri.rpartition("/")
    name, tag, _ = last.partition(":")
    return (
        f"the server has no image {uri!r}, and downloads none: write "
        f'"{path}{slash}{name}{":*" if tag else ""}" = "{HOST}" below [images] of its configuration, '
        f"import it on the server's machine with `stockade images import PATH {uri}`, or ask for the image "
        f"`{HOST}`"
    )
