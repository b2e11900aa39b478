"""One connection whose requests are judged, from the program's hello to its end.

The server is dialled and its certificate verified first; then the program gets a certificate of this
sandbox's own authority for the same host. The program may choose only a protocol that the server speaks, so
both sides speak the same one.
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
from stockade.egress.network_budget import HostBudget
from stockade.egress.records import ConnectionRecord, RecordWriter
from stockade.egress.relay import reset
from stockade.egress.termination.authority import CertificateAuthority
from stockade.egress.termination.http1_connection import ClientGoneError, Http1Connection
from stockade.egress.termination.http1_heads import refusal, refusal_text
from stockade.egress.termination.http2_connection import Http2Connection
from stockade.egress.termination.judge import JudgedRequest, RequestJudge, RequestRules
from stockade.egress.termination.messages import HttpExchange, RequestHead
from stockade.egress.termination.streams import (
    HTTP1,
    HTTP2,
    SYSTEM_CONTEXT,
    ByteStream,
    CertificateError,
    StreamError,
    client_context,
    connect_tls,
    mix_randomness,
    serve_tls,
)

#: How long a program may take to read why it was refused, and how much it may still send meanwhile.
_LAST_WORDS_SECONDS, _LAST_WORDS_DRAIN = 1.0, 256 * 1024
_PEEK_SIZE = 65536
#: After how many seconds without a byte a connection counts as idle when its sandbox has ended.
_QUIET_SECONDS = 0.1


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
        self.exchange: Callable[[RequestHead], HttpExchange] = lambda _: _PASSED

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


_PASSED = HttpExchange()
# Loads, in the template, what the libraries load when they are used first. These keys are never used.
CertificateAuthority().certificate_for("localhost")


class TerminatedConnection:
    """One connection of a program, and the one to its server; `finished` is done when both have ended."""

    def __init__(
        self,
        shared: HttpTermination,
        place: TerminatedPlace,
        inside: socket.socket,
        outside: socket.socket,
        record: ConnectionRecord,
        budget: HostBudget | None = None,
    ) -> None:
        self._shared, self._place, self.record = shared, place, record
        self._budget = budget
        self.inside, self.outside = inside, outside
        #: When the last byte was moved, by the loop's clock.
        self.active = shared.loop.time()
        self.finished: asyncio.Future[None] = shared.loop.create_future()
        self._task = asyncio.current_task()

    async def run(self, protocols: list[bytes], handshake: float) -> None:
        """Serve the connection until it ends."""
        reason = ""
        try:
            await self._run(protocols, handshake)
        except (StreamError, ClientGoneError) as error:
            reason = str(error) if str(error).startswith(("certificate refused", "limits.")) else "reset"
        except TimeoutError:
            reason = "timed out"
        finally:
            verdict = "denied" if reason.startswith("limits.") else "allowed"
            self.record.close("failed" if reason == "certificate refused" else verdict, reason)
            reset(self.inside)
            reset(self.outside)
            self._finish()

    async def _run(self, protocols: list[bytes], handshake: float) -> None:
        loop, place = self._shared.loop, self._place
        client, server = ByteStream(loop, self.inside), ByteStream(loop, self.outside)
        protocol = HTTP1
        if place.scheme == "https":
            async with asyncio.timeout(handshake):
                secured = connect_tls(loop, self.outside, place.name, self._shared.context, protocols)
                problem = ""
                try:
                    protocol = await secured.shake_hands() or HTTP1
                except CertificateError:
                    problem = "the server's certificate is not valid for its name"
                except StreamError:
                    problem = "the server does not speak TLS 1.2 or 1.3"
                offered = protocol if not problem else HTTP1
                shown = serve_tls(loop, self.inside, place.name, self._shared.authority, offered)
                chosen = await shown.shake_hands() or HTTP1
            if problem:
                self.record.close("failed", "bad certificate" if "certificate" in problem else "not TLS")
                await self._say(shown, refusal(502, refusal_text("the connection", problem)))
                return
            if chosen != protocol:
                raise StreamError("not TLS")
            client, server = shown, secured
        client.on_written, server.on_written = self._count_received, self._count_sent
        if self._budget is not None:
            client.before_write = partial(self._spend, "download")
            server.before_write = partial(self._spend, "upload")
        spend = None if self._budget is None else self._budget.spend_request
        judge = RequestJudge(self._shared.rules, place.scheme, place.name, place.port, spend)
        if protocol == HTTP2:
            both = Http2Connection(client, server, judge, self._shared.exchange, self._report)
            await both.run()
        else:
            one = Http1Connection(client, server, judge, self._shared.exchange, self._report)
            if words := await one.run():
                reset(self.outside)
                await self._say(client, words)
                return
        client.end()
        server.end()
        self.inside.close()
        self.outside.close()

    async def _say(self, client: ByteStream, words: bytes) -> None:
        """Tell a program why it is refused. A close with bytes unread would reset the words away."""
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            await client.write(words)
            client.end()
            drained = 0
            while drained < _LAST_WORDS_DRAIN:
                try:
                    data = self.inside.recv(_PEEK_SIZE)
                except BlockingIOError:
                    await wait_readable(self._shared.loop, self.inside)
                    continue
                except OSError:
                    break
                if not data:
                    break
                drained += len(data)
        self.inside.close()

    def _report(self, judged: JudgedRequest) -> None:
        self._shared.records.request(
            self._place.name, self._place.port, judged.shown, reason=judged.reason, rule=judged.rule
        )

    # What the loop of the egress process asks of everything that is under way.

    def abort(self, verdict: str = "allowed", reason: str = "reset") -> None:
        """Reset both sides."""
        self.record.close(verdict, reason)
        if self._task is not None:
            self._task.cancel()
        self._finish()

    def end(self) -> None:
        """Close both sides; what the kernel has taken to send, it still sends."""
        self.record.close(reason="ended")
        self.inside.close()
        self.outside.close()
        self._finish()

    @property
    def outgoing(self) -> TerminatedConnection:
        """What passes on the bytes of the program."""
        return self

    @property
    def ended(self) -> bool:
        """Whether everything was passed on."""
        return self.finished.done()

    def is_idle(self) -> bool:
        """Whether nothing waits to be passed on."""
        return self._shared.loop.time() - self.active > _QUIET_SECONDS

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _spend(self, kind: str, amount: int) -> None:
        if self._budget is not None and not self._budget.spend(kind, amount):
            raise StreamError(self._budget.refusal(kind))

    def _count_sent(self, amount: int) -> None:
        self.active = self._shared.loop.time()
        self.record.add(amount, 0)

    def _count_received(self, amount: int) -> None:
        self.active = self._shared.loop.time()
        self.record.add(0, amount)
