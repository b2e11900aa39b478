"""The listeners of an egress process: accept in batches, pause, and refuse when descriptors run out.

The sockets come from the resident or, for published ports, from the host, and go on to the egress process
that takes over. What happens with a connection, or with a datagram, another part says.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
from collections.abc import Callable
from functools import partial

from stockade.egress.client_sockets import destination_of
from stockade.egress.records import RecordWriter
from stockade.egress.relay import reset

#: Connections accepted, or queries answered, before others have their turn.
BATCH = 64
#: How long to accept nothing if descriptors or memory ran out.
_PAUSE = 0.05
#: What accept says of a client that has gone already.
_GONE = frozenset({errno.ECONNABORTED, errno.EINTR, errno.EPROTO, errno.ECONNRESET})


class Listeners:
    """All sockets on which programs and clients reach this process, in the order in which they came."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, records: RecordWriter, control: socket.socket
    ) -> None:
        self._loop, self._records, self._control = loop, records, control
        #: Closed and opened again to accept and refuse a connection when descriptors have run out.
        self._reserve = os.dup(control.fileno())
        #: Each listener with what accepts from it.
        self._readers: dict[socket.socket, Callable[[], None]] = {}

    def listen(self, listener: socket.socket, port: int, begin: Callable[[socket.socket], None]) -> None:
        """Accept connections from now on; `begin` takes each, and must not wait."""
        listener.setblocking(False)
        self.watch(listener, partial(self._accept_connections, listener, port, begin))

    def watch(self, listener: socket.socket, read: Callable[[], None]) -> None:
        """Call `read` when there is something to read."""
        self._readers[listener] = read
        self._loop.add_reader(listener, read)

    def descriptors(self) -> list[int]:
        """Return the descriptors of all, for the process that takes over."""
        return [listener.fileno() for listener in self._readers]

    def close(self) -> None:
        """Accept nothing any more."""
        for listener in self._readers:
            self._loop.remove_reader(listener)
            listener.close()
        self._readers.clear()

    def _accept_connections(
        self, listener: socket.socket, port: int, begin: Callable[[socket.socket], None]
    ) -> None:
        for _ in range(BATCH):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._refuse_without_descriptors(listener, port)
                    return
                if error.errno not in _GONE:
                    self._pause(listener)
                    return
                continue
            try:
                begin(connection)
            except Exception:
                reset(connection)

    def _refuse_without_descriptors(self, listener: socket.socket, port: int) -> None:
        """Reset one connection with the descriptor that is kept for this, and pause."""
        if self._reserve >= 0:
            os.close(self._reserve)
            self._reserve = -1
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._records.refuse("", destination_of(connection)[0], port, "limit")
            reset(connection)
        with contextlib.suppress(OSError):
            self._reserve = os.dup(self._control.fileno())
        self._pause(listener)

    def _pause(self, listener: socket.socket) -> None:
        self._loop.remove_reader(listener)
        self._loop.call_later(_PAUSE, self._go_on, listener)

    def _go_on(self, listener: socket.socket) -> None:
        if listener in self._readers:
            self._loop.add_reader(listener, self._readers[listener])
