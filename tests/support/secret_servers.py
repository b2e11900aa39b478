"""Servers that are sent secrets: one keeps what it got, others send it back in every way.

Each function answers the requests for one host of the small internet; see `Internet.handle`.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import zlib
from collections.abc import AsyncIterator
from pathlib import Path

from support.internet_web import Request, Response


def keep(request: Request, file: str) -> Response:
    """Write what arrived to a file of the host, and say nothing about it."""
    told = {
        "target": request.target,
        "headers": request.headers,
        "body": request.body.decode("latin-1"),
        "tls": request.tls,
        "version": request.version,
    }
    with Path(file).open("a") as log:
        log.write(json.dumps(told) + "\n")
    return Response(b"thank you\n")


def remember(request: Request, file: str) -> Response:
    """Store the credentials of a request in a file, and send them back to every request without any."""
    if value := request.headers.get("authorization", "").partition(" ")[2]:
        Path(file).write_text(value)
        return Response(b"stored\n")
    value = Path(file).read_text()
    match request.path.strip("/"):
        case "name":
            return Response(b"see the names\n", headers={f"X-{value}": "1"})
        case "gzip":
            return Response(gzip.compress(value.encode()), headers={"Content-Encoding": "gzip"})
        case _:
            return Response(f"stored: {value}\n".encode())


def echo(request: Request) -> Response:
    """Send the credentials back, in the way that the path says."""
    value = request.headers.get("authorization", "").partition(" ")[2].encode()
    text = b"your key is <" + value + b">, or not?\n"
    match request.path.strip("/"):
        case "chunks":
            return Response(stream=_pieces(text, 3))
        case "slow-chunks":
            return Response(stream=_pieces(text, 25, 0.2))
        case "gzip":
            return Response(gzip.compress(text), headers={"Content-Encoding": "gzip"})
        case "gzip-chunks":
            return Response(stream=_pieces(gzip.compress(text), 3), headers={"Content-Encoding": "gzip"})
        case "deflate":
            return Response(zlib.compress(text), headers={"Content-Encoding": "deflate"})
        case "unknown":
            return Response(text, headers={"Content-Encoding": "br"})
        case "bomb":
            return Response(gzip.compress(bytes(100 << 20)), headers={"Content-Encoding": "gzip"})
        case "header":
            sent = value.decode()
            cookies = {"Set-Cookie": f"key={sent}; Path=/", "Location": f"https://other.example/?k={sent}"}
            return Response(b"see the headers\n", headers=cookies)
        case "base64":
            return Response(base64.b64encode(b"x" + value + b"yz") + b"\n")
        case "hex":
            return Response(value.hex().encode() + b"\n")
        case "large":
            return Response(bytes(100_000) + text + bytes(100_000))
        case "events":
            return Response(stream=_pieces(b"data: one\n\ndata: " + value + b"\n\n", 4), headers=_EVENTS)
        case _:
            return Response(text)


_EVENTS = {"Content-Type": "text/event-stream"}


async def _pieces(text: bytes, size: int, wait: float = 0.0) -> AsyncIterator[bytes]:
    for at in range(0, len(text), size):
        yield text[at : at + size]
        await asyncio.sleep(wait)
