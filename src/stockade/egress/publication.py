"""Ports of the sandbox that the host publishes: a client on the host, and the server inside."""

from __future__ import annotations

import asyncio
import socket

from stockade.egress.client_sockets import client_of
from stockade.egress.connection_table import ConnectionTable
from stockade.egress.dialer import reason_for
from stockade.egress.inner_connections import InnerConnections
from stockade.egress.records import RecordWriter
from stockade.egress.relay import PipePool, Relay, reset


class Publication:
    """Connects clients on the host with the servers of one sandbox."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        records: RecordWriter,
        connections: ConnectionTable,
        pool: PipePool,
        inside: InnerConnections,
        seconds: float,
    ) -> None:
        self._loop, self._records = loop, records
        self._connections, self._pool, self._inside = connections, pool, inside
        #: How long init may take to connect inside.
        self._seconds = seconds

    def begin(self, connection: socket.socket, *, port: int) -> None:
        """Serve a client that has just connected, unless there are too many."""
        connection.setblocking(False)
        if self._connections.is_full():
            self._records.fail_published(client_of(connection), port, "limit")
            reset(connection)
            return
        self._connections.start(self._serve(connection, port))

    async def _serve(self, connection: socket.socket, port: int) -> None:
        """Connect a client on the host with the server inside."""
        client = ""
        try:
            client = client_of(connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            async with asyncio.timeout(self._seconds):
                server = await self._inside.connect(port)
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            record = self._records.published_connection(client, port)
            relay = Relay(self._loop, self._pool, server, connection, record)
            self._connections.attach(relay)
            relay.incoming.start()
            relay.outgoing.start()
            await relay.finished
        except OSError as error:
            self._records.fail_published(client, port, reason_for(error))
        finally:
            reset(connection)
