"""One connection of a program whose requests are read here, and those to its server.

It knows neither TLS nor HTTP/2, so that egress processes without rules for requests need not load them.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from stockade.egress.client_sockets import drain_and_close
from stockade.egress.dialer import DialError
from stockade.egress.network_budget import HostBudget
from stockade.egress.records import ConnectionRecord
from stockade.egress.relay import reset
from stockade.egress.termination.byte_stream import ByteStream, StreamError
from stockade.egress.termination.http1_connection import ClientGoneError, Http1Connection
from stockade.egress.termination.http1_heads import refusal, refusal_text
from stockade.egress.termination.http1_upstream import Http1Upstream
from stockade.egress.termination.judge import HostJudge, JudgedRequest
from stockade.egress.termination.messages import HttpExchange, RequestHead
from stockade.egress.termination.reader import StreamReader

#: How long a program may take to read why it was refused.
_LAST_WORDS_SECONDS = 1.0
#: After how many seconds without a byte a connection counts as idle when its sandbox has ended.
_QUIET_SECONDS = 0.1
#: What a stream ends with that has used up something.
_LIMITS = ("limit", "certificate refused")


class TerminatedConnection:
    """One connection of a program, and those to its server; `finished` is done when all have ended."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        inside: socket.socket,
        outside: socket.socket,
        record: ConnectionRecord,
        budget: HostBudget | None = None,
        dial: Callable[[], Awaitable[socket.socket]] | None = None,
        count_held: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Take both ends, what dials the server again, and what counts bytes that are not judged yet."""
        self.loop, self.record, self.budget = loop, record, budget
        #: The program, and the first connection to its server.
        self.inside, self.outside = inside, outside
        self._dial, self._count_held = dial, count_held
        self._outsides = [outside]
        #: When the last byte was moved, by the loop's clock.
        self.active = loop.time()
        self.finished: asyncio.Future[None] = loop.create_future()
        self._task = asyncio.current_task()

    async def run(self, serve: Callable[[TerminatedConnection], Awaitable[None]]) -> None:
        """Serve the connection until it ends."""
        verdict, reason = "allowed", ""
        try:
            await serve(self)
        except (StreamError, ClientGoneError) as error:
            reason = str(error) if str(error).startswith(_LIMITS) else "reset"
            verdict = {"certificate refused": "failed", "reset": "allowed"}.get(reason, "denied")
        except TimeoutError:
            reason = "timed out"
        finally:
            self.record.close(verdict, reason)
            for one in (self.inside, *self._outsides):
                reset(one)
            self._finish()

    async def connect(self) -> socket.socket:
        """Dial the server again, by the rules of this moment."""
        if self._dial is None:
            raise DialError("failed")
        connection = await self._dial()
        self._outsides = [*(one for one in self._outsides if one.fileno() >= 0), connection]
        return connection

    def reader(self, client: ByteStream, first: bytearray | None = None) -> StreamReader:
        """Return what reads the program's requests, and count what is sent to the program."""
        client.on_written = self._count_received
        if self.budget is not None:
            client.before_write = partial(self._spend, "download")
        return StreamReader(client, first, self._count_held)

    def counted(self, server: ByteStream) -> ByteStream:
        """Return a connection to the server that counts what is sent to it."""
        server.on_written = self._count_sent
        if self.budget is not None:
            server.before_write = partial(self._spend, "upload")
        return server

    async def serve_http1(self, connection: Http1Connection) -> None:
        """Pass on requests; a last word tells the program why there are no more."""
        try:
            words = await connection.run()
        except DialError as error:
            self.record.close("denied" if error.denied else "failed", error.reason)
            words = refusal(502, refusal_text("the request", f"no connection to the server: {error.reason}"))
        finally:
            connection.release()
        if words:
            await self.say(connection.client, words)
        else:
            connection.client.close()

    async def say(self, client: ByteStream, words: bytes) -> None:
        """Tell the program why it is refused."""
        async with asyncio.timeout(_LAST_WORDS_SECONDS):
            await client.write(words)
        client.end()
        await drain_and_close(self.loop, self.inside)

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
        for one in (self.inside, *self._outsides):
            one.close()
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
        return self.loop.time() - self.active > _QUIET_SECONDS

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _spend(self, kind: str, amount: int) -> None:
        if self.budget is not None and not self.budget.spend(kind, amount):
            raise StreamError(self.budget.refusal(kind))

    def _count_sent(self, amount: int) -> None:
        self.active = self.loop.time()
        self.record.add(amount, 0)

    def _count_received(self, amount: int) -> None:
        self.active = self.loop.time()
        self.record.add(0, amount)


async def serve_plain(
    host: str,
    port: int,
    first: bytearray,
    exchange: Callable[[RequestHead], HttpExchange],
    ends: TerminatedConnection,
) -> None:
    """Serve a connection for which a rule allows every request to one host; `first` was read already.

    A request that is refused ends the connection, so that the record of the connection says why.
    """
    spend = None if ends.budget is None else ends.budget.spend_request
    judge = HostJudge(host, port, spend)

    def report(judged: JudgedRequest) -> None:
        if judged.reason:
            ends.record.close("failed" if judged.reason == "bad response" else "denied", judged.reason)

    async def dial() -> ByteStream:
        return ends.counted(ByteStream(ends.loop, await ends.connect()))

    upstream = Http1Upstream(dial, ends.counted(ByteStream(ends.loop, ends.outside)), judge.authority)
    client = ends.reader(ByteStream(ends.loop, ends.inside), first)
    await ends.serve_http1(Http1Connection(client, upstream, judge, exchange, report))
