"""Bytes between a program inside and a server outside.

Each direction is a pump. It moves bytes with splice through a pipe, so that they never enter this process; it
holds a pipe only while bytes are in it, because the kernel bounds the pages of all pipes of a user. If there
is no pipe to be had, it peeks at the bytes, sends what the other side takes and only then takes as many from
the first side. Either way a slow reader makes the writer wait, and what waits lies in the kernel's buffers of
the two sockets.

An end of one direction is passed on as such; the other direction goes on. A reset is passed on as a reset.

A pump under a limit of bytes reads no more than is left. Once nothing is left and there is more to read, both
sides are reset.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Callable

from stockade.egress.dialer import reason_for
from stockade.egress.network_budget import HostBudget
from stockade.egress.records import ConnectionRecord

PIPES = 8
PIPE_SIZE = 1024 * 1024
_SPARE_PIPES = 2
_COPY_SIZE = 64 * 1024
#: What a check sees at once; the pump holds it until the other side takes it.
_CHECK_SIZE = 16 * 1024
#: How often a pump moves bytes before it lets others have their turn.
_ROUNDS = 8
_SPLICE = os.SPLICE_F_MOVE | os.SPLICE_F_NONBLOCK
_RESET = struct.pack("ii", 1, 0)
#: What each buffer of a socket may hold once many connections are open; the kernel doubles it.
_BUFFER_SIZE = 128 * 1024


def reset(connection: socket.socket) -> None:
    """Close a connection so that the other side sees a reset; nothing happens if it is closed already."""
    if connection.fileno() < 0:
        return
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    with contextlib.suppress(OSError):
        connection.close()


def limit_buffers(connection: socket.socket) -> None:
    """Bound what the kernel holds for a socket: for a reader that waits it would grow to megabytes."""
    for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        connection.setsockopt(socket.SOL_SOCKET, option, _BUFFER_SIZE)


class Pipe:
    """A pipe for splice, and how many bytes are in it."""

    __slots__ = ("filled", "reader", "size", "writer")

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.filled = 0
        try:
            self.size = fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, PIPE_SIZE)
        except OSError:
            # The user's pipes have too many pages already: this one has what pipes begin with.
            self.size = fcntl.fcntl(self.writer, fcntl.F_GETPIPE_SZ)

    def close(self) -> None:
        """Close both ends."""
        os.close(self.reader)
        os.close(self.writer)


class PipePool:
    """The pipes of all relays: few, and lent only while bytes are under way."""

    def __init__(self, limit: int = PIPES) -> None:
        self._limit, self._lent = limit, 0
        self._spare: list[Pipe] = []
        self.scratch = memoryview(bytearray(_COPY_SIZE))

    def take(self) -> Pipe | None:
        """Lend a pipe; None if all are lent or the kernel has none."""
        if self._lent >= self._limit:
            return None
        try:
            pipe = self._spare.pop() if self._spare else Pipe()
        except OSError:
            return None
        self._lent += 1
        return pipe

    def give(self, pipe: Pipe) -> None:
        """Take a pipe back; one with bytes in it is closed."""
        self._lent -= 1
        if pipe.filled or len(self._spare) >= _SPARE_PIPES:
            pipe.close()
        else:
            self._spare.append(pipe)


class _TargetFullError(Exception):
    """The side that bytes go to takes none now."""


class Relay:
    """One connection from inside to outside; `finished` is done when both directions have ended."""

    __slots__ = (
        "_loop", "active", "budget", "finished", "incoming", "inside", "last_words", "outgoing", "outside",
        "pool", "record",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: PipePool,
        inside: socket.socket,
        outside: socket.socket,
        record: ConnectionRecord,
        budget: HostBudget | None = None,
    ) -> None:
        self._loop, self.pool, self.record = loop, pool, record
        self.inside, self.outside, self.budget = inside, outside, budget
        self.outgoing = Pump(loop, self, inside, outside, self._count_sent, "upload")
        self.incoming = Pump(loop, self, outside, inside, self._count_received, "download")
        #: When the last byte was moved, by the loop's clock.
        self.active = loop.time()
        #: What to say to the inside, which is still open, when the relay was refused; else empty.
        self.last_words = b""
        self.finished: asyncio.Future[None] = loop.create_future()

    def check_end(self) -> None:
        """Finish if both directions have ended."""
        if self.outgoing.ended and self.incoming.ended:
            self.record.close()
            self._close(socket.socket.close)

    def abort(self, verdict: str = "allowed", reason: str = "reset") -> None:
        """Reset both sides."""
        self.record.close(verdict, reason)
        self._close(reset)

    def end(self) -> None:
        """Close both sides; what the kernel has taken to send, it still sends."""
        self.record.close(reason="ended")
        self._close(socket.socket.close)

    def refuse(self, reason: str, last_words: bytes) -> None:
        """Reset the outside and leave the inside open for last words."""
        self.record.close("denied", reason)
        self.last_words = last_words
        self.outgoing.stop()
        self.incoming.stop()
        reset(self.outside)
        self._finish()

    def _close(self, close: Callable[[socket.socket], None]) -> None:
        self.outgoing.stop()
        self.incoming.stop()
        close(self.inside)
        close(self.outside)
        self._finish()

    def _finish(self) -> None:
        if not self.finished.done():
            self.finished.set_result(None)

    def _count_sent(self, amount: int) -> None:
        self.active = self._loop.time()
        self.record.add(amount, 0)

    def _count_received(self, amount: int) -> None:
        self.active = self._loop.time()
        self.record.add(0, amount)


class Pump:
    """Moves the bytes of one direction."""

    __slots__ = (
        "_budget", "_count", "_from", "_from_number", "_kind", "_loop", "_pending", "_pipe", "_relay", "_to",
        "_to_number", "_waits_from", "_waits_to", "check", "ended",
    )  # fmt: skip

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        relay: Relay,
        source: socket.socket,
        target: socket.socket,
        count: Callable[[int], None],
        kind: str,
    ) -> None:
        self._loop, self._relay, self._count = loop, relay, count
        self._budget, self._kind = relay.budget, kind
        self._from, self._to = source, target
        self._from_number, self._to_number = source.fileno(), target.fileno()
        self._pipe: Pipe | None = None
        #: Bytes that were read already and go first.
        self._pending = b""
        self._waits_from = self._waits_to = False
        self.ended = False
        #: Sees what passes and returns what may go on now; it refuses the relay itself.
        self.check: Callable[[bytes], bytes] | None = None

    def start(self, first: bytes = b"") -> None:
        """Begin; `first` are bytes of this direction that were read already."""
        self._add(first)
        self._run()

    def _add(self, data: bytes) -> None:
        """Count bytes that may go on towards the limit, and let them wait for the other side."""
        if self._budget is None or self._budget.spend(self._kind, len(data)):
            self._pending += data
        else:
            self._relay.abort("denied", self._budget.refusal(self._kind))

    def stop(self) -> None:
        """Move nothing more."""
        self.ended = True
        self._wait(on_from=False, on_to=False)
        if self._pipe is not None:
            self._relay.pool.give(self._pipe)
            self._pipe = None

    def is_idle(self) -> bool:
        """Whether its source is open and has sent nothing that is still to be passed on."""
        if self.ended or self._waits_to or self._is_full():
            return False
        try:
            self._from.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def _run(self) -> None:
        try:
            for _ in range(_ROUNDS):
                if not self._step():
                    return
            # There is more, but others have their turn: the loop calls again.
            self._wait(on_from=not self._is_full(), on_to=self._is_full())
        except OSError as error:
            if not self.ended:
                self._relay.abort(reason=reason_for(error))
        except Exception:
            # Whatever it is, it ends this connection and no other.
            self._relay.abort(reason="failed")

    def _is_full(self) -> bool:
        return bool(self._pending) or (self._pipe is not None and self._pipe.filled > 0)

    def _step(self) -> bool:
        """Write what was read, else read; return whether to go on."""
        if self.ended:
            return False
        if self._pending or (self._pipe is not None and self._pipe.filled):
            try:
                self._write()
            except BlockingIOError:
                self._wait(on_from=False, on_to=True)
                return False
            return True
        try:
            more = self._read()
        except BlockingIOError:
            self._give_pipe()
            self._wait(on_from=True, on_to=False)
            return False
        except _TargetFullError:
            self._wait(on_from=False, on_to=True)
            return False
        if not more and not self.ended:
            self._end()
        return more

    def _write(self) -> None:
        pipe = self._pipe
        if self._pending:
            amount = self._to.send(self._pending)
            self._pending = self._pending[amount:]
        else:
            assert pipe is not None
            amount = os.splice(pipe.reader, self._to_number, pipe.filled, flags=_SPLICE)
            pipe.filled -= amount
        self._count(amount)

    def _read(self) -> bool:
        """Read something, or copy it at once; return False at the end."""
        if self.check is not None:
            data = self._from.recv(_CHECK_SIZE)
            if not data:
                return False
            passed = self.check(data)
            if not self.ended:
                self._add(passed)
            return True
        left = PIPE_SIZE if self._budget is None else self._budget.left(self._kind)
        if not left:
            return self._exceed()
        if self._pipe is None:
            self._pipe = self._relay.pool.take()
            if self._pipe is None:
                return self._copy(left)
        with contextlib.suppress(BlockingIOError):
            self._pipe.filled = os.splice(
                self._from_number, self._pipe.writer, min(self._pipe.size, left), flags=_SPLICE
            )
        if self._pipe.filled:
            self._spend(self._pipe.filled)
            return True
        # splice never gets past an urgent byte, though the socket is readable because of what follows it.
        # What recv says counts; it leaves that byte out.
        self._give_pipe()
        return self._copy(left)

    def _spend(self, amount: int) -> None:
        if self._budget is not None:
            self._budget.spend(self._kind, amount)

    def _exceed(self) -> bool:
        """Reset both sides if there is more to read than the limit has left; return False at the end."""
        if not self._from.recv(1, socket.MSG_PEEK):
            return False
        assert self._budget is not None
        self._relay.abort("denied", self._budget.refusal(self._kind))
        return True

    def _copy(self, left: int) -> bool:
        scratch = self._relay.pool.scratch
        amount = self._from.recv_into(scratch, min(_COPY_SIZE, left), socket.MSG_PEEK)
        if not amount:
            return False
        try:
            sent = self._to.send(scratch[:amount])
        except BlockingIOError:
            raise _TargetFullError from None
        self._from.recv_into(scratch, sent)
        self._spend(sent)
        self._count(sent)
        return True

    def _end(self) -> None:
        self.stop()
        with contextlib.suppress(OSError):
            self._to.shutdown(socket.SHUT_WR)
        self._relay.check_end()

    def _give_pipe(self) -> None:
        if self._pipe is not None:
            self._relay.pool.give(self._pipe)
            self._pipe = None

    def _wait(self, *, on_from: bool, on_to: bool) -> None:
        """Wait for one side or the other, or for none."""
        if on_from != self._waits_from:
            self._waits_from = on_from
            if on_from:
                self._loop.add_reader(self._from_number, self._run)
            else:
                self._loop.remove_reader(self._from_number)
        if on_to != self._waits_to:
            self._waits_to = on_to
            if on_to:
                self._loop.add_writer(self._to_number, self._run)
            else:
                self._loop.remove_writer(self._to_number)
