"""Requests of a program that speaks HTTP/1 to a server that speaks HTTP/2.

The length of every body is in its frames, so no server can take it for another request: all requests of a
program's connection share one connection to the server, with bodies or without. A WebSocket is not offered
over HTTP/2 by many servers, so it has a connection with HTTP/1.1.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus

import h2.events
import h2.exceptions
import h2.settings

from stockade.egress.termination.byte_stream import ByteStream, StreamError
from stockade.egress.termination.http1_heads import (
    NO_BODY,
    UNTIL_END,
    Body,
    Http1Request,
    Http1Response,
    ResponseRefusedError,
)
from stockade.egress.termination.http2_frames import FrameRefusedError
from stockade.egress.termination.http2_side import (
    BadHeadError,
    Http2Side,
    begin,
    never_indexed,
    read_response,
    read_trailers,
)
from stockade.egress.termination.messages import Fields, RequestHead, ResponseHead
from stockade.egress.termination.server_exchange import ServerExchange, ServerRoute, ServerWait

_WORDS = {status.value: status.phrase.encode("ascii") for status in HTTPStatus}
#: What the library, the count of frames, or a head can be wrong with.
_WRONG = (h2.exceptions.ProtocolError, FrameRefusedError, BadHeadError)
#: What a server says only if it takes no further request, or if it makes no sense.
_UNASKED = (h2.events.ConnectionTerminated, h2.events.DataReceived)


class Http2Upstream:
    """The connection to a server, for one connection of a program."""

    def __init__(
        self,
        dial: Callable[[], Awaitable[ByteStream]],
        first: ByteStream,
        http1: ServerRoute,
        authority: str,
    ) -> None:
        """Take what dials the server again for HTTP/2, the first connection, and what serves WebSockets."""
        self._dial, self._http1, self._authority = dial, http1, authority.encode("ascii")
        self._side = _begin_side(first)

    @property
    def watched(self) -> ByteStream | None:
        """The connection that waits for the next request."""
        return self._side.stream

    async def look(self) -> bool:
        """Answer what the server asked meanwhile; return whether it takes another request."""
        side = self._side
        try:
            await side.flush()
            while (data := side.stream.read_now()) is not None:
                events = side.take(data)
                if events is None or any(isinstance(one, _UNASKED) for one in events):
                    return False
                await side.flush()
                await side.stream.take_turns()
        except (StreamError, *_WRONG):
            return False
        return not side.wants_no_more

    async def begin(
        self, request: Http1Request, head: RequestHead, wait: ServerWait, *, reframes: bool
    ) -> ServerExchange:
        """Send a head, as that of a stream."""
        if request.upgrades:
            return await self._http1.begin(request, head, wait, reframes=reframes)
        if not await self.look():
            self._side.stream.close()
            self._side = _begin_side(await self._dial())
        ends, http = request.body == NO_BODY, self._side.http
        has_length = request.has_length and not (reframes and not ends)
        fields = [
            (b":method", head.method.encode("ascii")),
            (b":scheme", head.scheme.encode("ascii")),
            (b":authority", self._authority),
            *never_indexed(
                ((b":path", head.target.encode("ascii")), *head.fields),
                ((b":path", request.head.target.encode("ascii")), *request.head.fields),
            ),
            *([(b"content-length", b"%d" % request.body.length)] if has_length else ()),
        ]
        try:
            number = http.get_next_available_stream_id()
            http.send_headers(number, fields, end_stream=ends)
        except h2.exceptions.ProtocolError as error:
            raise StreamError(f"HTTP/2: {type(error).__name__}") from None
        await self._side.flush()
        return Http2ServerExchange(self._side, number, request.head.method, wait)

    def close(self) -> None:
        """Close the connection."""
        self._side.stream.close()
        self._http1.close()


def _begin_side(stream: ByteStream) -> Http2Side:
    side = Http2Side(stream, client=True)
    begin(side.http, {h2.settings.SettingCodes.ENABLE_PUSH: 0})
    return side


class Http2ServerExchange:
    """One stream: a request and its response."""

    def __init__(self, side: Http2Side, number: int, method: str, wait: ServerWait) -> None:
        self._side, self._number, self._method, self._wait = side, number, method, wait
        self.trailers: Fields = ()
        self._heads: deque[Http1Response] = deque()
        self._data = bytearray()
        #: Bytes that the server's window lacks.
        self._unacknowledged = 0
        self._ended = False
        #: Raised in both directions, each time as a new one: it keeps the frames that it passes through.
        self._failure: Callable[[], StreamError | ResponseRefusedError] | None = None
        #: Whether one direction reads what the server sends, and what tells the other that something came.
        self._reading, self._moved = False, asyncio.Event()

    async def send_data(self, data: bytes) -> None:
        """Send a piece of the request's body, as far as the server's window has room; wait for the rest."""
        http, sent = self._side.http, 0
        while sent < len(data):
            try:
                window = http.local_flow_control_window(self._number)
                room = min(window, http.max_outbound_frame_size, len(data) - sent)
                if room > 0:
                    http.send_data(self._number, data[sent : sent + room])
            except h2.exceptions.ProtocolError:
                raise StreamError("HTTP/2: the server reads no more") from None
            if room > 0:
                sent += room
                self._side.gate.earn(room)
                await self._side.flush()
            else:
                # The program may not take the response before it has sent all.
                await self._receive()

    async def send_end(self, rest: bytes, trailers: Fields) -> None:
        """Send the last piece of the request's body, and its trailers."""
        await self.send_data(rest)
        try:
            if trailers:
                self._side.http.send_headers(self._number, list(trailers), end_stream=True)
            else:
                self._side.http.end_stream(self._number)
        except h2.exceptions.ProtocolError:
            raise StreamError("HTTP/2: the server reads no more") from None
        await self._side.flush()

    async def read_head(self) -> Http1Response:
        """Return the next interim response, or the final one."""
        while not self._heads:
            if self._ended:
                raise StreamError("ended without a response")
            await self._receive()
        return self._heads.popleft()

    async def read_data(self) -> bytes:
        """Return the next piece of the response's body; b"" at its end."""
        while not self._data and not self._ended:
            await self._receive()
        data, self._data = bytes(self._data), bytearray()
        self._give_back()
        if not self._ended:
            await self._side.flush()
        return data

    def look(self) -> bool:
        """Whether something has come that was not read yet."""
        return bool(self._data) or self._ended

    def finish(self, *, whole: bool) -> None:
        """Let go of the stream; one that has not come to its end is the last of its connection."""
        self._give_back()
        self._side.wants_no_more = self._side.wants_no_more or not whole

    def _give_back(self) -> None:
        """Give the server room for as much data as was read; that of an ended stream is the connection's."""
        if self._unacknowledged:
            self._side.http.acknowledge_received_data(self._unacknowledged, self._number)
            self._unacknowledged = 0

    async def _receive(self) -> None:
        """Take what the server sends next; its windows bound what is held until the program takes it."""
        if self._reading:
            await self._moved.wait()
            return
        self._reading = True
        self._moved.clear()
        try:
            if self._failure is None:
                await self._read()
        finally:
            self._reading = False
            self._moved.set()
        if self._failure is not None:
            raise self._failure()
        await self._side.flush()

    async def _read(self) -> None:
        try:
            events = await self._side.receive(self._wait)
            if events is None:
                raise StreamError("HTTP/2: ended")
            for event in events:
                self._take(event)
        except StreamError as error:
            self._failure = partial(StreamError, str(error))
        except _WRONG as error:
            # The words of the library may quote the server's, in which no secret was masked.
            ours = not isinstance(error, h2.exceptions.ProtocolError)
            reason = str(error) if ours else type(error).__name__
            self._failure = partial(ResponseRefusedError, f"HTTP/2: {reason}")

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            raise StreamError("HTTP/2: ended")
        number = getattr(event, "stream_id", 0)
        if isinstance(event, h2.events.DataReceived):
            if number != self._number:
                self._side.http.acknowledge_received_data(event.flow_controlled_length, number)
                return
            self._data += event.data
            self._unacknowledged += event.flow_controlled_length
        elif number != self._number or self._ended:
            return
        elif isinstance(event, h2.events.ResponseReceived | h2.events.InformationalResponseReceived):
            ended = isinstance(event, h2.events.ResponseReceived) and event.stream_ended is not None
            self._heads.append(_as_http1(event.headers, self._method, ended=ended))
        elif isinstance(event, h2.events.TrailersReceived):
            self.trailers = read_trailers(event.headers)
        elif isinstance(event, h2.events.StreamEnded):
            self._ended = True
        elif isinstance(event, h2.events.StreamReset):
            raise StreamError("HTTP/2: reset")


def _as_http1(headers: list[tuple[bytes, bytes]], method: str, *, ended: bool) -> Http1Response:
    """Return the head of a response, as HTTP/1 would have it."""
    status, fields = read_response(headers)
    lengths = {value for name, value in fields if name == b"content-length"}
    if status == 101 or len(lengths) > 1 or any(not one.isdigit() or len(one) > 18 for one in lengths):
        raise BadHeadError("status" if status == 101 else "Content-Length")
    length = int(lengths.pop()) if lengths else None
    kept = tuple(one for one in fields if one[0] != b"content-length")
    body = UNTIL_END if length is None else Body(length)
    if method == "HEAD" or status < 200 or status in (204, 304):
        body = NO_BODY
    elif ended:
        if length:
            raise BadHeadError("Content-Length")
        body, length = NO_BODY, 0
    head = ResponseHead(status, kept)
    return Http1Response(head, _WORDS.get(status, b""), body, length, closes=False, upgrades=False)
