"""HTTP/2 between a program and a server: streams side by side, each request judged.

Each side has a state machine of its own (the library `h2`), so frames and compressed headers of one side
never reach the other: what passes is a head that was decoded, judged and is encoded anew, and data. A stream
of the program has one stream of the server. Windows make the writer wait: data is acknowledged to its sender
when it was handed on to the other side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from stockade.egress.decoders.http_requests import RequestRefusedError
from stockade.egress.termination.byte_stream import ByteStream, StreamError
from stockade.egress.termination.http1_heads import OTHER_EXPECT, ResponseRefusedError, refusal_text
from stockade.egress.termination.http2_frames import FrameRefusedError
from stockade.egress.termination.http2_side import (
    CONNECTION_FIELDS,
    STREAMS,
    BadHeadError,
    Http2Side,
    begin,
    checked_fields,
    never_indexed,
    read_response,
    read_trailers,
)
from stockade.egress.termination.judge import JudgedRequest, RequestJudge
from stockade.egress.termination.messages import Fields, HttpExchange, RequestHead, ResponseHead
from stockade.egress.termination.override_fields import check_trailers

#: How long the server may take to send its settings.
_SETTINGS_SECONDS = 10.0
#: Interim responses of one stream.
_INTERIM = 16
_PSEUDO = {b":method", b":scheme", b":authority", b":path"}
_Codes = h2.errors.ErrorCodes


class _StreamHalf:
    """What waits to be sent on one stream, and what its sender has not been told yet."""

    __slots__ = ("data", "done", "ended", "trailers", "unacknowledged")

    def __init__(self) -> None:
        self.data = bytearray()
        self.trailers: Fields = ()
        #: Bytes that the sender's window lacks.
        self.unacknowledged = 0
        #: No more data comes; the end was sent.
        self.ended = self.done = False


class _Stream:
    """A request and its response."""

    __slots__ = ("answered", "down", "exchange", "interim", "request", "response", "up")

    def __init__(self, down: int, up: int, exchange: HttpExchange) -> None:
        self.down, self.up, self.exchange = down, up, exchange
        self.request, self.response = _StreamHalf(), _StreamHalf()
        self.interim = 0
        self.answered = False


class Http2Connection:
    """The streams of one connection."""

    def __init__(
        self,
        client: ByteStream,
        server: ByteStream,
        judge: RequestJudge,
        exchange: Callable[[RequestHead], HttpExchange],
        report: Callable[[JudgedRequest], None],
    ) -> None:
        self._down, self._up = Http2Side(client, client=False), Http2Side(server, client=True)
        self._judge, self._exchange, self._report = judge, exchange, report
        self._by_down: dict[int, _Stream] = {}
        self._by_up: dict[int, _Stream] = {}
        #: Whether the server has sent its settings.
        self._settled = False

    async def run(self) -> None:
        """Pass on streams until one side ends."""
        try:
            begin(self._up.http, {h2.settings.SettingCodes.ENABLE_PUSH: 0})
            await self._up.flush()
            async with asyncio.timeout(_SETTINGS_SECONDS):
                while not self._settled:
                    if not await self._read(self._up, self._from_server):
                        raise StreamError("HTTP/2: ended")
            most = min(STREAMS, self._up.http.remote_settings.max_concurrent_streams)
            begin(self._down.http, {h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: max(1, most)})
            await self._down.flush()
            await self._pass_both()
        except h2.exceptions.ProtocolError as error:
            await self._say_goodbye()
            raise StreamError(f"HTTP/2: {type(error).__name__}") from None
        except FrameRefusedError as error:
            self._report(self._judge.refused("", "limit", 0, str(error)))
            with contextlib.suppress(h2.exceptions.ProtocolError):
                self._down.http.close_connection(_Codes.ENHANCE_YOUR_CALM)
            await self._say_goodbye()
            raise StreamError("HTTP/2: too much") from None

    async def _say_goodbye(self) -> None:
        """Send what the state machines have to say about an error, if the other side still reads."""
        with contextlib.suppress(StreamError, TimeoutError):
            async with asyncio.timeout(1.0):
                await self._down.flush()

    async def _pass_both(self) -> None:
        directions = [
            asyncio.ensure_future(self._pass(self._down, self._from_client)),
            asyncio.ensure_future(self._pass(self._up, self._from_server)),
        ]
        try:
            done, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            for one in directions:
                one.cancel()
            await asyncio.gather(*directions, return_exceptions=True)

    async def _pass(self, side: Http2Side, act: Callable[[h2.events.Event], None]) -> None:
        while await self._read(side, act):
            if self._up.wants_no_more and not self._by_down:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    self._down.http.close_connection()
                await self._down.flush()
                return

    async def _read(self, side: Http2Side, act: Callable[[h2.events.Event], None]) -> bool:
        """Take the next bytes of a side, and send what follows from them; return False at its end."""
        events = await side.receive()
        if events is None:
            return False
        for event in events:
            act(event)
        await self._up.flush()
        await self._down.flush()
        return True

    # The program

    def _from_client(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._begin_request(event)
        elif isinstance(event, h2.events.DataReceived):
            self._take_data(self._down, self._by_down.get(event.stream_id), event, of_request=True)
        elif isinstance(event, h2.events.TrailersReceived):
            self._take_request_trailers(event)
        elif isinstance(event, h2.events.StreamEnded):
            stream = self._by_down.get(event.stream_id)
            if stream is not None:
                stream.request.data += stream.exchange.request_end()
                stream.request.ended = True
                self._send_request(stream)
        elif isinstance(event, h2.events.StreamReset):
            self._drop(self._by_down.get(event.stream_id), _Codes.CANCEL, down=False)
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            for stream in list(self._by_down.values()):
                self._send_response(stream)
        elif isinstance(event, h2.events.ConnectionTerminated):
            raise StreamError("HTTP/2: ended")

    def _begin_request(self, event: h2.events.RequestReceived) -> None:
        down = event.stream_id
        try:
            head, length, expects = self._read_head(event.headers)
        except BadHeadError as error:
            reason = "Host differs" if error.status == 421 else "not HTTP"
            self._refuse(down, self._judge.refused("", reason, error.status, str(error)))
            return
        judged = self._judge.judge(head)
        if judged.reason:
            self._refuse(down, judged)
            return
        if self._up.wants_no_more:
            self._down.http.reset_stream(down, _Codes.REFUSED_STREAM)
            return
        self._report(judged)
        exchange = self._exchange(head)
        sent = exchange.request_head(head)
        fields = [
            (b":method", sent.method.encode("ascii")),
            (b":scheme", sent.scheme.encode("ascii")),
            (b":authority", self._judge.authority.encode("ascii")),
            *never_indexed(
                ((b":path", sent.target.encode("ascii")), *sent.fields),
                ((b":path", head.target.encode("ascii")), *head.fields),
            ),
            *(() if exchange.reframes_request else length),
        ]
        try:
            up = self._up.http.get_next_available_stream_id()
            self._up.http.send_headers(up, fields, end_stream=event.stream_ended is not None)
        except (h2.exceptions.TooManyStreamsError, h2.exceptions.NoAvailableStreamIDError):
            self._down.http.reset_stream(down, _Codes.REFUSED_STREAM)
            return
        if expects and event.stream_ended is None:
            self._down.http.send_headers(down, [(b":status", b"100")])
        stream = _Stream(down, up, exchange)
        stream.request.done = event.stream_ended is not None
        self._by_down[down] = self._by_up[up] = stream

    def _read_head(self, headers: list[tuple[bytes, bytes]]) -> tuple[RequestHead, Fields, bool]:
        """Return the head of a request, its Content-Length, and whether the program waits for 100."""
        pseudo: dict[bytes, bytes] = {}
        fields: list[tuple[bytes, bytes]] = []
        length: Fields = ()
        expects = False
        for name, value in checked_fields(headers):
            if name.startswith(b":"):
                if name not in _PSEUDO or name in pseudo or fields:
                    raise BadHeadError("pseudo-headers")
                pseudo[name] = value
            elif name == b"host":
                self._check_authority(value)
            elif name == b"content-length":
                if length or not value.isdigit() or len(value) > 18:
                    raise BadHeadError("Content-Length")
                length = ((name, value),)
            elif name == b"expect":
                if expects or value.lower() != b"100-continue":
                    raise BadHeadError(OTHER_EXPECT)
                expects = True
            elif name in CONNECTION_FIELDS or (name == b"te" and value != b"trailers"):
                raise BadHeadError("header of a connection")
            else:
                fields.append((name, value))
        if pseudo.get(b":method", b"").upper() == b"CONNECT":
            raise BadHeadError("CONNECT", 403)
        if set(pseudo) != _PSEUDO:
            raise BadHeadError("pseudo-headers")
        self._check_authority(pseudo[b":authority"])
        if pseudo[b":scheme"] != self._judge.scheme.encode("ascii"):
            raise BadHeadError("scheme")
        try:
            method, path = pseudo[b":method"].decode("ascii"), pseudo[b":path"].decode("ascii")
        except UnicodeDecodeError:
            raise BadHeadError("pseudo-headers") from None
        judge = self._judge
        head = RequestHead(method, judge.scheme, judge.host, judge.port, path, tuple(fields))
        return head, length, expects

    def _check_authority(self, value: bytes) -> None:
        host, port = self._judge.host.encode("ascii"), b":%d" % self._judge.port
        usual = self._judge.authority == self._judge.host
        found = value.lower()
        if found != host + port and not (usual and found == host):
            shown = "".join(chr(byte) if 0x20 < byte < 0x7F else "?" for byte in found[:253])
            raise BadHeadError(
                f"it names {shown}, and the connection was opened to {self._judge.authority}", 421
            )

    def _refuse(self, down: int, judged: JudgedRequest) -> None:
        self._report(judged)
        text = refusal_text(judged.shown, judged.text).encode("ascii")
        http = self._down.http
        head = [
            (b":status", b"%d" % judged.status),
            (b"content-type", b"text/plain; charset=us-ascii"),
            (b"content-length", b"%d" % len(text)),
            (b"cache-control", b"no-store"),
        ]
        try:
            http.send_headers(down, head)
            if http.local_flow_control_window(down) >= len(text):
                http.send_data(down, text, end_stream=True)
                # What the program still sends of the request's body has nobody to read it.
                http.reset_stream(down, _Codes.NO_ERROR)
            else:
                http.reset_stream(down, _Codes.CANCEL)
        except h2.exceptions.StreamClosedError:
            return

    def _take_request_trailers(self, event: h2.events.TrailersReceived) -> None:
        stream = self._by_down.get(event.stream_id)
        if stream is None:
            return
        try:
            trailers = read_trailers(event.headers)
            check_trailers(trailers)
            stream.request.trailers = stream.exchange.request_trailers(trailers)
        except (BadHeadError, RequestRefusedError) as error:
            self._report(self._judge.refused("", "not HTTP", 400, str(error)))
            self._drop(stream, _Codes.PROTOCOL_ERROR)

    # The server

    def _from_server(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ResponseReceived | h2.events.InformationalResponseReceived):
            self._take_response(event)
        elif isinstance(event, h2.events.DataReceived):
            self._take_data(self._up, self._by_up.get(event.stream_id), event, of_request=False)
        elif isinstance(event, h2.events.TrailersReceived):
            stream = self._by_up.get(event.stream_id)
            if stream is not None:
                try:
                    stream.response.trailers = stream.exchange.response_trailers(read_trailers(event.headers))
                except BadHeadError:
                    self._drop(stream, _Codes.PROTOCOL_ERROR)
        elif isinstance(event, h2.events.StreamEnded):
            stream = self._by_up.get(event.stream_id)
            if stream is not None:
                try:
                    stream.response.data += stream.exchange.response_end()
                except ResponseRefusedError as error:
                    self._refuse_response(stream, error)
                    return
                stream.response.ended = True
                self._send_response(stream)
        elif isinstance(event, h2.events.StreamReset):
            self._drop(self._by_up.get(event.stream_id), event.error_code, up=False)
        elif isinstance(event, h2.events.WindowUpdated | h2.events.RemoteSettingsChanged):
            self._settled = self._settled or isinstance(event, h2.events.RemoteSettingsChanged)
            for stream in list(self._by_up.values()):
                self._send_request(stream)
        elif isinstance(event, h2.events.ConnectionTerminated):
            raise StreamError("HTTP/2: ended")

    def _take_response(
        self, event: h2.events.ResponseReceived | h2.events.InformationalResponseReceived
    ) -> None:
        stream = self._by_up.get(event.stream_id)
        if stream is None:
            return
        try:
            status, fields = read_response(event.headers)
            stream.interim += status < 200
            if status == 101 or stream.interim > _INTERIM:
                raise BadHeadError("interim responses")
        except BadHeadError as error:
            self._report(self._judge.refused("", "bad response", 502, str(error)))
            self._drop(stream, _Codes.PROTOCOL_ERROR)
            return
        try:
            head = stream.exchange.response_head(ResponseHead(status, fields))
        except ResponseRefusedError as error:
            self._refuse_response(stream, error)
            return
        if status == 100:
            # The egress has answered a program that waits for it.
            return
        stream.answered = status >= 200
        self._down.http.send_headers(stream.down, [(b":status", b"%d" % head.status), *head.fields])

    def _refuse_response(self, stream: _Stream, error: ResponseRefusedError) -> None:
        self._report(self._judge.refused("", "bad response", 502, str(error)))
        self._drop(stream, _Codes.PROTOCOL_ERROR)

    # Both

    def _take_data(
        self, side: Http2Side, stream: _Stream | None, event: h2.events.DataReceived, *, of_request: bool
    ) -> None:
        if stream is None:
            # It was reset, or refused: the window is for the other streams.
            side.http.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            return
        direction = stream.request if of_request else stream.response
        direction.unacknowledged += event.flow_controlled_length
        if of_request:
            direction.data += stream.exchange.request_data(event.data)
            self._send_request(stream)
        else:
            try:
                direction.data += stream.exchange.response_data(event.data)
            except ResponseRefusedError as error:
                self._refuse_response(stream, error)
                return
            self._send_response(stream)

    def _send_request(self, stream: _Stream) -> None:
        self._send(stream.request, self._up, stream.up, self._down, stream.down)
        self._finish(stream)

    def _send_response(self, stream: _Stream) -> None:
        if stream.answered:
            self._send(stream.response, self._down, stream.down, self._up, stream.up)
            self._finish(stream)

    def _send(
        self, direction: _StreamHalf, to: Http2Side, number: int, source: Http2Side, from_number: int
    ) -> None:
        """Send what the other side's window has room for, and give the sender as much room again."""
        if direction.done:
            return
        sent = 0
        try:
            while sent < len(direction.data):
                room = min(
                    to.http.local_flow_control_window(number),
                    to.http.max_outbound_frame_size,
                    len(direction.data) - sent,
                )
                if room <= 0:
                    break
                last = direction.ended and not direction.trailers and sent + room == len(direction.data)
                to.http.send_data(number, bytes(memoryview(direction.data)[sent : sent + room]), last)
                direction.done = last
                sent += room
            del direction.data[:sent]
            if direction.ended and not direction.data and not direction.done:
                if direction.trailers:
                    to.http.send_headers(number, list(direction.trailers), end_stream=True)
                else:
                    to.http.end_stream(number)
                direction.done = True
        except h2.exceptions.StreamClosedError:
            direction.data.clear()
            direction.done = True
        to.gate.earn(sent)
        # What the exchange holds back, or has shortened, counts as sent as soon as nothing waits.
        room = direction.unacknowledged if not direction.data else min(sent, direction.unacknowledged)
        if room:
            direction.unacknowledged -= room
            with contextlib.suppress(h2.exceptions.StreamClosedError):
                source.http.acknowledge_received_data(room, from_number)

    def _finish(self, stream: _Stream) -> None:
        if stream.request.done and stream.response.done:
            self._forget(stream)
        elif stream.response.done:
            # The server has answered before the body ended, and need not read the rest.
            self._drop(stream, _Codes.NO_ERROR)

    def _drop(
        self, stream: _Stream | None, code: int | _Codes, *, up: bool = True, down: bool = True
    ) -> None:
        """End a stream on the sides that have not ended it themselves."""
        if stream is None:
            return
        for wanted, side, number, direction in (
            (up, self._up, stream.up, stream.request),
            (down, self._down, stream.down, stream.response),
        ):
            if wanted:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    side.http.reset_stream(number, code)
            direction.data.clear()
            direction.done = True
        self._give_back(stream)
        self._forget(stream)

    def _give_back(self, stream: _Stream) -> None:
        for side, number, direction in (
            (self._down, stream.down, stream.request),
            (self._up, stream.up, stream.response),
        ):
            if direction.unacknowledged:
                with contextlib.suppress(h2.exceptions.ProtocolError):
                    side.http.acknowledge_received_data(direction.unacknowledged, number)
                direction.unacknowledged = 0

    def _forget(self, stream: _Stream) -> None:
        self._by_down.pop(stream.down, None)
        self._by_up.pop(stream.up, None)
