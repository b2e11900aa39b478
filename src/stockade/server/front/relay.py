"""The relay: requests to a sandbox's endpoints, streamed to its supervisor and back.

It is plain ASGI, in front of the framework: it authenticates, takes away what no sandbox may see (keys,
tokens, cookies, where the request came from), and passes pieces on as they come. If the client goes away, the
connection to the supervisor is closed at once, which cancels what the request started.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import h11

from stockade.server.front.authentication import API_KEY, TOKEN, ClientKeys, is_token
from stockade.server.front.sandbox_table import DEAD, NOT_FOUND, KnownSandbox, SandboxTable
from stockade.server.front.upstream import UpstreamConnection
from stockade.server.http_server import KNOWN
from stockade.server.supervisor.app import PLANES
from stockade.server.wire.asgi import AsgiReceive, AsgiScope, AsgiSend
from stockade.server.wire.errors import INVALID_REQUEST, NOT_SUPPORTED, SERVICE_UNAVAILABLE, ApiError

#: The paths of a sandbox's endpoints.
PROXY = re.compile(r"(?:/v1)?/sandboxes/([^/]+)/proxy/([^/]+)(/.*)?")
RAW_PROXY = re.compile(rb"(?:/v1)?/sandboxes/[^/]+/proxy/[^/]+(/.*)?")
#: Headers of a request that end here: secrets, addresses, and what is about this connection.
STRIPPED = frozenset(
    {
        API_KEY, TOKEN, b"authorization", b"cookie", b"host", b"connection", b"keep-alive", b"te", b"trailer",
        b"upgrade", b"expect", b"proxy-authorization", b"proxy-connection", b"forwarded", b"via",
        b"x-real-ip", b"open-sandbox-client-ip", b"origin", b"referer",
    }
)  # fmt: skip
#: Headers of an answer that are about the connection to the supervisor, or that the server sets itself.
STRIPPED_ANSWER = frozenset(
    {b"connection", b"keep-alive", b"date", b"server", b"x-request-id", b"set-cookie"}
)
REQUEST_ID = b"x-request-id"


class SandboxRelay:
    """Passes requests on to the supervisors of a table's sandboxes."""

    def __init__(self, table: SandboxTable, keys: ClientKeys, patience: float) -> None:
        self._table = table
        self._keys = keys
        #: Seconds that a client has between two pieces of a body.
        self._patience = patience

    async def serve(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend, match: re.Match[str]
    ) -> None:
        """Serve one request whose path `PROXY` has matched."""
        id, port, rest = match[1], match[2], match[3] or "/"
        headers = dict(scope["headers"])
        known = self._authenticated(id, headers)
        scope["state"][KNOWN] = True
        if ".." in rest.split("/"):
            raise ApiError(400, INVALID_REQUEST, "the path must not contain ..")
        if port not in PLANES:
            raise ApiError(501, NOT_SUPPORTED, f"this version does not lead to port {port} of a sandbox")
        if not known.lives:
            raise ApiError(409, "SANDBOX_NOT_RUNNING", DEAD)
        raw = RAW_PROXY.fullmatch(scope["raw_path"])
        target = PLANES[port].encode() + (raw[1] if raw and raw[1] else b"/")
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        exchange = _Exchange(scope, receive, send, self._patience)
        await exchange.run(known, target)

    def _authenticated(self, id: str, headers: dict[bytes, bytes]) -> KnownSandbox:
        """Return the sandbox, if the request has its token or its owner's key."""
        known, key = self._table.any(id), headers.get(API_KEY)
        if known is not None and is_token(headers.get(TOKEN), known.record.token):
            return known
        if key is not None:
            owner = self._keys.require(headers)
            if known is not None and known.record.owner == owner:
                return known
            raise ApiError(404, NOT_FOUND, "there is no such sandbox")
        # The same answer for a sandbox that does not exist: without a key a client cannot learn which do.
        raise ApiError(
            401, "INVALID_API_KEY", "the request has neither the sandbox's token nor its owner's key"
        )


class _Exchange:
    """One request on its way to a supervisor, and the answer on its way back."""

    def __init__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend, patience: float) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._patience = patience
        self._started = False

    async def run(self, known: KnownSandbox, target: bytes) -> None:
        """Pass the request and the answer on."""
        connection = await known.upstream.acquire()
        whole = False
        try:
            request = h11.Request(method=self._scope["method"], target=target, headers=self._headers())
            uploader = asyncio.ensure_future(self._upload(connection, request))
            answer = asyncio.ensure_future(self._answer(connection))
            try:
                # The uploader goes on until the client disconnects; the answer usually ends first.
                await asyncio.wait((uploader, answer), return_when=asyncio.FIRST_COMPLETED)
                if uploader.done() and (failure := uploader.exception()) is not None:
                    raise failure
                if answer.done():
                    whole = answer.result()
            finally:
                uploader.cancel()
                answer.cancel()
        except h11.LocalProtocolError:
            if self._started:
                raise
            raise ApiError(400, INVALID_REQUEST, "the request's body is not as its headers say") from None
        except (ConnectionError, h11.ProtocolError):
            if self._started:
                raise
            raise ApiError(500, SERVICE_UNAVAILABLE, "the sandbox's supervisor does not answer") from None
        finally:
            if whole:
                known.upstream.release(connection)
            else:
                connection.close()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        headers: list[tuple[bytes, bytes]] = [(b"host", b"sandbox")]
        for name, value in self._scope["headers"]:
            if name not in STRIPPED and not name.startswith((b"x-forwarded-", b"access-control-")):
                headers.append((name, value))
        return headers

    async def _upload(self, connection: UpstreamConnection, request: h11.Request) -> None:
        """Send the request, then wait for the client to go away; a slow client is an error."""
        parts: list[Any] = [request]
        more = True
        while more:
            try:
                async with asyncio.timeout(self._patience):
                    message = await self._receive()
            except TimeoutError:
                raise ApiError(408, INVALID_REQUEST, "the request's body took too long to arrive") from None
            if message["type"] == "http.disconnect":
                return
            more = message.get("more_body", False)
            if message.get("body"):
                parts.append(h11.Data(data=message["body"]))
            if not more:
                parts.append(h11.EndOfMessage())
            for part in parts:
                await connection.send(part)
            parts = []
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _answer(self, connection: UpstreamConnection) -> bool:
        """Pass the answer on; return whether it came to its end."""
        while True:
            event = await connection.receive()
            if isinstance(event, h11.Response):
                headers = [(name, value) for name, value in event.headers if name not in STRIPPED_ANSWER]
                self._started = True
                await self._send(
                    {"type": "http.response.start", "status": event.status_code, "headers": headers}
                )
            elif isinstance(event, h11.Data):
                await self._send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            else:
                await self._send({"type": "http.response.body", "body": b"", "more_body": False})
                return True
