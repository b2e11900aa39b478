"""What the code interpreter's SDK looks for before it runs code: something that accepts on a port inside.

The SDK runs a command that connects to 127.0.0.1:44771. The supervisor listens there, in the sandbox's
network namespace, and closes each connection at once: the code service is the supervisor itself.
"""

from __future__ import annotations

import asyncio
import logging
import socket

from stockade.errors import StockadeError
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.loopback import listen_inside

PORT = 44771
#: How many connections are taken in one round of the event loop.
AT_ONCE = 16

_log = logging.getLogger("stockade.server")


class ReadinessListener:
    """The listener of one sandbox, opened while the first requests may already come."""

    def __init__(self, box: AsyncSandbox) -> None:
        self._box = box
        self._listener: socket.socket | None = None
        self._opening = asyncio.get_running_loop().create_task(self._open())

    async def _open(self) -> None:
        try:
            self._listener = socket.socket(fileno=await asyncio.to_thread(listen_inside, self._box, PORT))
        except (StockadeError, OSError):
            # Everything but the SDK's own check works without it.
            _log.exception("nothing listens on port %d inside", PORT)
            return
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._take_connections)

    def _take_connections(self) -> None:
        assert self._listener is not None
        for _ in range(AT_ONCE):
            try:
                connection, _ = self._listener.accept()
            except OSError:  # no more at the moment, or one that has gone again
                return
            connection.close()

    async def close(self) -> None:
        """Stop listening."""
        await asyncio.wait([self._opening])
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.fileno())
            self._listener.close()
