"""The event stream of one run, as the clients of the contract read it.

Every event is one line of JSON with `type` and `timestamp`, and a blank line after it (in `/code`, none). The
stream begins with `init`, has exactly one terminal event, `error` or `execution_complete`, and ends at once
after it; only `/code` sends both. While nothing happens there is a `ping` every three seconds.

    run ──► OutputSink (bytes) ──► EventStream ──► EventResponse ──► client

The stream holds bytes, not events: a program that prints a million empty lines costs a million bytes, and the
events are made when the client takes them. When the client is slow, the sinks are full and the supervisor
stops reading the program's pipes. When the client has gone, the response calls `gone`, which cancels the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec
from litestar.response import Response

from stockade.runs.io.streams import StreamConsumer
from stockade.server.wire.line_endings import LineRule, LineSplitter

if TYPE_CHECKING:
    from litestar.types import ASGIApp, HTTPResponseBodyEvent, HTTPResponseStartEvent, Receive, Scope, Send

#: Seconds between two signs of life.
PING = 3.0
#: How many bytes of output wait for a slow client before the program has to.
ROOM = 1 << 20
#: How many bytes of output become events at once, and how many events: lines can be empty, and nothing else
#: of the supervisor moves meanwhile. Output is looked at in slices of this size.
AT_ONCE, MOST_EVENTS, SLICE = 1 << 16, 2048, 1 << 13
HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

_encode = msgspec.json.Encoder().encode
#: Characters that end a line for clients that split by `str.splitlines`, and what JSON writes instead.
_LINE_BREAKS = (
    (b"\xc2\x85", b"\\u0085"),
    (b"\xe2\x80\xa8", b"\\u2028"),
    (b"\xe2\x80\xa9", b"\\u2029"),
)

StreamName = Literal["stdout", "stderr"]


class _OutputBytes(NamedTuple):
    """Output that is not an event yet; without data, the end of its stream."""

    stream: StreamName
    at: int
    data: bytes


class OutputSink(StreamConsumer):
    """Takes one output stream of a run: give it as `on_stdout` or `on_stderr`."""

    def __init__(self, events: EventStream, stream: StreamName) -> None:
        self._events, self._stream = events, stream

    @property
    def full(self) -> bool:  # type: ignore[override]
        """Whether the client has not yet taken what was printed before."""
        return self._events.full

    def __call__(self, data: bytes) -> None:
        self._events.output(self._stream, data)

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` when the client has taken enough, or has gone."""
        self._events.when_room(resume)


class EventStream:
    """The events of one run, from the run to the client."""

    def __init__(self, rule: LineRule, *, code: bool = False) -> None:
        """Make a stream. `code`: one object per line, and an error is not the end."""
        self.stdout, self.stderr = OutputSink(self, "stdout"), OutputSink(self, "stderr")
        self._code = code
        self._after = b"\n" if code else b"\n\n"
        self._splitters = {"stdout": LineSplitter(rule), "stderr": LineSplitter(rule)}
        self._items: deque[_OutputBytes | bytes] = deque()
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._resumes: list[Callable[[], None]] = []
        #: Whether the terminal event is in the stream.
        self.ended = False
        self._abandoned = False

    def init(self, identifier: str) -> None:
        """Begin the stream with the id by which the client can interrupt the run."""
        self._put("init", text=identifier)

    def output(self, stream: StreamName, data: bytes) -> None:
        """Add what the program printed."""
        if data and not self.ended and not self._abandoned:
            self._items.append(_OutputBytes(stream, _now(), bytes(data)))
            self._size += len(data)
            self._wake()

    def execution_count(self, number: int) -> None:
        """Say how many runs this code context has had."""
        self._put("execution_count", execution_count=number)

    def result(self, forms: Mapping[str, str]) -> None:
        """Add a value in one or more forms: `text` and MIME types."""
        self._flush()
        self._put("result", results=dict(forms))

    def error(self, name: str, value: str, traceback: Sequence[str] = (), outcome: str = "") -> None:
        """Add an error; it ends the stream, except in `/code`. For commands the value is the exit code.

        `outcome` is the library's word for how the run ended. The contract has none; our client reads it.
        """
        self._flush()
        error = {"ename": name, "evalue": value, "traceback": list(traceback)}
        self._put("error", error=error | ({"outcome": outcome} if outcome else {}))
        if not self._code:
            self._end()

    def complete(self, milliseconds: float) -> None:
        """End the stream: the run is over, after this time."""
        self._flush()
        self._put("execution_complete", execution_time=max(0, round(milliseconds)))
        self._end()

    def abandon(self) -> None:
        """Take nothing more: the client has gone. A run that goes on is read to its end and not kept."""
        self._abandoned = True
        self._items.clear()
        self._size = 0
        self._let_in()
        self._wake()

    @property
    def full(self) -> bool:
        """Whether so much waits for the client that the program should wait, too."""
        return self._size > ROOM and not self._abandoned

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` when the stream is no longer full."""
        if self.full:
            self._resumes.append(resume)
        else:
            resume()

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the encoded events as they come, until the end."""
        while not self._abandoned:
            if self._items:
                yield self._take()
            elif self.ended:
                return
            elif not await self._woken():
                yield self._event("ping", _now(), {"text": "pong"})

    async def _woken(self) -> bool:
        """Wait for something to send; False if it is time for a sign of life."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(PING):
                await self._waiter
        except TimeoutError:
            return False
        finally:
            self._waiter = None
        return True

    def _take(self) -> bytes:
        """Take what is there, up to `AT_ONCE` bytes of output and about `MOST_EVENTS`, as encoded events."""
        parts: list[bytes] = []
        taken = 0
        while self._items and taken < AT_ONCE and len(parts) < MOST_EVENTS:
            item = self._items.popleft()
            if isinstance(item, bytes):
                parts.append(item)
                continue
            if len(item.data) > SLICE:
                self._items.appendleft(item._replace(data=item.data[SLICE:]))
                item = item._replace(data=item.data[:SLICE])
            taken += len(item.data)
            parts.append(self._output_events(item))
        self._size -= taken
        if self._size <= ROOM // 2:
            self._let_in()
        return b"".join(parts)

    def _output_events(self, item: _OutputBytes) -> bytes:
        """Return the events of some output; the same as `_event` for each text, and quicker."""
        splitter = self._splitters[item.stream]
        texts = splitter.feed(item.data) if item.data else splitter.rest()
        before = f'{{"type":"{item.stream}","text":'.encode()
        after = b',"timestamp":%d}%b' % (item.at, self._after)
        return _without_line_breaks(b"".join([before + _encode(text) + after for text in texts]))

    def _flush(self) -> None:
        """End both output streams: what follows belongs after everything that was printed."""
        if not self.ended and not self._abandoned:
            self._items += [_OutputBytes("stdout", _now(), b""), _OutputBytes("stderr", _now(), b"")]

    def _put(self, kind: str, **fields: object) -> None:
        if not self.ended and not self._abandoned:
            self._items.append(self._event(kind, _now(), fields))
            self._wake()

    def _end(self) -> None:
        self.ended = True
        self._wake()

    def _event(self, kind: str, at: int, fields: Mapping[str, object]) -> bytes:
        try:
            line = _encode({"type": kind, **fields, "timestamp": at})
        except UnicodeEncodeError:  # a name of the host with bytes that are no text
            line = _encode({"type": kind, **_readable(fields), "timestamp": at})
        return _without_line_breaks(line) + self._after

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _let_in(self) -> None:
        resumes, self._resumes = self._resumes, []
        for resume in resumes:
            resume()


def _without_line_breaks(encoded: bytes) -> bytes:
    for raw, written in _LINE_BREAKS:
        if raw in encoded:
            encoded = encoded.replace(raw, written)
    return encoded


def _now() -> int:
    return time.time_ns() // 1_000_000


def _readable(value: Any) -> Any:
    """Return a value whose texts can all be encoded."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_readable(key): _readable(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_readable(one) for one in value]
    return value


class EventResponse(Response[None]):
    """The HTTP answer that sends an `EventStream`. `gone` is called if the client leaves before the end."""

    def __init__(self, stream: EventStream, gone: Callable[[], object]) -> None:
        super().__init__(None, media_type="text/event-stream")
        self.stream, self._gone = stream, gone

    def to_asgi_response(self, *_: object, **__: object) -> ASGIApp:  # type: ignore[override]
        """Return the answer as an ASGI application."""
        return self._answer

    async def _answer(self, _: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Whatever ended the wait, also the end of this server: without a client the run is cancelled.
            if not (sending.done() and self.stream.ended):
                self.stream.abandon()
                self._gone()
            for task in (sending, leaving):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, OSError):
                    await task

    async def _send(self, send: Send) -> None:
        start: HTTPResponseStartEvent = {"type": "http.response.start", "status": 200, "headers": HEADERS}
        await send(start)
        async for piece in self.stream.pieces():
            await send(_body(piece, more=True))
            # `send` need not wait, least of all after the client has gone: others have their turn here.
            await asyncio.sleep(0)
        await send(_body(b"", more=False))


def _body(piece: bytes, *, more: bool) -> HTTPResponseBodyEvent:
    return {"type": "http.response.body", "body": piece, "more_body": more}


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
