"""The servers for datagrams of the small internet: an echo, and the time."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

from stockade.egress.datagram_sockets import (
    ANCILLARY_SIZE,
    asked_address,
    prepare_datagrams,
    reply_source,
)
from support.internet_layout import DATAGRAMS, TIME

#: A datagram that begins so is answered from another port of the server and from another address, and never
#: from where it was sent to.
SPOOF = b"spoof "
#: The time of every answer: seconds since 1900.
NOW = 3_900_000_000


def serve(note: Callable[..., None], *, ipv6: bool) -> None:
    """Serve on every address, in the running loop."""
    loop = asyncio.get_running_loop()
    for family, anywhere in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::"))[: 1 + ipv6]:
        for port in (DATAGRAMS, TIME):
            listener = socket.socket(family, socket.SOCK_DGRAM)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            prepare_datagrams(listener, 6 if family == socket.AF_INET6 else 4)
            listener.bind((anywhere, port))
            loop.add_reader(listener, partial(_answer, listener, port, note))


def _answer(listener: socket.socket, port: int, note: Callable[..., None]) -> None:
    data, ancillary, _, client = listener.recvmsg(65536, ANCILLARY_SIZE)
    note("datagram", address=asked_address(ancillary), port=port, size=len(data))
    if port == TIME:
        answer = _time(data)
    elif data.startswith(SPOOF):
        _spoof(listener, data, client)
        return
    else:
        answer = data
    listener.sendmsg([answer], reply_source(ancillary), 0, client)


def _spoof(listener: socket.socket, data: bytes, client: Any) -> None:
    other = "2a10:600d::66" if listener.family == socket.AF_INET6 else "11.0.0.66"
    with socket.socket(listener.family, socket.SOCK_DGRAM) as another:
        another.bind((other, 0))
        another.sendto(data, client)
    with socket.socket(listener.family, socket.SOCK_DGRAM) as another:
        another.sendto(data, client)


def _time(request: bytes) -> bytes:
    """Answer a request of NTP (RFC 5905): mode 3 is a client, 4 a server, and the server repeats its time."""
    if len(request) < 48 or request[0] & 7 != 3:
        return b"no request"
    header = struct.pack(
        ">BBbb11I", 0x24, 1, 0, 0, 0, 0, 0, 0, 0, *struct.unpack(">II", request[40:48]), NOW, 0, NOW, 0
    )
    return header[:48]
