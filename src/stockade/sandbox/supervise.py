"""Watching one run: its streams, its time, and how it ends.

One loop, no threads. Both output streams are drained from the start, so that
no program blocks because nobody reads; memory is bounded by the output limit.
How the run ended is what the gate and the kernel say, never what was printed.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable

import msgspec

from stockade.gate import client
from stockade.sandbox.launch import Box

CHUNK = 1 << 16
LEFT = 1 << 20  # as much as a pipe can be made to hold
GRACE = 2.0
Sink = Callable[[bytes], object]


class Ended(msgspec.Struct, frozen=True):
    """What was seen of a run's end. `reply` is None if the gate died first."""

    reply: client.Reply | None
    timed_out: bool
    wall: float
    stdout: bytes
    stderr: bytes
    truncated: bool


class Output:
    """One stream of the program: kept up to the limit, handed on as it comes."""

    def __init__(self, limit: int, sink: Sink | None, keep: bool) -> None:
        self.reader, self.writer = os.pipe()
        # The program can open its own end for reading and be faster: the supervisor must not wait then.
        os.set_blocking(self.reader, False)
        self._room = limit if keep else 0
        self._sink = sink
        self._keep = keep
        self._kept = bytearray()
        self.truncated = False

    def read(self) -> int:
        """Take what is there and return how much it was; 0 at the end, -1 if there is nothing yet."""
        try:
            data = os.read(self.reader, CHUNK)
        except BlockingIOError:
            return -1
        if self._sink is not None and data:
            self._sink(data)
        if self._room:
            self._kept += data[: self._room]
        self.truncated |= self._keep and len(data) > self._room
        self._room -= min(self._room, len(data))
        return len(data)

    def content(self) -> bytes:
        return bytes(self._kept)


class Input:
    """What the program reads: bytes that are given, then what a descriptor yields."""

    def __init__(self, given: bytes, source: int | None) -> None:
        self._pending = memoryview(given)
        self.source = source
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def waiting_for(self) -> tuple[int, int] | None:
        """What to poll next: the program to take what is pending, or the source to yield more."""
        if self._pending:
            return self.writer, select.POLLOUT
        return None if self.source is None else (self.source, select.POLLIN)

    def step(self) -> bool:
        """Do what was waited for; False when the program can be given no more."""
        try:
            if self._pending:
                self._pending = self._pending[os.write(self.writer, self._pending) :]
            elif self.source is not None:
                self._pending = memoryview(os.read(self.source, CHUNK))
                if not self._pending:
                    return False
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._pending) or self.source is not None


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and how to watch it."""

    argv: list[str]
    env: dict[str, str]
    cwd: str
    given: bytes = b""
    source: int | None = None
    seconds: float | None = None
    grace: float = GRACE
    limit: int
    on_stdout: Sink | None = None
    on_stderr: Sink | None = None
    keep: bool = True
    #: The sandbox ends with this run.
    last: bool


class Streams:
    """The pipes of one run. Whoever makes them closes them."""

    def __init__(self, run: Run) -> None:
        self._open: set[int] = set()
        try:
            self.out = Output(run.limit, run.on_stdout, run.keep)
            self._open |= {self.out.reader, self.out.writer}
            self.err = Output(run.limit, run.on_stderr, run.keep)
            self._open |= {self.err.reader, self.err.writer}
            self.feed = Input(run.given, run.source) if run.given or run.source is not None else None
            if self.feed is None:
                # Not the host's /dev/null: root's program would own its inode.
                self.stdin, nobody = os.pipe()
                os.close(nobody)
            else:
                self.stdin = self.feed.reader
                self._open.add(self.feed.writer)
            self._open.add(self.stdin)
        except BaseException:
            self.close()
            raise

    def close(self, *ends: int) -> None:
        """Close these ends, or all that are still open."""
        for end in ends or tuple(self._open):
            os.close(end)
            self._open.remove(end)


def supervise(box: Box, id: int, run: Run, streams: Streams) -> Ended:
    """Start the program and stay with it until it and, for the last one, everything else has ended."""
    began = time.monotonic()
    theirs = (streams.stdin, streams.out.writer, streams.err.writer)
    box.connection.execute(id, run.argv, run.env, run.cwd, theirs, last=run.last)
    streams.close(*theirs)
    try:
        return _Watch(box, id, run, streams, began).until_end()
    except BaseException:
        # Whoever stops watching stops the run; a living sandbox goes on without it.
        box.connection.signal(id, signal.SIGKILL, everything=True)
        raise


class _Watch:
    """The loop over one run."""

    def __init__(self, box: Box, id: int, run: Run, streams: Streams, began: float) -> None:
        self.box, self.id, self.run, self.pipes, self.began = box, id, run, streams, began
        out, err, self.feed = streams.out, streams.err, streams.feed
        self.poll = select.poll()
        self.streams = {out.reader: out, err.reader: err}
        for end in (*self.streams, box.connection.fileno()):
            self.poll.register(end, select.POLLIN)
        self.word = select.poll()
        self.word.register(box.connection.fileno(), select.POLLIN)
        self.fed = -1
        self.deadline = None if run.seconds is None else began + run.seconds
        self.timed_out = False
        self.killed = False

    def until_end(self) -> Ended:
        ended: client.Reply | None = None
        over = False
        while not over:
            self._feed()
            for end, _ in self.poll.poll(self._patience()):
                if end in self.streams:
                    self._drain(end)
                elif end == self.fed:
                    self._give()
                else:
                    reply = self.box.connection.receive()
                    if reply is None or reply.id == self.id:
                        ended, over = reply, True
            if not over:
                self._watch_time()
        for end in tuple(self.streams):
            self._drain(end, LEFT)
        if self.timed_out and not self.run.last:
            # What left the run's process group goes with it.
            self.box.connection.signal(self.id, signal.SIGKILL, everything=True)
        return Ended(
            reply=ended,
            timed_out=self.timed_out,
            wall=time.monotonic() - self.began,
            stdout=self.pipes.out.content(),
            stderr=self.pipes.err.content(),
            truncated=self.pipes.out.truncated or self.pipes.err.truncated,
        )

    def _drain(self, end: int, most: int = 1) -> None:
        """Take one piece, or after the end what was left in the pipe; others may write for ever."""
        while most > 0:
            got = self.streams[end].read()
            if got == 0:
                del self.streams[end]
                self.poll.unregister(end)
                self.pipes.close(end)
            if got <= 0:
                return
            most -= got

    def _feed(self) -> None:
        waiting = self.feed.waiting_for() if self.feed is not None else None
        wanted = waiting[0] if waiting else -1
        if self.feed is not None and waiting is None:
            self._stop_feeding()
        if wanted != self.fed:
            if self.fed >= 0:
                self.poll.unregister(self.fed)
            if waiting:
                self.poll.register(*waiting)
            self.fed = wanted

    def _give(self) -> None:
        if self.feed is not None and not self.feed.step():
            self.poll.unregister(self.fed)
            self.fed = -1
            self._stop_feeding()

    def _stop_feeding(self) -> None:
        assert self.feed is not None
        self.pipes.close(self.feed.writer)
        self.feed = None

    def _patience(self) -> float | None:
        if self.deadline is None:
            return None
        return max(0.0, self.deadline - time.monotonic()) * 1000 + 1

    def _watch_time(self) -> None:
        """TERM at the deadline, KILL after the grace, and if even that is not answered the gate itself."""
        if self.deadline is None or time.monotonic() < self.deadline:
            return
        if self.word.poll(0):
            return  # it may have ended in time, while a callback kept us
        if not self.timed_out:
            self.timed_out = True
            self.deadline += self.run.grace
            self.box.connection.signal(self.id, signal.SIGTERM, everything=self.run.last)
        elif not self.killed:
            self.killed = True
            self.deadline += GRACE
            self.box.connection.signal(self.id, signal.SIGKILL, everything=self.run.last)
        else:
            self.deadline = None
            signal.pidfd_send_signal(self.box.pidfd, signal.SIGKILL)
