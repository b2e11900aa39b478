"""Serves a connection from inside by its kind, once a rule has allowed it.

What a client says first is judged before a byte of it leaves: a TLS hello, or a request. Then the server is
dialled. Bytes with TLS are relayed; requests are read and written anew, one by one.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from functools import partial

from stockade.egress.active_rules import HTTP_PORT, TLS_PORT, Destination
from stockade.egress.bounds import EgressBounds
from stockade.egress.client_checks import HelloCheck, RefusalError, check_name, names_host, read_hello
from stockade.egress.client_sockets import receive, say_and_close
from stockade.egress.connection_table import ConnectionTable
from stockade.egress.decoders.tls_hello import HelloReader
from stockade.egress.dialer import DialError
from stockade.egress.network_budget import NetworkBudget
from stockade.egress.outgoing_connections import OutgoingConnections
from stockade.egress.relay import PipePool, Relay
from stockade.egress.termination.connection import TerminatedConnection, serve_plain
from stockade.egress.termination.messages import pass_unchanged
from stockade.policy.net_rule_set import NetDecision

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.egress.termination.http_termination import HttpTermination

#: Serves a connection from inside to a destination that a rule allows, by its place.
ConnectionServer = Callable[[socket.socket, Destination, int], Awaitable[None]]


class ConnectionServers:
    """What serves the connections of one sandbox; each is refused by an exception."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bounds: EgressBounds,
        connections: ConnectionTable,
        outgoing: OutgoingConnections,
        limits: NetworkBudget,
        pool: PipePool,
        termination: HttpTermination | None,
    ) -> None:
        self._loop, self._bounds = loop, bounds
        self._connections, self._outgoing = connections, outgoing
        self._limits, self._pool = limits, pool
        #: What ends TLS; None without rules for requests.
        self._termination = termination

    def can_serve(self, decision: NetDecision) -> bool:
        """Whether there is what a connection that a rule allows needs."""
        return not decision.scheme or self._termination is not None

    def server_for(self, decision: NetDecision, port: int, looks: bool) -> ConnectionServer:
        """Return what serves a connection that a rule allows."""
        if decision.scheme:
            return partial(self._serve_requests, scheme=decision.scheme)
        if looks and port == TLS_PORT:
            return self._serve_tls
        if looks and port == HTTP_PORT:
            return self._serve_http
        return partial(self._serve_other, looks=looks)

    async def _serve_tls(self, connection: socket.socket, destination: Destination, rule: int) -> None:
        reader, hello = HelloReader(), None
        async with asyncio.timeout(self._bounds.hello):
            while hello is None:
                data = await receive(self._loop, connection)
                if not data:
                    raise _end_before(reader.received, "not TLS")
                self._connections.hold(connection, len(data))
                hello = read_hello(reader, data)
        check_name(hello, destination.name)
        self._connections.release(connection)
        relay = self._relay(connection, await self._outgoing.dial(destination), destination, rule)
        relay.incoming.start()
        relay.outgoing.start(bytes(reader.received))
        del reader, data
        await self._finish(relay)

    async def _serve_http(self, connection: socket.socket, destination: Destination, rule: int) -> None:
        """Read every request, and write it anew; the server is dialled once the first one names it."""
        name, port, first, data = destination.name, destination.port, bytearray(), b""
        async with asyncio.timeout(self._bounds.hello):
            while not names_host(first, len(data), name, port):
                data = await receive(self._loop, connection)
                if not data:
                    raise _end_before(first, "not HTTP")
                self._connections.hold(connection, len(data))
                first += data
        # What it sent stays in memory, and counts, until the server is there.
        held, amount = self._connections.held, self._connections.release(connection)
        del data
        try:
            if not held.add(amount):
                raise RefusalError("limit")
            ends = await self._terminated(connection, destination, rule)
        finally:
            held.add(-amount)
        # Where there are secrets, requests are judged, so there is what searches the answers.
        exchange = pass_unchanged if self._termination is None else self._termination.exchange
        await ends.run(partial(serve_plain, name, port, first, exchange))

    async def _serve_other(
        self, connection: socket.socket, destination: Destination, rule: int, *, looks: bool
    ) -> None:
        """Dial at once, because many servers speak first; a client's TLS hello is held until it is read."""
        relay = self._relay(connection, await self._outgoing.dial(destination), destination, rule)
        if looks:
            check = HelloCheck(self._loop, relay, destination.name, self._bounds.hello)
            relay.outgoing.check = check.pass_hello
        relay.incoming.start()
        relay.outgoing.start()
        await self._finish(relay)

    async def _serve_requests(
        self, connection: socket.socket, destination: Destination, rule: int, *, scheme: str
    ) -> None:
        """End TLS here, and judge every request."""
        # The template of an egress process that ends TLS has loaded it.
        from stockade.egress.termination.http_termination import TerminatedPlace

        assert self._termination is not None
        task = asyncio.current_task()
        assert task is not None
        judged = self._outgoing.judged
        judged.add(task)
        task.add_done_callback(judged.discard)
        protocols: list[bytes] = []
        if scheme == "https":
            async with asyncio.timeout(self._bounds.hello):
                protocols = await self._termination.hello(connection, destination.name)
        self._connections.release(connection)
        place = TerminatedPlace(scheme, destination.name, destination.port)
        ends = await self._terminated(connection, destination, rule)
        await ends.run(partial(self._termination.serve, place, protocols, self._bounds.hello))

    async def _terminated(
        self, inside: socket.socket, destination: Destination, rule: int
    ) -> TerminatedConnection:
        """Dial a server for a connection whose requests are read here."""
        dialled = await self._outgoing.dial(destination)
        outside, record = self._outgoing.record(inside, dialled, destination, rule)

        async def dial_again() -> socket.socket:
            connection, _ = await self._outgoing.dial(destination, dialled[1])
            self._connections.limit_buffers(connection)
            return connection

        ends = TerminatedConnection(
            self._loop, inside, outside, record, self._limits.of_host(destination.name), dial_again,
            self._connections.held.add,
        )  # fmt: skip
        self._connections.attach(ends)
        return ends

    def _relay(
        self, inside: socket.socket, dialled: tuple[socket.socket, str], destination: Destination, rule: int
    ) -> Relay:
        outside, record = self._outgoing.record(inside, dialled, destination, rule)
        budget = self._limits.of_host(destination.name or destination.address)
        relay = Relay(self._loop, self._pool, inside, outside, record, budget)
        self._connections.attach(relay)
        return relay

    async def _finish(self, relay: Relay) -> None:
        await relay.finished
        if relay.last_words:
            await say_and_close(self._loop, relay.inside, relay.last_words)


def _end_before(received: bytes | bytearray, reason: str) -> Exception:
    """Return what ends a connection whose client sent too little."""
    return RefusalError(reason) if received else DialError("nothing sent")
