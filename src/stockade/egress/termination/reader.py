"""What was read of a stream and not used yet, with bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from stockade.egress.decoders.http_requests import BAD_IN_LINE, bad_byte
from stockade.egress.termination.byte_stream import ByteStream, StreamError

#: How long a head may take from its first byte on.
HEAD_SECONDS = 20.0
#: The most of a body that is passed on at once.
PIECE = 65536
#: The line with the size of a chunk: fifteen hexadecimal digits and CRLF.
CHUNK_LINE = 17


class TooLongError(ValueError):
    """A head or a line has no end within its bound."""


class BadByteError(ValueError):
    """A head has a byte that no line may have; the message is a short fixed reason."""


class StreamReader:
    """Reads heads, lines and pieces of bodies."""

    def __init__(
        self,
        stream: ByteStream,
        first: bytearray | None = None,
        count: Callable[[int], bool] = lambda _: True,
    ) -> None:
        """Take the stream, what was read of it already, and what counts the bytes that are held.

        `count` gets how many more or fewer there are, and returns whether they are within a limit.
        """
        self.stream = stream
        self._data = bytearray()
        self._count, self._counted = count, 0
        if first is not None:
            # Emptied: frames of coroutines may hold it for as long as the connection lasts.
            self._data += first
            first.clear()
            self._hold(len(self._data))
        self.ended = False
        #: What waits for more.
        self.wait: Callable[[], Awaitable[None]] = stream.wait

    @property
    def holds(self) -> bool:
        """Whether something was read that nobody asked for yet."""
        return bool(self._data)

    async def head(self, most: int, seconds: float) -> bytes:
        """Return bytes up to and including an empty line; b"" if the stream ends before the first byte.

        From its first byte on, a head may take some seconds. A byte that no line may have ends it at once.
        """
        if not self._data and not await self._more():
            return b""
        async with asyncio.timeout(seconds):
            searched = 0
            while True:
                end = self._data.find(b"\r\n\r\n", searched) + 4
                stop = min(end if end >= 4 else len(self._data), most)
                if found := BAD_IN_LINE.search(self._data, max(0, searched - 1), stop):
                    raise BadByteError(bad_byte(found[0]))
                if (end if end >= 4 else len(self._data)) > most:
                    raise TooLongError
                if end >= 4:
                    return self._take(end)
                searched = max(0, len(self._data) - 3)
                if not await self._more():
                    raise StreamError("ended in a head")

    async def trailers(self, most: int, seconds: float) -> bytes:
        """Return a section of trailers, with the empty line that ends it."""
        while len(self._data) < 2:
            await self._need_more()
        return self._take(2) if self._data.startswith(b"\r\n") else await self.head(most, seconds)

    async def line(self, most: int = CHUNK_LINE) -> bytes:
        """Return a line without its CRLF."""
        while True:
            end = self._data.find(b"\n", 0, most) + 1
            if end:
                line = self._take(end)
                if not line.endswith(b"\r\n"):
                    raise TooLongError
                return line[:-2]
            if len(self._data) >= most:
                raise TooLongError
            await self._need_more()

    async def some(self, most: int) -> bytes:
        """Return between one and `most` bytes; b"" at the end of the stream."""
        if not self._data and not await self._more():
            return b""
        return self._take(min(most, len(self._data)))

    def look(self) -> None:
        """Take what has come, without waiting."""
        if not self.ended:
            data = self.stream.read_now()
            if data is not None:
                self._data += data
                self.ended = not data
                if not self._hold(len(self._data)):
                    raise StreamError("limit")

    def release(self) -> None:
        """Let go of the bytes that are held, and of what waits for more: that is a cycle of objects."""
        self._data, self.wait = bytearray(), self.stream.wait
        self._hold(0)

    def _hold(self, amount: int) -> bool:
        more, self._counted = amount - self._counted, amount
        return not more or self._count(more)

    def _take(self, amount: int) -> bytes:
        self._hold(len(self._data) - amount)
        if amount == len(self._data):
            taken, self._data = bytes(self._data), bytearray()
            return taken
        taken = bytes(self._data[:amount])
        del self._data[:amount]
        return taken

    async def _need_more(self) -> None:
        if not await self._more():
            raise StreamError("ended in a body")

    async def _more(self) -> bool:
        before = len(self._data)
        while not self.ended:
            self.look()
            if len(self._data) > before:
                await self.stream.take_turns()
                return True
            if not self.ended:
                await self.wait()
        return False
