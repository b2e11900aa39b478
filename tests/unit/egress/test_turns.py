"""A peer that sends without end, and faster than it is read: others have their turn all the same."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable

import pytest

from stockade.egress.termination.byte_stream import ByteStream
from stockade.egress.termination.http1_upstream import Http1Upstream
from stockade.egress.termination.http2_side import Http2Side
from stockade.egress.termination.http2_upstream import Http2Upstream
from stockade.egress.termination.reader import StreamReader

#: A frame of a type that nobody knows.
FRAME = b"\0\0\0\xff\0\0\0\0\0"


class EndlessStream(ByteStream):
    """Always has one more piece."""

    reads = 0

    def read_now(self) -> bytes:
        time.sleep(0.001)
        self.reads += 1
        assert self.reads < 100, "nothing else had a turn"
        return FRAME


async def pieces(stream: ByteStream) -> None:
    reader = StreamReader(stream)
    while True:
        await reader.some(1 << 16)


async def frames(stream: ByteStream) -> None:
    side = Http2Side(stream, client=True)
    while True:
        await side.receive()


async def chunks(stream: ByteStream) -> None:
    """Pieces of one byte, all of which were read at once."""
    while True:
        stream.read_now()
        await stream.write(b"x")


async def between_requests(stream: ByteStream) -> None:
    async def dial() -> ByteStream:
        raise AssertionError

    route = Http2Upstream(dial, stream, Http1Upstream(dial, None, "a.test"), "a.test")
    await route.look()


@pytest.mark.parametrize("read", [pieces, frames, chunks, between_requests])
def test_others_have_their_turn(read: Callable[[ByteStream], Awaitable[None]]) -> None:
    async def main() -> None:
        end, other = socket.socketpair()
        with end, other:
            reading = asyncio.ensure_future(read(EndlessStream(asyncio.get_running_loop(), end)))
            for _ in range(3):
                await asyncio.sleep(0)
            assert not reading.done(), reading.exception()
            reading.cancel()

    asyncio.run(main())
