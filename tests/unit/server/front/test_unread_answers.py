"""An answer that is not read: someone unknown loses the connection, a known client may take its time."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from stockade.server.http_server import KNOWN, ClientBounds, HttpServer

LARGE = bytes(8 << 20)
UNREAD = 0.1


async def _is_kept(path: str, *, known: bool) -> bool:
    """Whether a connection is still there after its client has read nothing for a while."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        scope["state"][KNOWN] = known
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": LARGE})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    server = HttpServer(app, ClientBounds(unread=UNREAD))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)
    await server.start(listener)
    try:
        with socket.socket(socket.AF_UNIX) as end:
            end.connect(path)
            end.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            await asyncio.sleep(UNREAD * 5)
            return server.connections == 1
    finally:
        await server.stop(0.01)


@pytest.mark.parametrize("known", [False, True])
def test_only_a_known_client_may_leave_an_answer_unread(tmp_path: Path, known: bool) -> None:
    assert asyncio.run(_is_kept(str(tmp_path / "socket"), known=known)) is known
