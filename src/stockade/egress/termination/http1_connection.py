"""HTTP/1.1 between a program and the egress process: one request after the other, each judged.

The next request is read only when the response to the one before has ended, so that no response can be taken
for another's. While a response comes, the rest of the request's body is passed on, and the end of the
program's side ends the exchange. What leads the requests to the server is a `ServerRoute`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from stockade.egress.decoders.http_requests import RequestRefusedError
from stockade.egress.termination.byte_stream import ByteStream, StreamError
from stockade.egress.termination.http1_heads import (
    HEAD_SIZE,
    NO_BODY,
    Http1Request,
    Http1Response,
    ResponseRefusedError,
    decode_request,
    decode_trailers,
    encode_chunk,
    encode_response,
    encode_trailers,
    refusal,
    refusal_of,
    refusal_text,
)
from stockade.egress.termination.http1_upstream import Http1Server, Http1ServerExchange
from stockade.egress.termination.judge import JudgedRequest, RequestJudge
from stockade.egress.termination.messages import HttpExchange, RequestHead
from stockade.egress.termination.override_fields import check_trailers
from stockade.egress.termination.reader import HEAD_SECONDS, PIECE, BadByteError, StreamReader, TooLongError
from stockade.egress.termination.server_exchange import ServerExchange, ServerRoute

_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")
#: Responses with a status below 200 before the final one.
_INTERIM = 16
_METHOD = re.compile(rb"[!-~]{1,32}")
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
#: How long a server may take to say why it reads no more, a program to send the rest of a body that was
#: answered already, and a peer of a WebSocket to say its last words.
_LAST_ANSWER_SECONDS = 1.0


class ClientGoneError(Exception):
    """The program has closed the connection, or does not wait for the response any more."""


class Http1Connection:
    """The requests and responses of one connection."""

    def __init__(
        self,
        client: StreamReader,
        upstream: ServerRoute,
        judge: RequestJudge,
        exchange: Callable[[RequestHead], HttpExchange],
        report: Callable[[JudgedRequest], None],
    ) -> None:
        self.client = client.stream
        self._from_client, self._upstream = client, upstream
        self._judge, self._exchange, self._report = judge, exchange, report
        #: Whether another coroutine reads what the program sends.
        self._sending = False
        #: Whether the head of the final response was passed on, and whether all of it was.
        self._answered = self._responded = False

    async def run(self) -> bytes:
        """Pass on requests until one side ends; return the last words to the program, b"" for none."""
        while True:
            self._from_client.wait = self._wait_for_request
            try:
                block = await self._from_client.head(HEAD_SIZE, HEAD_SECONDS)
            except TooLongError:
                return self._refuse(b"", RequestRefusedError("head too long"))
            except BadByteError as error:
                return self._refuse(b"", RequestRefusedError(str(error)))
            except ClientGoneError:
                return b""
            self._from_client.wait = self.client.wait
            if not block:
                return b""
            try:
                request = decode_request(block, self._judge.scheme, self._judge.host, self._judge.port)
            except RequestRefusedError as error:
                return self._refuse(block, error)
            judged = self._judge.judge(request.head)
            self._report(judged)
            if judged.reason:
                return refusal(judged.status, refusal_text(judged.shown, judged.text))
            if not await self._serve(request):
                return self._last_words

    _last_words = b""

    def release(self) -> None:
        """Let go of the bytes that are held, and of the connection that waits for a request."""
        self._from_client.release()
        self._upstream.close()

    async def _wait_for_request(self) -> None:
        """Wait for the program. A server that ends, or says something unasked, ends the connection."""
        if not await self._upstream.look():
            raise ClientGoneError
        watched = self._upstream.watched
        await (self.client.wait() if watched is None else self.client.wait_with(watched))

    async def _wait_for_server(self, server: ByteStream) -> None:
        """Wait for the server, and for the end of the program unless another coroutine does."""
        if self._sending or self._from_client.holds or self._from_client.ended:
            await server.wait()
            return
        self._from_client.look()
        if self._from_client.ended and not self.client.half_closes:
            raise ClientGoneError
        if not self._from_client.holds and not self._from_client.ended:
            await server.wait_with(self.client)

    def _refuse(self, block: bytes, error: RequestRefusedError) -> bytes:
        found, refused = _METHOD.match(block), refusal_of(error)
        method = found[0].decode("ascii") if found else ""
        self._report(self._judge.refused(method, refused.reason, refused.status, refused.text))
        return refused.response

    async def _serve(self, request: Http1Request) -> bool:
        """Pass on one request and its response; return whether the connection goes on."""
        exchange = self._exchange(request.head)
        self._answered = self._responded = False
        head = exchange.request_head(request.head)
        server = await self._upstream.begin(
            request, head, self._wait_for_server, reframes=exchange.reframes_request
        )
        whole = False
        try:
            if request.expects:
                await self.client.write(_CONTINUE)
            if request.body == NO_BODY:
                response = await self._pass_response(request, exchange, server)
            else:
                response = await self._pass_both(request, exchange, server)
            if response.upgrades:
                assert isinstance(server, Http1ServerExchange)
                await self._pass_bytes(exchange, server.server)
            whole = not (response.upgrades or self._sending)
        except ResponseRefusedError as error:
            self._report(self._judge.refused(request.head.method, "bad response", 502, str(error)))
            if self._answered:
                raise StreamError("bad response") from None
            text = refusal_text("the response", f"the server sent what is not HTTP: {error}")
            self._last_words = refusal(502, text)
        except RequestRefusedError as error:
            self._last_words = self._refuse(b"", error)
            if self._answered:
                raise StreamError("refused") from None
        finally:
            server.finish(whole=whole)
        return whole and not response.closes

    async def _pass_both(
        self, request: Http1Request, exchange: HttpExchange, server: ServerExchange
    ) -> Http1Response:
        """Pass on a body and, at the same time, the response."""
        self._sending = True
        sending = asyncio.ensure_future(self._send_body(request, exchange, server))
        responding = asyncio.ensure_future(self._pass_response(request, exchange, server))
        try:
            await asyncio.wait((sending, responding), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and isinstance(sending.exception(), StreamError) and not responding.done():
                # A server that reads no more may have said why.
                await asyncio.wait((responding,), timeout=_LAST_ANSWER_SECONDS)
            if sending.done() and (error := sending.exception()) is not None and not responding.done():
                raise error
            response = await responding
            self._responded = True
            # The server has answered before it has read all; the program sends the rest all the same.
            await asyncio.wait((sending,), timeout=_LAST_ANSWER_SECONDS)
            return response
        finally:
            # A response is the last one if the body has not been sent to its end.
            self._sending = not sending.done() or sending.cancelled() or sending.exception() is not None
            for one in (sending, responding):
                one.cancel()
            await asyncio.gather(sending, responding, return_exceptions=True)

    async def _send_body(self, request: Http1Request, exchange: HttpExchange, server: ServerExchange) -> None:
        if not request.body.chunked:
            await self._send_bytes(request.body.length, exchange, server)
            await self._unless_answered(server.send_end(exchange.request_end(), ()))
            return
        try:
            while size := _chunk_size(await self._from_client.line()):
                await self._send_bytes(size, exchange, server)
                if await self._from_client.line(2):
                    raise RequestRefusedError("end of a chunk")
            trailers = decode_trailers(await self._from_client.trailers(HEAD_SIZE, HEAD_SECONDS))
        except (TooLongError, BadByteError):
            raise RequestRefusedError("chunk size") from None
        check_trailers(trailers)
        trailers = exchange.request_trailers(trailers)
        await self._unless_answered(server.send_end(exchange.request_end(), trailers))

    async def _send_bytes(self, left: int, exchange: HttpExchange, server: ServerExchange) -> None:
        while left:
            data = await self._from_client.some(min(PIECE, left))
            if not data:
                raise StreamError("ended in a body")
            left -= len(data)
            await self._unless_answered(server.send_data(exchange.request_data(data)))

    async def _unless_answered(self, sending: Awaitable[None]) -> None:
        """Send a piece of a body; once all of the response was passed on, the server need not read it."""
        try:
            await sending
        except StreamError:
            if not self._responded:
                raise

    async def _pass_response(
        self, request: Http1Request, exchange: HttpExchange, server: ServerExchange
    ) -> Http1Response:
        """Pass on the interim responses and the final one; it `closes` if the program's connection ends."""
        for _ in range(_INTERIM):
            response = await server.read_head()
            if response.upgrades and not request.upgrades:
                raise ResponseRefusedError("upgrade that was not asked for")
            if response.head.status >= 200 or response.upgrades:
                return await self._pass_final(request, exchange, server, response)
            head = exchange.response_head(response.head)
            # The egress has answered a program that waits for 100. HTTP/1.0 knows no interim responses.
            if request.minor and head.status != 100:
                words = exchange.response_words(response.words)
                response = response._replace(words=words)
                await self.client.write(encode_response(response, head, chunks=False, closes=False))
        raise ResponseRefusedError("too many interim responses")

    async def _pass_final(
        self, request: Http1Request, exchange: HttpExchange, server: ServerExchange, response: Http1Response
    ) -> Http1Response:
        head = exchange.response_head(response.head)
        if exchange.reframes_response and response.body != NO_BODY:
            response = response._replace(length=None)
        has_end = response.body == NO_BODY or response.length is not None
        # HTTP/1.0 knows no chunks: the end of such a body is that of the connection.
        chunks = not has_end and not response.upgrades and request.minor > 0
        closes = request.closes or not (has_end or chunks)
        response = response._replace(words=exchange.response_words(response.words), closes=closes)
        encoded = encode_response(response, head, chunks=chunks, closes=closes)
        self._answered = True
        if response.upgrades or response.body == NO_BODY:
            await self.client.write(encoded)
        else:
            await self._pass_response_body(exchange, server, encoded, chunks=chunks)
        return response

    async def _pass_response_body(
        self, exchange: HttpExchange, server: ServerExchange, encoded: bytes, *, chunks: bool
    ) -> None:
        """Pass on a body; the head goes with its first bytes, unless they are late."""
        frame = encode_chunk if chunks else bytes
        if not server.look():
            await self.client.write(encoded)
            encoded = b""
        while data := await server.read_data():
            await self.client.write(encoded + frame(exchange.response_data(data)))
            encoded = b""
        trailers = exchange.response_trailers(server.trailers)
        last = frame(exchange.response_end()) + (encode_trailers(trailers) if chunks else b"")
        if encoded or last:
            await self.client.write(encoded + last)

    async def _pass_bytes(self, exchange: HttpExchange, server: Http1Server) -> None:
        """Pass on the bytes of a WebSocket in both directions until one ends."""
        server.reader.wait = server.stream.wait
        directions = [
            asyncio.ensure_future(_copy(self._from_client, server.stream)),
            asyncio.ensure_future(_copy(server.reader, self.client, exchange.upgraded_data)),
        ]
        try:
            done, _ = await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
            # The other side may have last words.
            await asyncio.wait(directions, timeout=_LAST_ANSWER_SECONDS)
        finally:
            for one in directions:
                one.cancel()
            await asyncio.gather(*directions, return_exceptions=True)


async def _copy(
    source: StreamReader, target: ByteStream, change: Callable[[bytes], bytes] = lambda data: data
) -> None:
    while data := await source.some(PIECE):
        await target.write(change(data))
    target.end()


def _chunk_size(line: bytes) -> int:
    if not _CHUNK_SIZE.fullmatch(line):
        raise RequestRefusedError("chunk size")
    return int(line, 16)
