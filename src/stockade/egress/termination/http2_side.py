"""One side of a connection of HTTP/2: its bytes, its frames, and the heads that it may send."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

import h2.config
import h2.connection
import h2.events
import h2.settings
from hpack import NeverIndexedHeaderTuple

from stockade.egress.termination.byte_stream import ByteStream
from stockade.egress.termination.http2_frames import FrameGate
from stockade.egress.termination.messages import Fields

#: Streams that a peer may have at once.
STREAMS = 100
#: Bytes of data that a sender may send ahead, for one stream and for all.
STREAM_WINDOW, WINDOW = 256 * 1024, 1 << 20
_FIRST_WINDOW = 65535
#: The most of the headers sent to a peer that is kept to compress further ones. A peer may ask for 4 GiB,
#: and the library searches all of it for each header.
_TABLE = 4096
MOST_FIELDS = 256
_NAME = re.compile(rb"[!#$%&'*+.^_`|~0-9a-z-]+")
_STATUS = re.compile(rb"[1-9][0-9]{2}")
_BAD_IN_VALUE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
#: What is about one connection, and what HTTP/2 forbids.
CONNECTION_FIELDS = frozenset(
    {
        b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade",
        b"http2-settings", b"proxy-authenticate", b"proxy-authorization",
    }
)  # fmt: skip
_NOT_IN_TRAILERS = CONNECTION_FIELDS | {b"host", b"content-length", b"te", b"trailer"}


class BadHeadError(ValueError):
    """A head that HTTP/2 does not allow; the message is a short fixed reason."""

    def __init__(self, reason: str, status: int = 400) -> None:
        super().__init__(reason)
        self.status = status


class Http2Side:
    """One side: its bytes, its frames, and the library's state machine."""

    def __init__(self, stream: ByteStream, *, client: bool) -> None:
        self.stream = stream
        self.http = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=client, header_encoding=None, logger=None)
        )
        self.gate = FrameGate(preface=not client)
        self._lock = asyncio.Lock()
        self.wants_no_more = False

    async def flush(self) -> None:
        """Send what the state machine has to say."""
        async with self._lock:
            while data := self.http.data_to_send():
                await self.stream.write(data)

    async def receive(
        self, wait: Callable[[ByteStream], Awaitable[None]] = ByteStream.wait
    ) -> list[h2.events.Event] | None:
        """Return the next events; None at the end of the stream."""
        await self.stream.take_turns()
        while (data := self.stream.read_now()) is None:
            await wait(self.stream)
        return self.take(data)

    def take(self, data: bytes) -> list[h2.events.Event] | None:
        """Return the events of what has come; None at the end of the stream."""
        if not data:
            return None
        passed = self.gate.feed(data)
        self.wants_no_more = self.wants_no_more or passed.goes_away
        events = self.http.receive_data(passed.data) if passed.data else []
        if self.http.encoder.header_table_size > _TABLE:
            self.http.encoder.header_table_size = _TABLE
        return events


def begin(http: h2.connection.H2Connection, settings: dict[h2.settings.SettingCodes, int]) -> None:
    """Say hello to a peer, with our settings and these."""
    http.local_settings = h2.settings.Settings(
        client=http.config.client_side,
        initial_values={
            h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
            h2.settings.SettingCodes.MAX_HEADER_LIST_SIZE: http.DEFAULT_MAX_HEADER_LIST_SIZE,
            h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS: STREAMS,
            **settings,
        },
    )
    http.initiate_connection()
    http.increment_flow_control_window(WINDOW - _FIRST_WINDOW)


def checked_fields(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the fields of a head, or raise BadHeadError."""
    if len(headers) > MOST_FIELDS:
        raise BadHeadError("too many headers")
    found = []
    for name, value in headers:
        if not _NAME.fullmatch(name.removeprefix(b":")):
            raise BadHeadError("name of a header")
        if _BAD_IN_VALUE.search(value) or value != value.strip(b" \t"):
            raise BadHeadError("value of a header")
        found.append((bytes(name), bytes(value)))
    return found


def read_response(headers: list[tuple[bytes, bytes]]) -> tuple[int, Fields]:
    """Return status and fields of a response, or raise BadHeadError."""
    found = checked_fields(headers)
    if not found or found[0][0] != b":status" or not _STATUS.fullmatch(found[0][1]):
        raise BadHeadError("status")
    fields = tuple(found[1:])
    if any(name.startswith(b":") or name in CONNECTION_FIELDS for name, _ in fields):
        raise BadHeadError("header of a connection")
    return int(found[0][1]), fields


def read_trailers(headers: list[tuple[bytes, bytes]]) -> Fields:
    """Return trailers, or raise BadHeadError."""
    found = tuple(checked_fields(headers))
    if any(name.startswith(b":") or name in _NOT_IN_TRAILERS for name, _ in found):
        raise BadHeadError("trailer that must be a header")
    return found


def never_indexed(sent: Fields, came: Fields) -> list[tuple[bytes, bytes]]:
    """Return fields so that what was written into them here enters no table of compressed headers."""
    known = set(came)
    return [one if one in known else NeverIndexedHeaderTuple(*one) for one in sent]
