"""An HTTP server for one ASGI application, without uvicorn's own loop.

uvicorn parses and frames. Its `Server` wakes up ten times a second, which two hundred idle supervisors would
feel; this one waits for connections only. It also bounds what a client can take: the bytes of a request's
head and of what follows its body, the time for the head, and the number of connections. Its refusals have the
body that every error has.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from email.utils import formatdate
from typing import Any

import msgspec
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

#: The most headers of one request.
MOST_HEADERS = 128
#: How many requests may wait on a connection for the answers to those before them.
MOST_PIPELINED = 16
#: How many bytes of a request may arrive that are neither its head nor its body. One read is up to 256 KiB.
MOST_OTHER = 512 << 10
#: What an application sets in the state of a request whose sender it knows.
KNOWN = "known"


class ClientBounds(msgspec.Struct, frozen=True):
    """What one server allows its clients."""

    connections: int = 1000
    header_bytes: int = 64 << 10
    #: For the head of a request to arrive.
    seconds: float = 30.0
    #: For an idle connection to stay open.
    idle: int = 75
    #: For someone unknown to read an answer; 0 for ever.
    unread: float = 0.0


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the head of a request."""

    bounds = ClientBounds()
    #: The connections of this server on which nobody known has asked so far, the oldest first.
    strangers: dict[BoundedProtocol, None]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection. If there are too many, it takes the place of a stranger's, or is refused."""
        super().connection_made(transport)
        self._head_bytes = 0
        #: Bytes since the last piece of a body, where a head is complete: trailers, and the frames of chunks.
        self._other_bytes = 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        #: It is refused when its request arrives: an answer before that could be lost.
        self._surplus = len(self.connections) > self.bounds.connections and not self._make_room()
        self.strangers[self] = None
        self._await_head()

    def _make_room(self) -> bool:
        """End the connection of a stranger; who has no key must not keep those out who have one."""
        while self.strangers:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            if not oldest.is_known and not oldest.transport.is_closing():
                oldest.transport.abort()
                return True
        return False

    @property
    def is_known(self) -> bool:
        """Whether the application knew who sent the last request."""
        return self.cycle is not None and bool(self.cycle.scope["state"].get(KNOWN))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the deadlines with the connection."""
        self.strangers.pop(self, None)
        self._head_arrived()
        self._is_read()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head that is not complete yet."""
        if self.transport.is_closing():
            return
        if self._surplus:
            self._refuse(503, "SERVICE_UNAVAILABLE", "too many connections", "retry-after: 1\r\n")
            return
        if self._deadline is not None:
            self._head_bytes += len(data)
        else:
            self._other_bytes += len(data)
        super().data_received(data)
        if self._deadline is not None and self._head_bytes > self.bounds.header_bytes:
            self._refuse(431, "INVALID_REQUEST_BODY", "the head of the request is too large")
        elif self._other_bytes > MOST_OTHER:
            # The parser gathers a trailer until it is whole, and the answer may be sent already.
            self.transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; what follows a body is a trailer, which nobody has checked, and is left out."""
        if self._deadline is not None:
            super().on_header(name, value)

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a head."""
        super().on_message_begin()
        if self._deadline is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """Hand the request on, unless it has too many headers."""
        self._head_arrived()
        self._other_bytes = 0
        if self.transport.is_closing():
            return
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if len(self.headers) > MOST_HEADERS or size > self.bounds.header_bytes:
            self._refuse(431, "INVALID_REQUEST_BODY", "the head of the request is too large")
            return
        if len(self.pipeline) >= MOST_PIPELINED:
            # uvicorn would queue as many as a client sends without reading one answer.
            self.transport.abort()
            return
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Stop the answer, because the client does not read; someone unknown may not stay so for ever."""
        super().pause_writing()
        if self.bounds.unread and self._unread is None:
            self._unread = self.loop.call_later(self.bounds.unread, self._stays_unread)

    def resume_writing(self) -> None:
        """Go on with the answer."""
        self._is_read()
        super().resume_writing()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stays_unread(self) -> None:
        self._unread = None
        if not self.is_known:
            self.transport.abort()

    def on_body(self, body: bytes) -> None:
        """Pass a piece of the body on, if its request was."""
        self._other_bytes = 0
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Note the end of the body, if its request was passed on."""
        self._other_bytes = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP."""
        self._refuse(400, "INVALID_REQUEST_BODY", "the request is not valid HTTP")

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(self.bounds.seconds, self._too_slow)

    def _head_arrived(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self._head_bytes:
            self._refuse(408, "INVALID_REQUEST_BODY", "the request took too long to arrive")
        else:
            self.transport.close()

    def _refuse(self, status: int, code: str, message: str, further: str = "") -> None:
        self._head_arrived()
        if self.transport.is_closing():
            return
        body = msgspec.json.encode({"code": code, "message": message})
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\n{further}"
            f"content-length: {len(body)}\r\nconnection: close\r\n"
            f"x-request-id: {secrets.token_hex(16)}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


class HttpServer:
    """One application on sockets that listen already."""

    def __init__(self, app: Any, bounds: ClientBounds | None = None, *, date: bool = False) -> None:
        bounds = bounds or ClientBounds()
        self._config = uvicorn.Config(
            app, lifespan="off", ws="none", log_config=None, access_log=False, timeout_keep_alive=bounds.idle,
            proxy_headers=False, server_header=False, http=HttpToolsProtocol,
        )  # fmt: skip
        self._config.load()
        self._state = ServerState()
        self._protocol = type("_Protocol", (BoundedProtocol,), {"bounds": bounds, "strangers": {}})
        self._date = date
        self._ticking: asyncio.TimerHandle | None = None
        self._servers: list[asyncio.Server] = []

    async def start(self, listener: socket.socket) -> None:
        """Serve the connections of a listening socket."""
        loop = asyncio.get_running_loop()
        if self._date and self._ticking is None:
            self._tick(loop)
        make = lambda: self._protocol(self._config, self._state, {})  # noqa: E731
        if listener.family == socket.AF_UNIX:
            self._servers.append(await loop.create_unix_server(make, sock=listener, backlog=1024))
        else:
            self._servers.append(await loop.create_server(make, sock=listener, backlog=1024))

    @property
    def connections(self) -> int:
        """How many connections are open."""
        return len(self._state.connections)

    async def stop(self, patience: float = 1.0) -> None:
        """Take no more connections, let requests end for a moment, then close what is left."""
        if self._ticking is not None:
            self._ticking.cancel()
        for server in self._servers:
            server.close()
        for connection in list(self._state.connections):
            connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while self._state.tasks:
                    await asyncio.wait(list(self._state.tasks))
        for task in list(self._state.tasks):
            task.cancel()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        self._state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        self._ticking = loop.call_later(1.0, self._tick, loop)
