"""HTTP/1.1 between a program and a server: one request after the other, each judged.

The next request is read only when the response to the one before has ended, so that no response can be taken
for another's. A server that sends more than a response has ended the connection by that. While a response
comes, the rest of the request's body is passed on, and the end of the program's side ends the exchange.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from stockade.egress.decoders.http_requests import RequestRefusedError
from stockade.egress.termination.http1_heads import (
    CHUNKS,
    HEAD_SIZE,
    NO_BODY,
    Http1Request,
    Http1Response,
    ResponseRefusedError,
    decode_request,
    decode_response,
    decode_trailers,
    encode_request,
    encode_response,
    encode_trailers,
    refusal,
    refusal_text,
)
from stockade.egress.termination.judge import JudgedRequest, RequestJudge
from stockade.egress.termination.messages import HttpExchange, RequestHead
from stockade.egress.termination.override_fields import check_trailers
from stockade.egress.termination.reader import BadByteError, StreamReader, TooLongError
from stockade.egress.termination.streams import ByteStream, StreamError

_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,15}")
_PIECE = 65536
#: How long a head may take from its first byte on.
_HEAD_SECONDS = 20.0
#: Responses with a status below 200 before the final one.
_INTERIM = 16
_METHOD = re.compile(rb"[!-~]{1,32}")
#: How long a server may take to say why it reads no more, and a peer of a WebSocket to say its last words.
_LAST_ANSWER_SECONDS = 1.0
_HOST_REASONS = frozenset(
    {"Host differs", "target differs", "no Host", "several Hosts", "Host without the port"}
)


class ClientGoneError(Exception):
    """The program has closed the connection, or does not wait for the response any more."""


class Http1Connection:
    """The requests and responses of one connection."""

    def __init__(
        self,
        client: ByteStream,
        server: ByteStream,
        judge: RequestJudge,
        exchange: Callable[[RequestHead], HttpExchange],
        report: Callable[[JudgedRequest], None],
    ) -> None:
        self._client, self._server = client, server
        self._from_client, self._from_server = StreamReader(client), StreamReader(server)
        self._from_server.wait = self._wait_for_server
        self._judge, self._exchange, self._report = judge, exchange, report
        #: Whether another coroutine reads what the program sends.
        self._sending = False
        #: Whether the head of the final response was passed on.
        self._answered = False

    async def run(self) -> bytes:
        """Pass on requests until one side ends; return the last words to the program, b"" for none."""
        while True:
            self._from_client.wait = self._wait_for_request
            try:
                block = await self._from_client.head(HEAD_SIZE, _HEAD_SECONDS)
            except TooLongError:
                return self._refuse(b"", RequestRefusedError("head too long"))
            except BadByteError as error:
                return self._refuse(b"", RequestRefusedError(str(error)))
            except ClientGoneError:
                return b""
            self._from_client.wait = self._client.wait
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

    async def _wait_for_request(self) -> None:
        """Wait for the program. A server that ends, or says something unasked, ends the connection."""
        self._from_server.look()
        if self._from_server.ended or self._from_server.holds:
            raise ClientGoneError
        await self._client.wait_with(self._server)

    async def _wait_for_server(self) -> None:
        """Wait for the server, and for the end of the program unless another coroutine does."""
        if self._sending or self._from_client.holds or self._from_client.ended:
            await self._server.wait()
            return
        self._from_client.look()
        if self._from_client.ended and not self._client.half_closes:
            raise ClientGoneError
        if not self._from_client.holds and not self._from_client.ended:
            await self._server.wait_with(self._client)

    def _refuse(self, block: bytes, error: RequestRefusedError) -> bytes:
        found = _METHOD.match(block)
        status, reason = (421, "Host differs") if str(error) in _HOST_REASONS else (400, "not HTTP")
        text = f"{error} (it names {error.host})" if error.host else str(error)
        self._report(self._judge.refused(found[0].decode("ascii") if found else "", reason, status, text))
        return refusal(status, refusal_text("a request", text))

    async def _serve(self, request: Http1Request) -> bool:
        """Pass on one request and its response; return whether the connection goes on."""
        exchange = self._exchange(request.head)
        self._answered = False
        head = exchange.request_head(request.head)
        sent = request
        if exchange.reframes_request and request.body != NO_BODY:
            sent = request._replace(body=CHUNKS)
        await self._server.write(encode_request(sent, head, self._judge.authority))
        try:
            if request.body == NO_BODY:
                response = await self._pass_response(request, exchange)
            else:
                response = await self._pass_both(request, exchange)
        except ResponseRefusedError as error:
            judged = self._judge.refused(request.head.method, "bad response", 502, str(error))
            self._report(judged)
            if not self._answered:
                text = refusal_text("the response", f"the server sent what is not HTTP: {error}")
                self._last_words = refusal(502, text)
                return False
            raise StreamError("bad response") from None
        except RequestRefusedError as error:
            self._last_words = self._refuse(b"", error)
            if self._answered:
                raise StreamError("refused") from None
            return False
        if response.upgrades:
            await self._pass_bytes(exchange)
            return False
        return not (request.closes or response.closes or self._sending)

    async def _pass_both(self, request: Http1Request, exchange: HttpExchange) -> Http1Response:
        """Pass on a body and, at the same time, the response."""
        self._sending = True
        sending = asyncio.ensure_future(self._send_body(request, exchange))
        responding = asyncio.ensure_future(self._pass_response(request, exchange))
        try:
            await asyncio.wait((sending, responding), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and isinstance(sending.exception(), StreamError) and not responding.done():
                # A server that reads no more may have said why.
                await asyncio.wait((responding,), timeout=_LAST_ANSWER_SECONDS)
            if sending.done() and (error := sending.exception()) is not None and not responding.done():
                raise error
            return await responding
        finally:
            # A response is the last one if the body has not been sent to its end.
            self._sending = not sending.done() or sending.cancelled() or sending.exception() is not None
            for one in (sending, responding):
                one.cancel()
            await asyncio.gather(sending, responding, return_exceptions=True)

    async def _send_body(self, request: Http1Request, exchange: HttpExchange) -> None:
        left = request.body.length
        frame = _chunk if exchange.reframes_request else bytes
        if not request.body.chunked:
            while left:
                data = await self._from_client.some(min(_PIECE, left))
                if not data:
                    raise StreamError("ended in a body")
                left -= len(data)
                await self._server.write(frame(exchange.request_data(data)))
            last = encode_trailers(()) if exchange.reframes_request else b""
            await self._server.write(frame(exchange.request_end()) + last)
            return
        try:
            while size := _chunk_size(await self._from_client.line()):
                while size:
                    data = await self._from_client.some(min(_PIECE, size))
                    if not data:
                        raise StreamError("ended in a body")
                    size -= len(data)
                    await self._server.write(_chunk(exchange.request_data(data)))
                if await self._from_client.line(2):
                    raise RequestRefusedError("end of a chunk")
            trailers = decode_trailers(await self._from_client.trailers(HEAD_SIZE, _HEAD_SECONDS))
        except (TooLongError, BadByteError):
            raise RequestRefusedError("chunk size") from None
        check_trailers(trailers)
        trailers = exchange.request_trailers(trailers)
        await self._server.write(_chunk(exchange.request_end()) + encode_trailers(trailers))

    async def _pass_response(self, request: Http1Request, exchange: HttpExchange) -> Http1Response:
        """Pass on the interim responses and the final one."""
        for _ in range(_INTERIM):
            try:
                block = await self._from_server.head(HEAD_SIZE, _HEAD_SECONDS)
            except TooLongError:
                raise ResponseRefusedError("head too long") from None
            except BadByteError as error:
                raise ResponseRefusedError(str(error)) from None
            if not block:
                raise StreamError("ended without a response")
            response = decode_response(block, request.head.method)
            final = response.head.status >= 200 or response.upgrades
            if response.upgrades and not request.upgrades:
                raise ResponseRefusedError("upgrade that was not asked for")
            # HTTP/1.0 knows neither interim responses nor chunks.
            if not final and not request.minor:
                continue
            chunks = response.body.chunked and bool(request.minor)
            closes = request.closes or response.closes or (response.body.chunked and not chunks)
            head = exchange.response_head(response.head)
            response = response._replace(words=exchange.response_words(response.words))
            if exchange.reframes_response and response.body != NO_BODY:
                chunks = bool(request.minor)
                closes = closes or not chunks
                response = response._replace(length=None)
            self._answered = final
            encoded = encode_response(response, head, chunks=chunks, closes=closes)
            if not final or response.upgrades or response.body == NO_BODY:
                await self._client.write(encoded)
                if final:
                    return response._replace(closes=closes)
                continue
            await self._pass_response_body(response, exchange, encoded, chunks=chunks)
            return response._replace(closes=closes)
        raise ResponseRefusedError("too many interim responses")

    async def _pass_response_body(
        self, response: Http1Response, exchange: HttpExchange, encoded: bytes, *, chunks: bool
    ) -> None:
        """Pass on a body; the head goes with its first bytes, unless they are late."""
        source, frame = self._from_server, _chunk if chunks else bytes
        if not source.holds:
            source.look()
        if not source.holds:
            await self._client.write(encoded)
            encoded = b""
        if not response.body.chunked:
            left = response.body.length
            while left:
                data = await source.some(_PIECE if left < 0 else min(_PIECE, left))
                if not data:
                    if left > 0:
                        raise StreamError("ended in a body")
                    break
                left -= len(data) if left > 0 else 0
                await self._client.write(encoded + frame(exchange.response_data(data)))
                encoded = b""
            rest = encoded + frame(exchange.response_end()) + (encode_trailers(()) if chunks else b"")
            if rest:
                await self._client.write(rest)
            return
        try:
            while size := _response_chunk_size(await source.line()):
                while size:
                    data = await source.some(min(_PIECE, size))
                    if not data:
                        raise StreamError("ended in a body")
                    size -= len(data)
                    await self._client.write(encoded + frame(exchange.response_data(data)))
                    encoded = b""
                if await source.line(2):
                    raise ResponseRefusedError("end of a chunk")
            trailers = exchange.response_trailers(
                decode_trailers(await source.trailers(HEAD_SIZE, _HEAD_SECONDS))
            )
        except (TooLongError, BadByteError):
            raise ResponseRefusedError("chunk size") from None
        except RequestRefusedError as error:
            raise ResponseRefusedError(str(error)) from None
        last = frame(exchange.response_end()) + (encode_trailers(trailers) if chunks else b"")
        await self._client.write(encoded + last)

    async def _pass_bytes(self, exchange: HttpExchange) -> None:
        """Pass on the bytes of a WebSocket in both directions until one ends."""
        self._from_server.wait = self._server.wait
        directions = [
            asyncio.ensure_future(_copy(self._from_client, self._server)),
            asyncio.ensure_future(_copy(self._from_server, self._client, exchange.upgraded_data)),
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
    while data := await source.some(_PIECE):
        await target.write(change(data))
    target.end()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def _chunk_size(line: bytes) -> int:
    if not _CHUNK_SIZE.fullmatch(line):
        raise RequestRefusedError("chunk size")
    return int(line, 16)


def _response_chunk_size(line: bytes) -> int:
    if not _CHUNK_SIZE.fullmatch(line):
        raise ResponseRefusedError("chunk size")
    return int(line, 16)
