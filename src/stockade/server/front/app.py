"""The server's application: checks that every request passes, then the relay or the framework."""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import secrets
from typing import Any

from litestar import Controller, Litestar, Request, Response, get, post
from litestar.di import Provide
from litestar.types import ControllerRouterHandler

from stockade._version import __version__
from stockade.server.config import ServerConfig
from stockade.server.front.authentication import ClientKeys, OriginCheck, single_headers
from stockade.server.front.creation import SandboxFactory
from stockade.server.front.inspection import CapabilitiesController, InspectionController
from stockade.server.front.lifecycle import SandboxController, empty
from stockade.server.front.relay import PROXY, REQUEST_ID, SandboxRelay
from stockade.server.front.sandbox_table import SandboxTable
from stockade.server.front.telemetry import Telemetry, TelemetryController
from stockade.server.http_server import KNOWN
from stockade.server.supervisor.app import send_error
from stockade.server.wire.asgi import AsgiReceive, AsgiScope, AsgiSend
from stockade.server.wire.errors import (
    INVALID_REQUEST,
    NOT_SUPPORTED,
    ApiError,
    api_error,
    error_response,
)

#: What anyone may ask.
OPEN = frozenset({"/ping", "/health"})
#: Calls of the contract that this version does not have.
LATER = re.compile(
    r"/v1/(snapshots|templates|pools|volumes)(/.*)?"
    r"|/v1/sandboxes/[^/]+/(snapshots|diagnostics|fork)(/.*)?"
)
#: What a browser asks before a page's call, and the answer for a page that may call.
PREFLIGHT = b"access-control-request-method"
ALLOWED = [
    (b"access-control-allow-methods", b"GET, POST, PUT, PATCH, DELETE"),
    (
        b"access-control-allow-headers",
        b"content-type, open-sandbox-api-key, x-execd-access-token, x-request-id",
    ),
    (b"access-control-max-age", b"600"),
]
#: A request id that can be returned and logged as it is.
SANE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

_log = logging.getLogger("stockade.server")


class HealthController(Controller):
    """What anyone may ask."""

    @get("/health")
    async def health(self) -> dict[str, str]:
        """Say that the server answers."""
        return {"status": "healthy"}

    @get("/version")
    async def version(self) -> dict[str, str]:
        """Say which version of Stockade this is."""
        return {"version": __version__}

    @get("/ping")
    async def ping(self) -> Response[bytes]:
        """Answer."""
        return empty(200)


class MetricsEventController(Controller):
    """Where the SDKs report how long a create took."""

    @post("/v1/metrics/events", status_code=204)
    async def receive(self) -> None:
        """Take an event. The server measures by itself, so it does not keep it."""


class DescriptionController(Controller):
    """The description of the server's calls."""

    @get("/openapi.json", include_in_schema=False)
    async def show(self) -> dict[str, Any]:
        """Describe every call of the server and of its sandboxes."""
        return await asyncio.to_thread(_description)


@functools.cache
def _description() -> dict[str, Any]:
    from stockade.server.front.openapi import describe

    return describe(CONTROLLERS, OPEN)


#: The calls of the server's own plane.
CONTROLLERS: list[ControllerRouterHandler] = [
    HealthController,
    MetricsEventController,
    CapabilitiesController,
    DescriptionController,
    SandboxController,
    InspectionController,
    TelemetryController,
]


class FrontApp:
    """Everything that answers on the server's port."""

    def __init__(
        self,
        config: ServerConfig,
        keys: ClientKeys,
        table: SandboxTable,
        factory: SandboxFactory,
        telemetry: Telemetry,
    ) -> None:
        self._config = config
        self._keys = keys
        self._origins = OriginCheck(config)
        self._relay = SandboxRelay(table, keys, config.client_timeout)
        self._litestar = Litestar(
            CONTROLLERS,
            dependencies={
                "owner": Provide(_owner, sync_to_thread=False),
                "table": Provide(lambda: table, sync_to_thread=False, use_cache=True),
                "factory": Provide(lambda: factory, sync_to_thread=False, use_cache=True),
                "telemetry": Provide(lambda: telemetry, sync_to_thread=False, use_cache=True),
            },
            exception_handlers={Exception: error_response},
            openapi_config=None,
            request_max_body_size=config.max_body_bytes,
        )

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return
        answer = _Answer(scope, send)
        try:
            await self._serve(scope, receive, answer)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if answer.started:
                # The status is gone already; closing the connection is the only way to say it.
                _log.warning("an answer broke off: %s", type(error).__name__)
                raise
            await send_error(answer, api_error(error))

    async def _serve(self, scope: AsgiScope, receive: AsgiReceive, send: _Answer) -> None:
        headers = single_headers(scope["headers"])
        send.origin = self._origins.check(headers)
        path = scope["path"]
        if send.origin is not None and scope["method"] == "OPTIONS" and PREFLIGHT in headers:
            await send({"type": "http.response.start", "status": 204, "headers": ALLOWED})
            await send({"type": "http.response.body", "body": b""})
            return
        if (match := PROXY.fullmatch(path)) is not None:
            await self._relay.serve(scope, receive, send, match)
            return
        if path not in OPEN:
            scope["state"]["owner"] = self._keys.require(headers)
            scope["state"][KNOWN] = True
        if LATER.fullmatch(path):
            raise ApiError(501, NOT_SUPPORTED, "this version does not have this call")
        await self._litestar(scope, _timed(receive, self._config.client_timeout), send)


class _Answer:
    """The way back to the client: adds the request's id to every answer."""

    def __init__(self, scope: AsgiScope, send: AsgiSend) -> None:
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        self._id = given if SANE_ID.fullmatch(given) else secrets.token_hex(16).encode()
        self._send = send
        self.started = False
        #: The origin of a web page that may read the answer.
        self.origin: bytes | None = None

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [*message.get("headers", ()), (REQUEST_ID, self._id)]
            if self.origin is not None:
                message["headers"] += [(b"access-control-allow-origin", self.origin), (b"vary", b"origin")]
        await self._send(message)


def _timed(receive: AsgiReceive, seconds: float) -> AsgiReceive:
    """Return the same, but a client that sends its body too slowly is refused."""
    whole = False

    async def receive_in_time() -> Any:
        nonlocal whole
        if whole:
            return await receive()
        try:
            async with asyncio.timeout(seconds):
                message = await receive()
        except TimeoutError:
            raise ApiError(408, INVALID_REQUEST, "the request's body took too long to arrive") from None
        whole = not message.get("more_body", False)
        return message

    return receive_in_time


def _owner(request: Request[Any, Any, Any]) -> str:
    owner: str = request.scope["state"]["owner"]
    return owner
