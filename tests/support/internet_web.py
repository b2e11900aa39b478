"""The web servers of the small internet: HTTP/1.1, HTTP/2 and WebSockets, with or without TLS."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import importlib
import inspect
import json
import struct
import urllib.parse
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

METADATA = "169.254.169.254"
BLOCK = bytes(range(256)) * 256
MEGABYTE = 1 << 20
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_TYPES = {".html": "text/html", ".json": "application/json", ".tgz": "application/octet-stream"}


@dataclass(frozen=True)
class Request:
    method: str
    target: str
    host: str
    headers: dict[str, str]
    body: bytes
    tls: bool
    #: Where the client connected to.
    address: str
    port: int
    version: str

    @property
    def path(self) -> str:
        return urllib.parse.unquote(self.target.partition("?")[0])

    @property
    def query(self) -> dict[str, str]:
        return dict(urllib.parse.parse_qsl(self.target.partition("?")[2]))


@dataclass
class Response:
    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    #: Instead of the body: pieces, sent in chunks.
    stream: AsyncIterator[bytes] | None = None


Handler = Callable[[Request], Any]


class Web:
    """What is at which name: a directory, a function of a module, or the answers below."""

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note
        self._places: dict[str, Handler] = {}

    def publish(self, name: str, directory: str) -> None:
        self._places[name] = lambda request: _file(Path(directory), request)

    def handle(self, name: str, function: str, options: dict[str, Any]) -> None:
        """Let `module:function` answer; it gets the request, and the options by their names."""
        module, _, attribute = function.partition(":")
        handler = getattr(importlib.import_module(module), attribute)
        self._places[name] = lambda request: handler(request, **options)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection to its end."""
        address, port = writer.get_extra_info("sockname")[:2]
        tls = writer.get_extra_info("ssl_object")
        address = address.removeprefix("::ffff:")
        about = {
            "address": address,
            "port": port,
            "sni": getattr(tls, "asked_name", None),
            "peer": writer.get_extra_info("peername")[0].removeprefix("::ffff:"),
        }
        self._note("connection", **about)
        try:
            if tls is not None and tls.selected_alpn_protocol() == "h2":
                await self._serve_two(reader, writer, about)
            else:
                while await self._serve_one(reader, writer, about):
                    pass
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError, struct.error):
            pass
        finally:
            writer.close()

    async def _serve_one(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, about: dict[str, Any]
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, target, _ = head[0].split(" ", 2)
        headers = {}
        for line in filter(None, head[1:]):
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await _body(reader, headers)
        request = self._request(method, target, headers.get("host", ""), headers, body, about, "1.1")
        if headers.get("upgrade", "").lower() == "websocket" and self._place(request) is _standard:
            await _websocket(reader, writer, headers["sec-websocket-key"])
            return False
        response = await self._answer(request)
        close = headers.get("connection", "").lower() == "close"
        lines = [f"HTTP/1.1 {response.status} {'OK' if response.status < 400 else 'No'}"]
        lines += [f"{name}: {value}" for name, value in response.headers.items()]
        lines.append(
            "Transfer-Encoding: chunked" if response.stream else f"Content-Length: {len(response.body)}"
        )
        lines.append(f"Connection: {'close' if close else 'keep-alive'}")
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
        if response.stream is not None:
            async for piece in response.stream:
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        elif method != "HEAD":
            writer.write(response.body)
        await writer.drain()
        return not close

    async def _serve_two(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, about: dict[str, Any]
    ) -> None:
        from h2.config import H2Configuration
        from h2.connection import H2Connection
        from h2.events import DataReceived, RequestReceived, StreamEnded

        connection = H2Connection(H2Configuration(client_side=False, header_encoding="utf-8"))
        connection.initiate_connection()
        writer.write(connection.data_to_send())
        begun: dict[int, tuple[dict[str, str], bytearray]] = {}
        waiting: dict[int, bytearray] = {}
        while data := await reader.read(65536):
            for event in connection.receive_data(data):
                if isinstance(event, RequestReceived) and event.stream_id is not None:
                    begun[event.stream_id] = (dict(event.headers or ()), bytearray())  # type: ignore[arg-type]
                elif isinstance(event, DataReceived):
                    begun[event.stream_id or 0][1].extend(event.data or b"")
                    connection.acknowledge_received_data(
                        event.flow_controlled_length or 0, event.stream_id or 0
                    )
                elif isinstance(event, StreamEnded) and event.stream_id is not None:
                    headers, body = begun.pop(event.stream_id)
                    request = self._request(
                        headers[":method"],
                        headers[":path"],
                        headers.get(":authority", ""),
                        headers,
                        bytes(body),
                        about,
                        "2",
                    )
                    response = await self._answer(request)
                    connection.send_headers(
                        event.stream_id,
                        [
                            (":status", str(response.status)),
                            *((k.lower(), v) for k, v in response.headers.items()),
                        ],
                    )
                    wants = headers[":method"] != "HEAD"
                    waiting[event.stream_id] = bytearray(response.body if wants else b"")
                    if response.stream is not None:
                        waiting[event.stream_id] = bytearray(b"".join([one async for one in response.stream]))
            _send_waiting(connection, waiting)
            writer.write(connection.data_to_send())
            await writer.drain()

    def _request(
        self,
        method: str,
        target: str,
        host: str,
        headers: dict[str, str],
        body: bytes,
        about: dict[str, Any],
        version: str,
    ) -> Request:
        self._note("request", **about, method=method, target=target, host=host, version=version)
        tls = about["sni"] is not None
        return Request(method, target, host, headers, body, tls, about["address"], about["port"], version)

    async def _answer(self, request: Request) -> Response:
        if request.address == METADATA:
            return Response(b"the machine's own credentials\n")
        try:
            found = self._place(request)(request)
            if inspect.isawaitable(found):
                found = await found
        except Exception as error:
            # A test that waits for an answer finds this among the events.
            self._note("error", host=request.host, target=request.target, error=repr(error))
            return Response(status=500)
        assert isinstance(found, Response)
        return found

    def _place(self, request: Request) -> Handler:
        name = request.host.rpartition(":")[0] if ":" in request.host else request.host
        return self._places.get(name.lower(), _standard)


def _standard(request: Request) -> Response:
    """What every server answers: where the request arrived, and a few paths that behave."""
    match request.path:
        case "/big":
            return Response(stream=_big(int(request.query.get("mb", "64"))))
        case "/redirect":
            return Response(status=302, headers={"Location": request.query["to"]})
        case "/echo":
            return Response(request.body)
        case "/status":
            return Response(status=int(request.query["code"]))
    about = {
        "host": request.host,
        "path": request.path,
        "method": request.method,
        "address": request.address,
        "port": request.port,
        "tls": request.tls,
        "version": request.version,
    }
    headers = {"Content-Type": "application/json", "Access-Control-Allow-Origin": "*"}
    return Response(json.dumps(about).encode() + b"\n", headers=headers)


def _send_waiting(connection: Any, waiting: dict[int, bytearray]) -> None:
    """Send what the client's windows have room for."""
    for stream, body in list(waiting.items()):
        while room := min(
            len(body), connection.local_flow_control_window(stream), connection.max_outbound_frame_size
        ):
            connection.send_data(stream, bytes(body[:room]))
            del body[:room]
        if not body:
            connection.end_stream(stream)
            del waiting[stream]


async def _big(megabytes: int) -> AsyncIterator[bytes]:
    for _ in range(megabytes * MEGABYTE // len(BLOCK)):
        yield BLOCK


def big_hash(megabytes: int) -> str:
    """The SHA-256 of what `/big?mb=N` answers."""
    digest = hashlib.sha256()
    for _ in range(megabytes * MEGABYTE // len(BLOCK)):
        digest.update(BLOCK)
    return digest.hexdigest()


def _file(directory: Path, request: Request) -> Response:
    path = directory / request.path.strip("/")
    if path.is_dir() and not path.with_name(path.name + ".json").exists():
        index = path / "index.html"
        if index.exists():
            path = index
        else:
            links = "".join(f'<a href="{each.name}">{each.name}</a>\n' for each in sorted(path.iterdir()))
            return Response(links.encode(), headers={"Content-Type": "text/html"})
    if path.with_name(path.name + ".json").exists():
        path = path.with_name(path.name + ".json")
    if not path.is_file():
        return Response(b"not here\n", status=404)
    kind = _TYPES.get(path.suffix, "application/octet-stream")
    return Response(path.read_bytes(), headers={"Content-Type": kind})


async def _body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", "0")))
    pieces = []
    while size := int((await reader.readline()).split(b";")[0], 16):
        pieces.append(await reader.readexactly(size))
        await reader.readexactly(2)
    while (await reader.readline()).strip():
        pass
    return b"".join(pieces)


async def _websocket(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: str) -> None:
    """Greet and then send every message back."""
    accept = base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()
    writer.write(
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Accept: {accept}\r\n\r\n".encode()
    )
    writer.write(_frame(1, b"welcome"))
    with contextlib.suppress(asyncio.IncompleteReadError):
        while True:
            first, second = await reader.readexactly(2)
            size = second & 0x7F
            if size == 126:
                (size,) = struct.unpack("!H", await reader.readexactly(2))
            elif size == 127:
                (size,) = struct.unpack("!Q", await reader.readexactly(8))
            mask = await reader.readexactly(4)
            data = bytes(byte ^ mask[i & 3] for i, byte in enumerate(await reader.readexactly(size)))
            writer.write(_frame(first & 0x0F, data))
            await writer.drain()
            if first & 0x0F == 8:
                return


def _frame(kind: int, data: bytes) -> bytes:
    size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + struct.pack("!H", len(data))
    return bytes([0x80 | kind]) + size + data
