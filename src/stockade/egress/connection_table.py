"""The connections under way in an egress process, and what bounds them: number, bytes not judged, idleness.

A connection is a task. It has a relay, or a terminated connection, once its server is connected. Until then
its client may have to say something first: a TLS hello, the head of a request, what it wants of the proxy.
Such a client is *silent*. Silent clients may use up neither all connections nor the memory.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

from stockade.egress.bounds import EgressBounds
from stockade.egress.client_checks import HeldBytes, RefusalError
from stockade.egress.relay import Relay, limit_buffers

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.egress.termination.connection import TerminatedConnection

#: What all clients together may have sent before they are judged. A single one may have 64 KiB.
_HELD_SIZE = 4 * 1024 * 1024
#: How many connections may have buffers that grow with the distance of the server. The kernel's memory for
#: them counts for no limit of the sandbox, so those beyond have small ones.
_LARGE_BUFFERS = 32


class ConnectionTable:
    """What is under way, by its task; the relay once there is one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, bounds: EgressBounds) -> None:
        self._loop, self._bounds = loop, bounds
        self._relays: dict[asyncio.Task[None], Relay | TerminatedConnection | None] = {}
        #: Those whose client has to say something first, and how many bytes of it are held.
        self._silent: dict[socket.socket, int] = {}
        #: All bytes of clients that are not judged yet, also those of relays.
        self.held = HeldBytes(_HELD_SIZE)
        self._ends_when_empty = False

    def __len__(self) -> int:
        return len(self._relays)

    @property
    def silent(self) -> int:
        """How many clients have to say something first."""
        return len(self._silent)

    def is_full(self, *, silent: bool = False) -> bool:
        """Whether there is no room for a further connection, or for one whose client is silent."""
        return len(self._relays) >= self._bounds.connections or (
            silent and len(self._silent) >= self._bounds.connections * 3 // 4
        )

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Serve a connection in a task of its own."""
        task = self._loop.create_task(work)
        self._relays[task] = None
        task.add_done_callback(self._forget)

    def _forget(self, done: asyncio.Task[None]) -> None:
        self._relays.pop(done, None)
        self._end_if_empty()

    def expect_words(self, connection: socket.socket) -> None:
        """Count a client as silent, until `release`."""
        self._silent[connection] = 0

    def hold(self, connection: socket.socket, amount: int) -> None:
        """Count bytes of a silent client that are held until they are judged."""
        self._silent[connection] += amount
        if not self.held.add(amount):
            raise RefusalError("limit")

    def release(self, connection: socket.socket) -> int:
        """Count a client and its bytes no more; return how many bytes there were."""
        amount = self._silent.pop(connection, 0)
        self.held.add(-amount)
        return amount

    def attach(self, relay: Relay | TerminatedConnection) -> None:
        """Remember the relay of the connection that the current task serves."""
        self.limit_buffers(relay.inside)
        self.limit_buffers(relay.outside)
        task = asyncio.current_task()
        if task is not None:
            self._relays[task] = relay

    def limit_buffers(self, connection: socket.socket) -> None:
        """Bound what the kernel holds for a socket, once many connections are under way."""
        if len(self._relays) > _LARGE_BUFFERS:
            limit_buffers(connection)

    def unfinished(self) -> list[Relay | TerminatedConnection | None]:
        """Return the relays that have not ended; None for each connection that has none yet."""
        return [one for one in self._relays.values() if one is None or not one.finished.done()]

    def sweep(self) -> None:
        """End the connections that were idle for too long, again and again."""
        idle = self._bounds.idle
        limit = self._loop.time() - idle
        for relay in list(self._relays.values()):
            if relay is not None and relay.active < limit and not relay.finished.done():
                relay.abort(reason="idle")
        self._loop.call_later(min(5.0, max(idle / 4, 0.05)), self.sweep)

    def end_when_empty(self) -> None:
        """Stop the loop with the last connection, because another process accepts the next ones."""
        self._ends_when_empty = True
        self._end_if_empty()

    def _end_if_empty(self) -> None:
        if self._ends_when_empty and not self._relays:
            self._loop.stop()

    def close(self) -> None:
        """End all relays, so that no record stays open."""
        for relay in list(self._relays.values()):
            if relay is not None and not relay.finished.done():
                relay.end()
