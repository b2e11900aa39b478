"""The sockets of clients: where they lead, whose they are, and how to read, to answer and to say why not."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from stockade.egress.dialer import wait_readable, wait_writable
from stockade.egress.records import InsideEnds

_READ_SIZE = 16 * 1024
#: How long a refused client may take to read why.
_LAST_WORDS_SECONDS = 1.0
_LAST_WORDS_DRAIN = 256 * 1024


def client_of(connection: socket.socket) -> str:
    """Return the address of a client on the host."""
    return str(connection.getpeername()[0]).partition("%")[0].removeprefix("::ffff:")


def destination_of(connection: socket.socket) -> tuple[str, int]:
    """Return the address and port that the program asked for; a mapped address is an IPv4 address."""
    address, port = connection.getsockname()[:2]
    if address.startswith("::ffff:") and "." in address:
        address = address.removeprefix("::ffff:")
    return address.partition("%")[0], port


def inside_ends(connection: socket.socket) -> InsideEnds | None:
    """Return the ends of a connection as its program has them, from which the kernel can tell the program."""
    try:
        address, port = connection.getpeername()[:2]
    except OSError:  # the program has gone
        return None
    return InsideEnds(address.partition("%")[0], port, destination_of(connection)[0])


async def receive(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> bytes:
    """Return what a client sends next; nothing if it has ended."""
    while True:
        try:
            return connection.recv(_READ_SIZE)
        except BlockingIOError:
            await wait_readable(loop, connection)


async def send(loop: asyncio.AbstractEventLoop, connection: socket.socket, data: bytes) -> None:
    """Send all bytes to a client."""
    while data:
        try:
            data = data[connection.send(data) :]
        except BlockingIOError:
            await wait_writable(loop, connection)


async def say_and_close(
    loop: asyncio.AbstractEventLoop, connection: socket.socket, last_words: bytes
) -> None:
    """Tell a client why it is refused."""
    with contextlib.suppress(OSError):
        connection.send(last_words)
        connection.shutdown(socket.SHUT_WR)
        await drain_and_close(loop, connection)
    connection.close()


async def drain_and_close(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    """Close a connection once its client has read the last words, or too late.

    A close with bytes unread would reset the words away.
    """
    drained = 0
    with contextlib.suppress(OSError):
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            while drained < _LAST_WORDS_DRAIN and (data := await receive(loop, connection)):
                drained += len(data)
    connection.close()
