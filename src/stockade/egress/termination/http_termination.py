"""What all connections with rules for requests share: TLS ends here, and begins anew towards the server.

The server is dialled and its certificate verified first; then the program gets a certificate of this
sandbox's own authority for the same host. The program may choose HTTP/2 only if the server speaks it; to a
server that does, requests of HTTP/1 go over HTTP/2 too, and never the other way round.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cryptography import x509
from OpenSSL import SSL

from stockade.egress.client_checks import RefusalError, check_name, read_hello
from stockade.egress.decoders.tls_hello import HelloReader
from stockade.egress.dialer import DialError, wait_readable
from stockade.egress.records import RecordWriter
from stockade.egress.termination.authority import CertificateAuthority
from stockade.egress.termination.byte_stream import ByteStream, StreamError
from stockade.egress.termination.connection import TerminatedConnection
from stockade.egress.termination.http1_connection import Http1Connection
from stockade.egress.termination.http1_heads import refusal, refusal_text
from stockade.egress.termination.http1_upstream import Http1Upstream
from stockade.egress.termination.http2_connection import Http2Connection
from stockade.egress.termination.http2_upstream import Http2Upstream
from stockade.egress.termination.judge import JudgedRequest, RequestJudge, RequestRules
from stockade.egress.termination.messages import HttpExchange, RequestHead, pass_unchanged
from stockade.egress.termination.server_exchange import ServerRoute
from stockade.egress.termination.streams import (
    HTTP1,
    HTTP2,
    SYSTEM_CONTEXT,
    CertificateError,
    TlsStream,
    client_context,
    connect_tls,
    mix_randomness,
    serve_tls,
)
from stockade.egress.termination.tls_sessions import TlsSessions

_PEEK_SIZE = 65536


class TerminatedPlace(NamedTuple):
    """Where a connection leads."""

    scheme: str
    name: str
    port: int


class HttpTermination:
    """What all terminated connections of one sandbox share."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        records: RecordWriter,
        rules: Callable[[], RequestRules],
        roots: bytes = b"",
    ) -> None:
        mix_randomness()
        self.loop, self.records, self.rules = loop, records, rules
        self.authority = CertificateAuthority()
        # The first certificate takes longer than the next ones.
        self.authority.certificate_for("localhost")
        self.context: SSL.Context = (
            client_context(x509.load_pem_x509_certificates(roots)) if roots else SYSTEM_CONTEXT
        )
        self._sessions = TlsSessions()
        #: What an allowed request and its response pass through.
        self.exchange: Callable[[RequestHead], HttpExchange] = pass_unchanged

    async def hello(self, connection: socket.socket, name: str) -> list[bytes]:
        """Look at a program's TLS hello without taking it; return the protocols that it offers."""
        seen = 0
        try:
            while True:
                try:
                    data = connection.recv(_PEEK_SIZE, socket.MSG_PEEK)
                except BlockingIOError:
                    data = None
                if data is not None and len(data) <= seen:
                    raise RefusalError("not TLS") if data else DialError("nothing sent")
                if data:
                    hello = read_hello(HelloReader(), data)
                    if hello is not None:
                        check_name(hello, name)
                        return [one for one in (HTTP2, HTTP1) if one in hello.alpn]
                    # Readable again only when there is more.
                    seen = len(data)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, seen + 1)
                await wait_readable(self.loop, connection)
        finally:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)

    async def serve(
        self, place: TerminatedPlace, offered: list[bytes], seconds: float, ends: TerminatedConnection
    ) -> None:
        """Serve a connection of a program that offers these protocols; a handshake may take some seconds."""
        client, server = ByteStream(self.loop, ends.inside), ByteStream(self.loop, ends.outside)
        spoken = answered = HTTP1
        if place.scheme == "https":
            async with asyncio.timeout(seconds):
                server, answered, problem = await self._meet_server(place, ends.outside)
                spoken = HTTP2 if answered == HTTP2 and HTTP2 in offered else HTTP1
                shown = serve_tls(self.loop, ends.inside, place.name, self.authority, spoken)
                chosen = await shown.shake_hands() or HTTP1
            if problem:
                ends.record.close("failed", "bad certificate" if "certificate" in problem else "not TLS")
                await ends.say(shown, refusal(502, refusal_text("the connection", problem)))
                return
            if chosen != spoken:
                raise StreamError("not TLS")
            client = shown
        ends.counted(server)
        reader = ends.reader(client)
        spend = None if ends.budget is None else ends.budget.spend_request
        judge = RequestJudge(self.rules, place.scheme, place.name, place.port, spend)
        report = partial(self._report, place)
        if spoken == HTTP2:
            await Http2Connection(client, server, judge, self.exchange, report).run()
            client.close()
            server.close()
            return
        dial = partial(self._dial, place, seconds, ends)
        route: ServerRoute = Http1Upstream(dial, None if answered == HTTP2 else server, judge.authority)
        if answered == HTTP2:
            route = Http2Upstream(partial(dial, HTTP2), server, route, judge.authority)
        await ends.serve_http1(Http1Connection(reader, route, judge, self.exchange, report))

    async def _meet_server(
        self, place: TerminatedPlace, outside: socket.socket
    ) -> tuple[ByteStream, bytes, str]:
        """Shake hands with the server; return also the protocol, and what is wrong with the server or ""."""
        try:
            return *await self._secure(place, outside, [HTTP2, HTTP1]), ""
        except CertificateError:
            problem = "the server's certificate is not valid for its name"
        except StreamError:
            problem = "the server does not speak TLS 1.2 or 1.3"
        return ByteStream(self.loop, outside), HTTP1, problem

    async def _dial(
        self, place: TerminatedPlace, seconds: float, ends: TerminatedConnection, protocol: bytes = HTTP1
    ) -> ByteStream:
        """Return another connection to the server."""
        outside = await ends.connect()
        if place.scheme == "http":
            return ends.counted(ByteStream(self.loop, outside))
        async with asyncio.timeout(seconds):
            stream, answered = await self._secure(place, outside, [protocol])
        if answered != protocol:
            raise StreamError("not TLS")
        return ends.counted(stream)

    async def _secure(
        self, place: TerminatedPlace, outside: socket.socket, protocols: list[bytes]
    ) -> tuple[TlsStream, bytes]:
        """Begin TLS with the server; return also the protocol that it has chosen."""
        known, now = self._sessions.find(place.name, place.port), self._sessions.clock()
        session = None if known is None else known.session
        stream = connect_tls(self.loop, outside, place.name, self.context, protocols, session)
        protocol = await stream.shake_hands() or HTTP1
        verified = known.verified if known is not None and stream.resumed else now
        stream.on_end = partial(self._sessions.keep, place.name, place.port, verified)
        return stream, protocol

    def _report(self, place: TerminatedPlace, judged: JudgedRequest) -> None:
        self.records.request(place.name, place.port, judged.shown, reason=judged.reason, rule=judged.rule)


# Loads, in the template, what the libraries load when they are used first. These keys are never used.
CertificateAuthority().certificate_for("localhost")
