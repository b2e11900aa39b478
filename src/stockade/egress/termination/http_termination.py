"""What all connections with rules for requests share: TLS ends here, and begins anew towards the server.

The server is dialled and its certificate verified first; then the program gets a certificate of this
sandbox's own authority for the same host. The program may choose only a protocol that the server speaks.
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
from stockade.egress.termination.judge import JudgedRequest, RequestJudge, RequestRules
from stockade.egress.termination.messages import HttpExchange, RequestHead, pass_unchanged
from stockade.egress.termination.streams import (
    HTTP1,
    HTTP2,
    SYSTEM_CONTEXT,
    CertificateError,
    client_context,
    connect_tls,
    mix_randomness,
    serve_tls,
)

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
        protocol = HTTP1
        if place.scheme == "https":
            async with asyncio.timeout(seconds):
                server, protocol, problem = await self._meet_server(place, offered, ends.outside)
                shown = serve_tls(self.loop, ends.inside, place.name, self.authority, protocol)
                chosen = await shown.shake_hands() or HTTP1
            if problem:
                ends.record.close("failed", "bad certificate" if "certificate" in problem else "not TLS")
                await ends.say(shown, refusal(502, refusal_text("the connection", problem)))
                return
            if chosen != protocol:
                raise StreamError("not TLS")
            client = shown
        ends.counted(server)
        reader = ends.reader(client)
        spend = None if ends.budget is None else ends.budget.spend_request
        judge = RequestJudge(self.rules, place.scheme, place.name, place.port, spend)
        report = partial(self._report, place)
        if protocol == HTTP2:
            await Http2Connection(client, server, judge, self.exchange, report).run()
            client.close()
            server.close()
            return
        upstream = Http1Upstream(partial(self._dial, place, seconds, ends), server, judge.authority)
        await ends.serve_http1(Http1Connection(reader, upstream, judge, self.exchange, report))

    async def _meet_server(
        self, place: TerminatedPlace, offered: list[bytes], outside: socket.socket
    ) -> tuple[ByteStream, bytes, str]:
        """Shake hands with the server; return also the protocol, and what is wrong with the server or ""."""
        stream = connect_tls(self.loop, outside, place.name, self.context, offered)
        try:
            return stream, await stream.shake_hands() or HTTP1, ""
        except CertificateError:
            return stream, HTTP1, "the server's certificate is not valid for its name"
        except StreamError:
            return stream, HTTP1, "the server does not speak TLS 1.2 or 1.3"

    async def _dial(self, place: TerminatedPlace, seconds: float, ends: TerminatedConnection) -> ByteStream:
        """Return another connection to the server, for HTTP/1.1."""
        outside = await ends.connect()
        if place.scheme == "http":
            return ends.counted(ByteStream(self.loop, outside))
        stream = connect_tls(self.loop, outside, place.name, self.context, [HTTP1])
        async with asyncio.timeout(seconds):
            await stream.shake_hands()
        return ends.counted(stream)

    def _report(self, place: TerminatedPlace, judged: JudgedRequest) -> None:
        self.records.request(place.name, place.port, judged.shown, reason=judged.reason, rule=judged.rule)


# Loads, in the template, what the libraries load when they are used first. These keys are never used.
CertificateAuthority().certificate_for("localhost")
