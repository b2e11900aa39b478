"""Requests to a server that speaks HTTP/1.1.

Some servers do not read the body of a request, and take it for the next one. So a request with a body has a
connection to itself: nothing was sent on it before, it says `Connection: close`, and nothing is sent after.
What such a server answers to a request that was hidden in the body, if it does not close, ends with that
connection. Requests without a body share a connection for as long as nothing comes on it unasked.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable

from stockade.egress.decoders.http_requests import RequestRefusedError
from stockade.egress.termination.byte_stream import ByteStream, StreamError
from stockade.egress.termination.http1_heads import (
    CHUNKS,
    HEAD_SIZE,
    NO_BODY,
    Http1Request,
    Http1Response,
    ResponseRefusedError,
    decode_response,
    decode_trailers,
    encode_chunk,
    encode_request,
    encode_trailers,
)
from stockade.egress.termination.messages import Fields, RequestHead
from stockade.egress.termination.reader import HEAD_SECONDS, PIECE, BadByteError, StreamReader, TooLongError
from stockade.egress.termination.server_exchange import ServerWait

_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")


class Http1Server:
    """One connection to a server."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream, self.reader = stream, StreamReader(stream)
        #: Whether a request was sent on it.
        self.used = False

    def is_quiet(self) -> bool:
        """Whether it is open, and the server has sent nothing unasked."""
        try:
            self.reader.look()
        except StreamError:
            return False
        return not self.reader.holds and not self.reader.ended


class Http1Upstream:
    """The connections to a server, for one connection of a program."""

    def __init__(
        self, dial: Callable[[], Awaitable[ByteStream]], first: ByteStream | None, authority: str
    ) -> None:
        self._dial, self._authority = dial, authority
        #: The one that the next request without a body may use.
        self._kept = None if first is None else Http1Server(first)

    @property
    def watched(self) -> ByteStream | None:
        """The connection that waits for the next request, if there is one."""
        return None if self._kept is None else self._kept.stream

    async def look(self) -> bool:
        """Return whether the server has neither ended the connection that waits nor spoken unasked."""
        return self._kept is None or self._kept.is_quiet()

    async def begin(
        self, request: Http1Request, head: RequestHead, wait: ServerWait, *, reframes: bool
    ) -> Http1ServerExchange:
        """Send a head, on a connection of its own if a body follows."""
        alone = request.body != NO_BODY
        server = await self._server(alone)
        server.used = True
        server.reader.wait = lambda: wait(server.stream)
        if reframes and alone:
            request = request._replace(body=CHUNKS)
        request = request._replace(closes=request.closes or alone)
        try:
            await server.stream.write(encode_request(request, head, self._authority))
        except BaseException:
            server.stream.close()
            raise
        return Http1ServerExchange(server, request, self._finish)

    def close(self) -> None:
        """Close the connection that waits for the next request."""
        if self._kept is not None:
            self._kept.stream.close()
            self._kept = None

    async def _server(self, alone: bool) -> Http1Server:
        kept = self._kept
        if kept is not None and not (alone and kept.used):
            self._kept = None
            if kept.is_quiet():
                return kept
            kept.stream.close()
        return Http1Server(await self._dial())

    def _finish(self, server: Http1Server, keeps: bool) -> None:
        if keeps and self._kept is None:
            self._kept = server
        else:
            server.stream.close()


class Http1ServerExchange:
    """One request and its response."""

    def __init__(
        self, server: Http1Server, request: Http1Request, finish: Callable[[Http1Server, bool], None]
    ) -> None:
        self.server, self._request, self._finish = server, request, finish
        self._stream, self._reader = server.stream, server.reader
        self.trailers: Fields = ()
        self._chunked = False
        #: What the body of the response, or its present chunk, still has to come; -2 for all until the end.
        self._left = 0
        #: Whether a chunk has come, and the end of its line has not.
        self._in_chunk = False
        self._closes = request.closes

    async def send_data(self, data: bytes) -> None:
        """Send a piece of the request's body."""
        await self._stream.write(encode_chunk(data) if self._request.body.chunked else data)

    async def send_end(self, rest: bytes, trailers: Fields) -> None:
        """Send the last piece of the request's body, and its trailers."""
        if self._request.body.chunked:
            rest = encode_chunk(rest) + encode_trailers(trailers)
        await self._stream.write(rest)

    async def read_head(self) -> Http1Response:
        """Return the next interim response, or the final one."""
        try:
            block = await self._reader.head(HEAD_SIZE, HEAD_SECONDS)
        except TooLongError:
            raise ResponseRefusedError("head too long") from None
        except BadByteError as error:
            raise ResponseRefusedError(str(error)) from None
        if not block:
            raise StreamError("ended without a response")
        response = decode_response(block, self._request.head.method)
        self._chunked = response.body.chunked
        self._left = 0 if self._chunked else response.body.length
        self._closes = self._closes or response.closes
        return response

    async def read_data(self) -> bytes:
        """Return the next piece of the response's body; b"" at its end."""
        try:
            if self._chunked and not self._left and not await self._next_chunk():
                return b""
        except (TooLongError, BadByteError):
            raise ResponseRefusedError("chunk size") from None
        except RequestRefusedError as error:
            raise ResponseRefusedError(str(error)) from None
        if not self._left:
            return b""
        data = await self._reader.some(PIECE if self._left < 0 else min(PIECE, self._left))
        if not data and self._left > 0:
            raise StreamError("ended in a body")
        self._left = (self._left - len(data) if self._left > 0 else self._left) if data else 0
        return data

    async def _next_chunk(self) -> bool:
        """Read the line before a chunk; return False behind the last one."""
        if self._in_chunk and await self._reader.line(2):
            raise ResponseRefusedError("end of a chunk")
        line = await self._reader.line()
        if not _CHUNK_SIZE.fullmatch(line):
            raise ResponseRefusedError("chunk size")
        self._left = int(line, 16)
        self._in_chunk = self._left > 0
        if not self._left:
            self.trailers = decode_trailers(await self._reader.trailers(HEAD_SIZE, HEAD_SECONDS))
            self._chunked = False
        return self._in_chunk

    def look(self) -> bool:
        """Whether something has come that was not read yet."""
        if not self._reader.holds:
            self._reader.look()
        return self._reader.holds

    def finish(self, *, whole: bool) -> None:
        """Keep the connection for the next request, or close it."""
        self._reader.wait = self._stream.wait
        self._finish(self.server, whole and not self._closes)
