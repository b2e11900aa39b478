"""Connections to one sandbox's supervisor: HTTP/1.1 over its unix socket, kept open between requests."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterable, Sequence

import h11
import msgspec

from stockade.server.record import SOCKET
from stockade.server.wire.errors import SERVICE_UNAVAILABLE, ApiError, ErrorBody

#: How many idle connections to keep for each sandbox.
MOST_IDLE = 16
PIECE = 1 << 16

Headers = Sequence[tuple[bytes, bytes]]


class UpstreamConnection:
    """One connection to a supervisor."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)

    async def send(self, event: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        """Send a part of the request."""
        data = self._http.send(event)
        if data:
            self._writer.write(data)
            await self._writer.drain()

    def post(self, *events: h11.Request | h11.Data | h11.EndOfMessage) -> None:
        """Send parts of a small request at once."""
        self._writer.write(b"".join(self._http.send(event) or b"" for event in events))

    async def receive(self) -> h11.Response | h11.Data | h11.EndOfMessage:
        """Return the next part of the answer."""
        while True:
            event = self._http.next_event()
            if isinstance(event, h11.Response | h11.Data | h11.EndOfMessage):
                return event
            if event is h11.NEED_DATA:
                self._http.receive_data(await self._reader.read(PIECE))
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise ConnectionResetError("the supervisor closed the connection")

    def is_fresh(self) -> bool:
        """Whether an idle connection can still be used."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    def reset(self) -> bool:
        """Prepare for the next request; False if the connection cannot take one."""
        try:
            self._http.start_next_cycle()
        except h11.ProtocolError:
            return False
        return self.is_fresh()

    def close(self) -> None:
        """Close it at once, whatever is under way: the supervisor then cancels the request."""
        self._writer.transport.abort()


class Upstream:
    """The supervisor of one sandbox."""

    def __init__(self, directory: int) -> None:
        self._directory = directory
        self._idle: list[UpstreamConnection] = []
        self._closed = False

    async def acquire(self) -> UpstreamConnection:
        """Return a connection, an idle one if there is one."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh():
                return connection
            connection.close()
        if self._closed:
            raise _unreachable()
        end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            end.setblocking(False)
            # The path of the socket may be longer than an address can be.
            path = f"/proc/self/fd/{self._directory}/{SOCKET}"
            try:
                await asyncio.get_running_loop().sock_connect(end, path)
            except OSError:
                raise _unreachable() from None
            return UpstreamConnection(*await asyncio.open_unix_connection(sock=end, limit=PIECE))
        except BaseException:
            end.close()
            raise

    def release(self, connection: UpstreamConnection) -> None:
        """Keep a connection for the next request, if it can take one."""
        if not self._closed and len(self._idle) < MOST_IDLE and connection.reset():
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections, and make no more."""
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def call(self, method: str, path: str, content: object = None) -> bytes:
        """Make one small request and return its answer's body; an error of the supervisor is raised."""
        body = b"" if content is None else msgspec.json.encode(content)
        headers = [("host", "supervisor"), ("content-length", str(len(body)))]
        if body:
            headers.append(("content-type", "application/json"))
        connection = await self.acquire()
        try:
            connection.post(
                h11.Request(method=method, target=path, headers=headers), *_data(body), h11.EndOfMessage()
            )
            status, answer = 0, bytearray()
            while not isinstance(event := await connection.receive(), h11.EndOfMessage):
                if isinstance(event, h11.Response):
                    status = event.status_code
                else:
                    answer += event.data
        except (OSError, h11.ProtocolError):
            connection.close()
            raise _unreachable() from None
        except BaseException:
            connection.close()
            raise
        self.release(connection)
        if status >= 400:
            with contextlib.suppress(msgspec.DecodeError):
                found = msgspec.json.decode(answer, type=ErrorBody)
                raise ApiError(status, found.code, found.message)
            raise _unreachable()
        return bytes(answer)


def _data(body: bytes) -> Iterable[h11.Data]:
    return [h11.Data(data=body)] if body else []


def _unreachable() -> ApiError:
    # Not 502 or 503: the SDKs repeat GET and DELETE after those, for seconds.
    return ApiError(500, SERVICE_UNAVAILABLE, "the sandbox's supervisor does not answer")
