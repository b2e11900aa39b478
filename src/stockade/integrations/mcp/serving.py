"""The two transports: stdio for one client that starts the server, HTTP for clients that find it.

Over HTTP, every request needs the token, also from this machine: other users and their programs reach the
loopback address too. A web page that points a name of its own at the loopback address (DNS rebinding) cannot
know the token, and is refused by its Host and Origin besides.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import hmac
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from mcp.server.transport_security import TransportSecuritySettings

from stockade.errors import SetupError
from stockade.integrations.mcp.tools import make_server
from stockade.integrations.mcp.workbench import Workbench

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

#: Where the endpoint is.
PATH = "/mcp"
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
ENDINGS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)


def serve_stdio(bench: Workbench, *, allow_commit: bool) -> None:
    """Serve the client at the other end of stdin and stdout, until it goes away."""
    asyncio.run(_serve_stdio(bench, allow_commit))


async def _serve_stdio(bench: Workbench, allow_commit: bool) -> None:
    server = make_server(bench, allow_commit=allow_commit)
    loop, leaving = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def leave(number: int) -> None:
        # The SDK reads stdin in a thread that nothing interrupts, so the process cannot end as usual.
        await bench.end()
        atexit._run_exitfuncs()
        os._exit(128 + number)

    def begin_to_leave(number: int) -> None:
        leaving.add(loop.create_task(leave(number)))

    for number in ENDINGS:
        loop.add_signal_handler(number, begin_to_leave, number)
    try:
        await server.run_stdio_async()
    finally:
        await bench.end()


def serve_http(
    bench: Workbench,
    host: str,
    port: int,
    token: str,
    *,
    allow_commit: bool,
    idle: float,
    announce: Callable[[str], object],
) -> None:
    """Serve clients that have the token, until a signal ends the server."""
    import uvicorn

    with _listener(host, port) as listener:
        number = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        app = http_app(bench, token, host, number, allow_commit=allow_commit, idle=idle)
        config = uvicorn.Config(
            app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1, ws="none"
        )
        for ending in (signal.SIGTERM, signal.SIGHUP):
            # uvicorn ends in good order and then raises the signal again, for this handler.
            signal.signal(ending, _exit)
        announce(f"http://{shown}:{number}{PATH}")
        uvicorn.Server(config).run(sockets=[listener])


def _exit(number: int, _: object) -> None:
    sys.exit(128 + number)


def http_app(
    bench: Workbench, token: str, host: str, port: int, *, allow_commit: bool = False, idle: float = 0
) -> ASGIApp:
    """Return the application: the SDK's endpoint behind our check of the token."""
    server = make_server(bench, allow_commit=allow_commit)
    names = {*LOOPBACK, f"[{host}]" if ":" in host else host}
    security = TransportSecuritySettings(
        allowed_hosts=[one for name in sorted(names) for one in (name, f"{name}:{port}")],
        allowed_origins=[f"http://{name}:{port}" for name in sorted(names)],
    )
    inner = server.streamable_http_app(streamable_http_path=PATH, transport_security=security, host=host)
    started = inner.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        watch = asyncio.create_task(bench.close_when_idle(idle)) if idle else None
        try:
            async with started(app) as state:
                yield state
        finally:
            if watch is not None:
                watch.cancel()
            await bench.end()

    inner.router.lifespan_context = lifespan
    return TokenCheck(inner, token)


class TokenCheck:
    """Refuses every request without the token, before anything of it is read."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on a request that has the token."""
        if scope["type"] == "http" and not self._has_token(scope["headers"]):
            await _refuse(send)
        elif scope["type"] in ("http", "lifespan"):
            await self._app(scope, receive, send)

    def _has_token(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = [value for key, value in headers if key.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def _refuse(send: Send) -> None:
    body = b'{"error": "send the header `Authorization: Bearer TOKEN`; the server printed it at its start"}'
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _listener(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise SetupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            stage="mcp",
            errno=error.errno or 0,
            hint="choose another port, or 0 for any free one: --http 0",
        ) from None
