"""Requests of HTTP/1.1 on one connection: where one ends, and whether another may follow."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from stockade.egress.termination.http1_connection import Http1Connection
from stockade.egress.termination.judge import RequestJudge
from stockade.egress.termination.messages import HttpExchange
from stockade.egress.termination.streams import ByteStream, StreamError
from stockade.policy.http_targets import Target
from stockade.policy.net_rule_set import NetDecision, RuleSet
from stockade.policy.net_rules import parse_rule

HEAD = b"POST /ok HTTP/1.1\r\nHost: a.test\r\nTransfer-Encoding: chunked\r\n\r\n"
NEXT = b"GET /ok HTTP/1.1\r\nHost: a.test\r\n\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Rules:
    def for_request(self, name: str, port: int, method: str, target: Target) -> tuple[NetDecision, int]:
        found = RuleSet([parse_rule("* https://a.test/**")]).for_request(name, port, method, target)
        return found, found.rule


def test_nothing_follows_a_body_that_was_refused_while_the_answer_came() -> None:
    """The server still waits for the rest of the body, and would read the next request as that."""

    async def talk() -> bytes:
        loop = asyncio.get_running_loop()
        program, inside = socket.socketpair()
        outside, server = socket.socketpair()
        for end in (ends := (program, inside, outside, server)):
            end.setblocking(False)
        client, upstream = ByteStream(loop, inside), ByteStream(loop, outside)
        heads = iter((True,))

        def answer_at_once(_: int) -> None:
            if next(heads, False):
                server.send(ANSWER)
                program.send(b"xyz\r\n" + NEXT)

        upstream.on_written = answer_at_once
        judge = RequestJudge(Rules, "https", "a.test", 443)
        connection = Http1Connection(client, upstream, judge, lambda _: HttpExchange(), lambda _: None)
        program.send(HEAD)
        with contextlib.suppress(StreamError, TimeoutError):
            async with asyncio.timeout(0.5):
                await connection.run()
        reached = server.recv(65536)
        for end in ends:
            end.close()
        return reached

    assert b"GET" not in asyncio.run(talk())
