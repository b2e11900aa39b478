"""Connections to the ports of a sandbox, made by its init and passed out to the egress process.

A socket belongs to the network namespace that it was made in, so init makes it (`gate/src/publish.c`). Both
sides count requests; init answers in order, and reads no request while a few answers wait.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct

from stockade.egress.dialer import wait_writable

#: Requests under way at once; more wait.
UNDER_WAY = 8
#: struct request and the beginning of struct reply in `gate/src/wire.h`, and their numbers.
REQUEST = struct.Struct("=IIIIQ")
REPLY = struct.Struct("=IIiII")
REPLY_SIZE = 320
REQUEST_CONNECT, REPLY_CONNECTED, CONNECT_ANY = 8, 12, 0
_DESCRIPTORS = 4


class InnerConnections:
    """Asks the sandbox's init for connections to its ports."""

    def __init__(self, loop: asyncio.AbstractEventLoop, channel: socket.socket) -> None:
        self._loop, self._channel = loop, channel
        self._last = 0
        self._slots = asyncio.Semaphore(UNDER_WAY)
        #: What was asked and not answered yet, by the number of the request.
        self._asked: dict[int, asyncio.Future[socket.socket]] = {}
        channel.setblocking(False)
        loop.add_reader(channel, self._read_answers)

    async def connect(self, port: int) -> socket.socket:
        """Return a connection to a port on the sandbox's loopback address, or raise OSError."""
        async with self._slots:
            end = await self._ask(port)
        try:
            await wait_writable(self._loop, end)
            error = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                raise OSError(error, os.strerror(error))
            return end
        except BaseException:
            end.close()
            raise

    async def _ask(self, port: int) -> socket.socket:
        self._last = number = (self._last + 1) % 2**32
        future: asyncio.Future[socket.socket] = self._loop.create_future()
        self._asked[number] = future
        request = REQUEST.pack(REQUEST_CONNECT, CONNECT_ANY, port, number, 0)
        try:
            while True:
                try:
                    self._channel.send(request)
                    break
                except BlockingIOError:
                    await wait_writable(self._loop, self._channel)
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().close()
            raise
        finally:
            self._asked.pop(number, None)

    def _read_answers(self) -> None:
        while True:
            try:
                data, ancillary, _, _ = self._channel.recvmsg(
                    REPLY_SIZE, socket.CMSG_SPACE(4 * _DESCRIPTORS), socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, ancillary = b"", []
            ends = _sockets(ancillary)
            if len(data) < REPLY.size:
                self._close(ends)
                return
            kind, _, error, _, number = REPLY.unpack_from(data)
            future = self._asked.get(number)
            if kind != REPLY_CONNECTED or future is None or future.done() or len(ends) != (error == 0):
                _close_all(ends)
                if future is not None and not future.done():
                    future.set_exception(ConnectionRefusedError())
            elif error:
                future.set_exception(OSError(error, os.strerror(error)))
            else:
                ends[0].setblocking(False)
                future.set_result(ends[0])

    def _close(self, ends: list[socket.socket]) -> None:
        """Init has ended, or serves another process: refuse what is under way."""
        _close_all(ends)
        self._loop.remove_reader(self._channel)
        for future in self._asked.values():
            if not future.done():
                future.set_exception(ConnectionRefusedError())
        self._channel.close()


def _sockets(ancillary: list[tuple[int, int, bytes]]) -> list[socket.socket]:
    numbers = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers.frombytes(content[: len(content) // 4 * 4])
    found = []
    for number in numbers:
        try:
            found.append(socket.socket(fileno=number))
        except OSError:
            os.close(number)
    return found


def _close_all(ends: list[socket.socket]) -> None:
    for end in ends:
        with contextlib.suppress(OSError):
            end.close()
