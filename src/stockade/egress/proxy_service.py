"""The proxy inside, for programs that insist on one: what a client asks for, and what it is told.

It listens in the sandbox's network namespace alone, at the address of the name server there, and it decides
nothing: what it is asked for goes the way of every other connection. A client is told that it is connected
as soon as the rules allow that, because many servers are dialled only after the client's first bytes.
"""

from __future__ import annotations

import asyncio
import socket
from typing import NamedTuple

from stockade.egress.decoders.proxy_requests import (
    HEAD_SIZE,
    NOT_ALLOWED,
    SUCCEEDED,
    VERSION,
    ProxyRequestError,
    ProxyTarget,
    connect_target,
    http_reply,
    socks_address_size,
    socks_method,
    socks_reply,
    socks_target,
)
from stockade.egress.dialer import wait_readable


class ProxyRequest(NamedTuple):
    """What a client of the proxy asked for, and the two answers in its protocol."""

    target: ProxyTarget
    accepted: bytes
    refused: bytes


async def read_request(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> ProxyRequest:
    """Read a client's request and nothing behind it; raise ProxyRequestError for anything else."""
    first = await read_exactly(loop, connection, 1)
    if first[0] != VERSION:
        head = first + await read_head(loop, connection)
        return ProxyRequest(
            connect_target(head),
            http_reply("200 Connection established"),
            http_reply("403 Forbidden", "the network rules of this sandbox do not allow that"),
        )
    (count,) = await read_exactly(loop, connection, 1)
    # The answer is a few bytes, for which a fresh connection has room.
    connection.send(socks_method(await read_exactly(loop, connection, count)))
    start = await read_exactly(loop, connection, 5)
    rest = await read_exactly(loop, connection, socks_address_size(start))
    return ProxyRequest(socks_target(start, rest), socks_reply(SUCCEEDED), socks_reply(NOT_ALLOWED))


async def read_exactly(loop: asyncio.AbstractEventLoop, connection: socket.socket, size: int) -> bytes:
    """Read so many bytes, or raise ProxyRequestError at the end."""
    data = b""
    while len(data) < size:
        try:
            more = connection.recv(size - len(data))
        except BlockingIOError:
            await wait_readable(loop, connection)
            continue
        if not more:
            raise ProxyRequestError("ended")
        data += more
    return data


async def read_head(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    """Read up to the first empty line; what follows it stays in the kernel's buffer."""
    data = b""
    while True:
        try:
            seen = connection.recv(HEAD_SIZE - len(data), socket.MSG_PEEK)
        except BlockingIOError:
            await wait_readable(loop, connection)
            continue
        if not seen:
            raise ProxyRequestError("ended")
        end = (data + seen).find(b"\r\n\r\n", max(0, len(data) - 3))
        data += connection.recv(len(seen) if end < 0 else end + 4 - len(data))
        if end >= 0:
            return data
        if len(data) >= HEAD_SIZE:
            raise ProxyRequestError("too long", http_reply("431 Request Header Fields Too Large", "too long"))
