"""The name server inside: answers the names that rules allow, over UDP and TCP, and records each question.

Nothing leaves the host for an answer: a name gets the synthetic address that stands for it (`names`), and is
resolved when a connection to that address is dialled.
"""

from __future__ import annotations

import asyncio
import socket

from stockade.egress.active_rules import HTTP_PORT, TLS_PORT, ConnectionJudge, RulesInForce
from stockade.egress.client_sockets import destination_of, receive, send
from stockade.egress.datagram_sockets import ANCILLARY_SIZE, reply_source
from stockade.egress.decoders.dns import (
    DnsError,
    DnsReply,
    NameAnswer,
    NameServer,
    StreamQueries,
    frame,
)
from stockade.egress.listeners import BATCH
from stockade.egress.names import SyntheticNames
from stockade.egress.records import RecordWriter
from stockade.egress.relay import reset
from stockade.policy.net_rules import DNS_PORT

_QUERY_SIZE = 4096
#: DNS over TCP: connections at once.
_CONNECTIONS = 32


class NameService:
    """Answers the questions for names of one sandbox."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rules: RulesInForce,
        judge: ConnectionJudge,
        names: SyntheticNames,
        records: RecordWriter,
        *,
        ipv6: bool,
        seconds: float,
    ) -> None:
        self._loop, self._rules, self._judge = loop, rules, judge
        self._names, self._records = names, records
        self._server = NameServer(self, ipv6=ipv6)
        #: Whether the last name got no address because there are too many.
        self._names_full = False
        #: How long a client over TCP may take for its next query.
        self._seconds = seconds
        self._connections: set[asyncio.Task[None]] = set()

    def lookup(self, name: str) -> NameAnswer | None:
        """Return the synthetic addresses of a name that the rules allow."""
        if not self._rules.active.set.knows(name) and not self._judge.can_ask(name, TLS_PORT, HTTP_PORT):
            return None
        found = self._names.addresses(name)
        if found is None:
            self._names_full = True
            return None
        return NameAnswer(*found)

    def reverse(self, address: str) -> str | None:
        """Return the name that a synthetic address stands for."""
        return self._names.name_of(address)

    def _answer(self, query: bytes) -> DnsReply | None:
        self._names_full = False
        reply = self._server.answer(query)
        if reply is None or reply.verdict == "local":
            return reply
        if reply.verdict == "allowed":
            self._records.name(reply.name, allowed=True)
        elif reply.verdict == "malformed":
            self._records.name(reply.name, allowed=False, reason="malformed query")
        elif self._names_full:
            self._records.name(reply.name, allowed=False, reason="too many names")
        else:
            # Any port shows whether a deny rule for the whole name is the reason.
            rules = self._rules.active
            decision = rules.set.for_name(reply.name, TLS_PORT)
            reason = "deny rule" if decision.rule >= 0 and not decision.allowed else "no rule"
            self._records.name(
                reply.name, allowed=False, reason=reason,
                rule=rules.place(decision.rule) if reason == "deny rule" else -1,
            )  # fmt: skip
        return reply

    # Over UDP

    def answer_datagrams(self, listener: socket.socket) -> None:
        """Answer the next queries that a listener of `prepare_datagrams` has."""
        for _ in range(BATCH):
            try:
                query, ancillary, _, client = listener.recvmsg(_QUERY_SIZE, ANCILLARY_SIZE)
            except OSError:
                return
            try:
                reply = self._answer(query)
                if reply is not None:
                    listener.sendmsg([reply.message], reply_source(ancillary), 0, client)
            except Exception:
                # A query that cannot be answered gets no answer.
                continue

    # Over TCP

    def begin(self, connection: socket.socket) -> None:
        """Answer the queries of a connection from inside, unless there are too many connections."""
        if len(self._connections) >= _CONNECTIONS:
            self._records.refuse("", destination_of(connection)[0], DNS_PORT, "limit")
            reset(connection)
            return
        task = self._loop.create_task(self._serve(connection))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, connection: socket.socket) -> None:
        queries = StreamQueries()
        try:
            while True:
                async with asyncio.timeout(self._seconds):
                    data = await receive(self._loop, connection)
                    if not data:
                        connection.close()
                        return
                    for query in queries.feed(data):
                        reply = self._answer(query)
                        if reply is not None:
                            await send(self._loop, connection, frame(reply.message))
        except (OSError, DnsError, asyncio.CancelledError):
            # Silent for too long, gone, no DNS, or handed over: it ends.
            return
        finally:
            reset(connection)

    def close(self) -> None:
        """End the connections over TCP."""
        for task in self._connections:
            task.cancel()
