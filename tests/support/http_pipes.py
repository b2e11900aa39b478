"""The terminating code between a program and a server, which a test plays over pairs of sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from typing import NamedTuple

from stockade.egress.dialer import DialError
from stockade.egress.termination.byte_stream import ByteStream, StreamError
from stockade.egress.termination.http1_connection import ClientGoneError, Http1Connection
from stockade.egress.termination.http1_upstream import Http1Upstream
from stockade.egress.termination.http2_connection import Http2Connection
from stockade.egress.termination.http2_upstream import Http2Upstream
from stockade.egress.termination.judge import JudgedRequest, RequestJudge
from stockade.egress.termination.messages import HttpExchange
from stockade.egress.termination.reader import StreamReader
from stockade.policy.http_targets import Target
from stockade.policy.net_rule_set import NetDecision, RuleSet
from stockade.policy.net_rules import parse_rule

HOST = "a.test"
#: The version of HTTP that the program speaks, and the server's.
ONE, TWO, ONE_TO_TWO = (1, 1), (2, 2), (1, 2)
MOST_CONNECTIONS = 20


class Rules:
    """Allows GET and POST below /ok."""

    def __init__(self) -> None:
        self.set = RuleSet([parse_rule(f"GET,POST https://{HOST}/ok/**")])

    def for_request(self, name: str, port: int, method: str, target: Target) -> tuple[NetDecision, int]:
        """Decide about a request."""
        found = self.set.for_request(name, port, method, target)
        return found, found.rule


RULES = Rules()


class Passage(NamedTuple):
    """What came out."""

    #: What reached the server, for each connection to it.
    reached: list[bytes]
    judged: list[JudgedRequest]
    #: What the program got.
    said: bytes


def pass_through(
    versions: tuple[int, int],
    sent: Sequence[bytes],
    answer: Callable[[bytes], bytes],
    *,
    once: bool = False,
    pause: float = 0.0,
    reads_last: bool = False,
) -> Passage:
    """Return what became of what a program sent; on each piece the server answers what `answer` returns.

    With `once` it then ends its side. Between two pieces the program pauses. With `reads_last` it sends
    everything before it reads.
    """
    return asyncio.run(_Pipes(versions, answer, once, pause, reads_last).talk(sent))


class _Pipes:
    def __init__(
        self,
        versions: tuple[int, int],
        answer: Callable[[bytes], bytes],
        once: bool,
        pause: float,
        reads_last: bool,
    ) -> None:
        self._versions, self._answer, self._once, self._pause = versions, answer, once, pause
        self._reads = asyncio.Event()
        if not reads_last:
            self._reads.set()
        self._reached: list[bytearray] = []
        self._said = bytearray()
        self._ends: list[socket.socket] = []
        self._others: list[asyncio.Task[None]] = []

    def _pair(self) -> tuple[socket.socket, socket.socket]:
        pair = socket.socketpair()
        for end in pair:
            end.setblocking(False)
        self._ends += pair
        return pair

    async def _dial(self) -> ByteStream:
        if len(self._reached) >= MOST_CONNECTIONS:
            raise DialError("limit")
        outside, server = self._pair()
        self._others.append(asyncio.ensure_future(self._serve(server)))
        return ByteStream(asyncio.get_running_loop(), outside)

    async def _serve(self, server: socket.socket) -> None:
        loop, reached = asyncio.get_running_loop(), bytearray()
        self._reached.append(reached)
        while data := await loop.sock_recv(server, 65536):
            reached.extend(data)
            if reply := self._answer(data):
                await loop.sock_sendall(server, reply)
            if self._once:
                server.shutdown(socket.SHUT_WR)
                return
        server.close()

    async def _send(self, program: socket.socket, sent: Sequence[bytes]) -> None:
        for number, piece in enumerate(sent):
            await asyncio.sleep(self._pause if number else 0)
            await asyncio.get_running_loop().sock_sendall(program, piece)
        self._reads.set()
        program.shutdown(socket.SHUT_WR)

    async def _receive(self, program: socket.socket) -> None:
        await self._reads.wait()
        while data := await asyncio.get_running_loop().sock_recv(program, 65536):
            self._said.extend(data)

    async def talk(self, sent: Sequence[bytes]) -> Passage:
        """Let both sides talk until the connection ends."""
        program, inside = self._pair()
        judged: list[JudgedRequest] = []
        judge = RequestJudge(lambda: RULES, "https", HOST, 443)
        self._others += [
            asyncio.ensure_future(one) for one in (self._send(program, sent), self._receive(program))
        ]
        client, first = ByteStream(asyncio.get_running_loop(), inside), await self._dial()
        connection = self._connection(client, first, judge, judged.append)
        try:
            async with asyncio.timeout(5):
                if words := await connection.run():
                    await client.write(words)
        except (StreamError, ClientGoneError, DialError):
            pass
        finally:
            inside.close()
            for outside in self._ends[2::2]:
                outside.close()
            await asyncio.wait(self._others, timeout=1)
            for other in self._others:
                other.cancel()
            await asyncio.gather(*self._others, return_exceptions=True)
            for end in self._ends:
                end.close()
        return Passage([bytes(one) for one in self._reached], judged, bytes(self._said))

    def _connection(
        self,
        client: ByteStream,
        first: ByteStream,
        judge: RequestJudge,
        report: Callable[[JudgedRequest], None],
    ) -> Http1Connection | Http2Connection:
        def exchange(_: object) -> HttpExchange:
            return HttpExchange()

        if self._versions == TWO:
            return Http2Connection(client, first, judge, exchange, report)
        http1 = Http1Upstream(self._dial, first if self._versions == ONE else None, judge.authority)
        http2 = Http2Upstream(self._dial, first, http1, judge.authority)
        route = http1 if self._versions == ONE else http2
        return Http1Connection(StreamReader(client), route, judge, exchange, report)
