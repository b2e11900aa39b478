"""Streams of bytes on sockets that do not block."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from stockade.egress.dialer import wait_readable, wait_writable, wake
from stockade.egress.relay import reset

READ_SIZE = 64 * 1024
#: For how long a stream is read and written without a wait before others have their turn, in seconds.
_TURN_SECONDS = 0.002
#: How long the other side may take to read what is written, in seconds.
_WRITE_SECONDS = 600.0


class StreamError(Exception):
    """A stream broke: a reset, an end in the middle, or TLS that makes no sense."""


class ByteStream:
    """A connection without TLS."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self._loop, self._socket = loop, connection
        #: When others last had their turn.
        self._turn = loop.time()
        #: Whether the other side may read on after it has ended its own direction.
        self.half_closes = True
        #: Called with the number of bytes that were written.
        self.on_written: Callable[[int], None] = lambda _: None
        #: What may refuse to write so many bytes, by raising StreamError.
        self.before_write: Callable[[int], None] = lambda _: None

    async def wait(self) -> None:
        """Wait until something may have come."""
        await wait_readable(self._loop, self._socket)
        self._turn = self._loop.time()

    async def wait_with(self, other: ByteStream) -> None:
        """Wait until something may have come on this stream or on the other one."""
        future: asyncio.Future[None] = self._loop.create_future()
        numbers = self._socket.fileno(), other._socket.fileno()
        for number in numbers:
            self._loop.add_reader(number, wake, future)
        try:
            await future
        finally:
            for number in numbers:
                self._loop.remove_reader(number)
        self._turn = other._turn = self._loop.time()

    def read_now(self) -> bytes | None:
        """Return what has come; b"" at the end, None if nothing has come."""
        try:
            return self._socket.recv(READ_SIZE)
        except BlockingIOError:
            return None
        except OSError as error:
            raise StreamError("reset") from error

    async def take_turns(self) -> None:
        """Let others have their turn, if they had none for a while: a fast peer is never waited for."""
        if self._loop.time() - self._turn > _TURN_SECONDS:
            await asyncio.sleep(0)
            self._turn = self._loop.time()

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Write all of it; waits as long as the other side does not read."""
        await self.take_turns()
        left = memoryview(data)
        self.before_write(len(left))
        while left:
            amount = self._write_now(left)
            if amount:
                self.on_written(amount)
                left = left[amount:]
            else:
                async with asyncio.timeout(_WRITE_SECONDS):
                    await wait_writable(self._loop, self._socket)

    def _write_now(self, data: memoryview) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise StreamError("reset") from error

    def end(self) -> None:
        """Tell the other side that nothing more comes."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End and close the connection; what the kernel has taken to send, it still sends."""
        self.end()
        self._socket.close()

    def reset(self) -> None:
        """Close the connection so that the other side sees a reset."""
        reset(self._socket)
