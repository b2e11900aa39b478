"""One terminal of a kept sandbox and the clients attached to it: none, one or several.

The holder drains the program's terminal whether or not a client is attached.
The output goes to every client, and into the scrollback for later ones. Only
the client that attached last gets the program's queries to its terminal; the
others see the output without them, or the program would get several answers.
The terminal is as large as the smallest client's.

If a client stops reading, the program waits for it for a moment, as it would
for a real terminal. Then the program goes on without that client, and the
holder redraws the client from the scrollback when it reads again.
"""

from __future__ import annotations

import _socket as socket  # as in stockade.gate.client
import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import time

import msgspec

from stockade.gate import client, wire
from stockade.runs.io.eventloop import READABLE, WRITABLE, Events
from stockade.runs.io.streams import CHUNK
from stockade.runs.supervise import LEFT
from stockade.sessions.attach.protocol import AttachSocket, FromClient, Hello, Redraw, TerminalEnd, WindowSize
from stockade.sessions.attach.scrollback import MOST as MOST_SHOWN
from stockade.sessions.attach.scrollback import Scrollback
from stockade.sessions.attach.terminal_modes import CANCEL, ReplyFilter

#: How many bytes may wait for a client before the program waits for it, and for how many seconds.
MOST, STALLED_SECONDS = 1 << 16, 0.5
#: How many keys may wait for the program before the clients must wait.
MOST_KEYS = 1 << 16
#: Seconds until the holder tries a terminal again that no process inside has open.
AGAIN = 0.1
#: A full-screen program redraws when its terminal's size changes, so the holder shrinks it for a moment.
SMALLER_SECONDS = 0.05


class TerminalClient:
    """One attached client."""

    def __init__(self, line: AttachSocket, stream: int, hello: Hello) -> None:
        self.line, self.stream = line, stream
        self._socket = socket.socket(fileno=stream)
        self.size = (hello.lines, hello.columns)
        self.pending = bytearray()
        self.unasked = ReplyFilter()
        #: Since when the program has been waiting for this client.
        self.since: float | None = None
        #: Whether it has missed output; whether it is being brought up to date, which the program does not
        #: wait for.
        self.behind = self.catching_up = False

    def read(self) -> bytes:
        """Read keys. MSG_DONTWAIT instead of O_NONBLOCK: the client could clear a flag of the shared file."""
        return self._socket.recv(CHUNK, socket.MSG_DONTWAIT)

    def push(self) -> None:
        """Send as much as the client accepts."""
        while self.pending:
            del self.pending[: self._socket.send(self.pending[:CHUNK], socket.MSG_DONTWAIT)]

    def close(self) -> None:
        self._socket.close()
        self.line.close()


class SharedTerminal:
    """Connects the terminal of one program to its clients; see `stockade.runs.io.streams.TerminalHandler`."""

    def __init__(self, number: int, hello: Hello) -> None:
        self.number = number
        self._hello = hello
        self._clients: list[TerminalClient] = []
        self._scrollback = Scrollback()
        self._keys = bytearray()
        self._events: Events | None = None
        self._channel: wire.Channel | None = None
        self._outer = self._writer = -1
        self._watched: dict[int, int] = {}
        self._ended = False
        #: When to try again whether a process inside has the terminal open.
        self._vacant: float | None = None
        self._smaller: float | None = None
        self._size = (hello.lines, hello.columns)

    # The clients' side

    @property
    def clients(self) -> tuple[TerminalClient, ...]:
        return tuple(self._clients)

    def shown(self) -> bytes:
        """Return what the terminal has shown so far."""
        return self._scrollback.shown(afresh=False)

    def join(self, one: TerminalClient) -> None:
        """Attach a client: send it the scrollback, and from now on the output."""
        one.pending += self._scrollback.shown(afresh=False, unasked=one.unasked)
        if self._clients:
            # An unfinished sequence continues for the new client only, because it may be a query.
            before = self._clients[-1]
            before.pending += CANCEL if one.unasked.within else b""
            before.unasked = one.unasked.copy()
        one.pending += one.unasked.release()
        self._clients.append(one)
        one.catching_up = True
        self._fit_smallest(draw=True)
        self._push(one)
        self._update_watches()

    def leave(self, one: TerminalClient) -> None:
        """Remove a client that has detached or gone."""
        if one in self._clients:
            self._clients.remove(one)
            if self._clients and not (last := self._clients[-1]).behind:
                last.pending += self._scrollback.modes.reporting_on() + last.unasked.release()
            for end in (one.stream, one.line.fileno()):
                self._forget(end)
            one.close()
            self._fit_smallest()
            self._update_watches()

    def leave_all(self, parting: int = -1) -> None:
        """Remove every client; first pass each the file `parting`, which says how the program ended."""
        for one in self.clients:
            if parting >= 0:
                one.line.send(TerminalEnd(), parting)
            self.leave(one)

    # The run's side: TerminalHandler

    def fit(self, program: client.Program) -> client.Program:
        """Give the program a terminal like that of the client that asked for it."""
        return msgspec.structs.replace(
            program,
            env={**self._hello.env, **program.env},
            size=self._size,
            settings=self._hello.settings,
        )

    def connect(self, outer: int, channel: wire.Channel, events: Events) -> None:
        """Take over the outer end of the program's terminal."""
        self._outer = outer
        os.set_blocking(outer, False)
        self._writer = os.dup(outer)
        self._channel, self._events = channel, events
        self._vacant, self._ended = None, False
        self._fit_smallest()
        self._update_watches()

    def stopped(self, number: int) -> None:
        """Continue a stopped program: no job control outside would ever continue it."""
        if self._channel is not None:
            self._channel.signal(signal.SIGCONT, in_front=True)

    def move(self, end: int) -> None:
        """Serve a ready descriptor."""
        if end == self._outer:
            self._show()
        elif end == self._writer:
            self._hand_in()
        for one in self.clients:
            if end == one.line.fileno():
                self._hear(one)
            elif end == one.stream:
                self._serve(one)
        self._update_watches()

    def patience(self) -> float | None:
        """Return the seconds until a stalled client's time is over or the terminal is worth another try."""
        now = time.monotonic()
        waits = [until - now for until in (self._vacant, self._smaller) if until is not None]
        waits += [one.since + STALLED_SECONDS - now for one in self._clients if one.since is not None]
        return max(0.0, min(waits)) if waits else None

    def look(self) -> None:
        """Do what has become due by time alone."""
        now = time.monotonic()
        if self._smaller is not None and now >= self._smaller:
            self._smaller = None
            self._resize(self._size)
        if self._vacant is not None and now >= self._vacant:
            self._vacant = None
        self._update_watches()

    def rest(self) -> None:
        """Read the output left by the ended program, and give the clients a moment to take it."""
        most = LEFT
        while most > 0 and (got := self._pull()) > 0:
            most -= got
        until = time.monotonic() + STALLED_SECONDS
        for one in self.clients:
            while one in self._clients and one.pending and (left := until - time.monotonic()) > 0:
                _writable(one.stream, left)
                self._push(one)

    def end(self) -> None:
        """Do nothing: the terminal stays as it is while the run is being ended."""

    def tail(self) -> bytes:
        """Return nothing: a kept shell gets no hints."""
        return b""

    def drop(self) -> None:
        """Do nothing: the clients still see the last output."""

    def close(self) -> None:
        """Close the program's terminal. The clients stay until `leave_all` tells them why."""
        self._ended = True
        self._update_watches()
        self._events = self._channel = None
        for end in (self._outer, self._writer):
            if end >= 0:
                os.close(end)
        self._outer = self._writer = -1

    # Between them

    def _hear(self, one: TerminalClient) -> None:
        try:
            letter, descriptor = one.line.receive(FromClient)
        except BlockingIOError:
            return
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(letter, WindowSize):
            one.size = (letter.lines, letter.columns)
            self._fit_smallest()
        elif isinstance(letter, Redraw):
            self._redraw(one)
            self._fit_smallest(draw=True)
        else:
            self.leave(one)

    def _serve(self, one: TerminalClient) -> None:
        if self._watched.get(one.stream, 0) & READABLE:
            try:
                data = one.read()
            except BlockingIOError:
                data = None
            except OSError:
                data = b""
            if data == b"":
                self.leave(one)
                return
            self._keys += data or b""
            self._hand_in()
        if one.behind:
            self._redraw(one)
        self._push(one)

    def _hand_in(self) -> None:
        try:
            while self._keys:
                del self._keys[: os.write(self._writer, self._keys[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # no process has the terminal open
            self._keys.clear()

    def _show(self) -> None:
        if self._pull() < 0:
            # No process has it open; one inside may open it again.
            self._vacant = time.monotonic() + AGAIN

    def _pull(self) -> int:
        """Read output, pass it on and return its size; -1 at the end, which the kernel reports as EIO.

        A read returns at most a page, and processing costs more than reading, so several reads are joined.
        """
        data = bytearray()
        try:
            while len(data) < CHUNK:
                piece = os.read(self._outer, CHUNK)
                if not piece:
                    break
                data += piece
        except BlockingIOError:
            if not data:
                return 0
        except OSError:
            pass
        if not data:
            return -1
        shown = bytes(data)
        self._scrollback.add(shown)
        for one in self.clients:
            if not one.behind:
                # A client that attached in the middle of a sequence must not see the rest of it as text.
                asked = one is self._clients[-1] and not one.unasked.leaves_out
                one.pending += shown if asked else one.unasked.feed(shown)
                self._push(one)
        return len(data)

    def _push(self, one: TerminalClient) -> None:
        """Send a client as much as it accepts; remove it if it has gone."""
        try:
            one.push()
            one.catching_up = False
        except BlockingIOError:
            pass
        except OSError:
            self.leave(one)

    def _redraw(self, one: TerminalClient) -> None:
        one.behind, one.catching_up, one.since = False, True, None
        one.unasked = ReplyFilter()
        one.pending[:] = self._scrollback.shown(afresh=True, unasked=one.unasked)
        if one is self._clients[-1]:
            one.pending += one.unasked.release()

    def _must_wait_for(self, one: TerminalClient) -> bool:
        """Whether the program waits for this client."""
        waiting, one.since = one.since, None
        if one.catching_up:
            one.behind |= len(one.pending) > MOST + 2 * MOST_SHOWN
        elif len(one.pending) > MOST:
            one.since = time.monotonic() if waiting is None else waiting
            one.behind = time.monotonic() - one.since >= STALLED_SECONDS
        if one.behind:
            one.pending.clear()
            one.since = None
        return one.since is not None

    def _fit_smallest(self, *, draw: bool = False) -> None:
        """Make the terminal as large as the smallest client's; `draw` makes a full-screen program redraw."""
        sizes = [one.size for one in self._clients if all(one.size)]
        if sizes:
            self._size = (min(size[0] for size in sizes), min(size[1] for size in sizes))
        lines, columns = self._size
        if draw and self._scrollback.modes.alternate and lines > 1:
            self._resize((lines - 1, columns))
            self._smaller = time.monotonic() + SMALLER_SECONDS
        elif self._smaller is None:
            self._resize(self._size)

    def _resize(self, size: tuple[int, int]) -> None:
        if self._outer >= 0:
            with contextlib.suppress(OSError):
                fcntl.ioctl(self._outer, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    def _update_watches(self) -> None:
        """Update which descriptors are watched, and for what."""
        if self._events is None:
            return
        wanted: dict[int, int] = {}
        if not self._ended:
            # A list and not a generator in any(): each call also notes since when the program waits.
            waits = [self._must_wait_for(one) for one in self._clients]
            if not any(waits) and self._vacant is None:
                wanted[self._outer] = READABLE
            if self._keys:
                wanted[self._writer] = WRITABLE
            for one in self._clients:
                wanted[one.line.fileno()] = READABLE
                what = (READABLE if len(self._keys) < MOST_KEYS else 0) | (
                    WRITABLE if one.pending or one.behind else 0
                )
                if what:
                    wanted[one.stream] = what
        for end in [end for end, what in self._watched.items() if wanted.get(end) != what]:
            self._forget(end)
        for end in wanted.keys() - self._watched.keys():
            self._events.watch(end, wanted[end])
            self._watched[end] = wanted[end]

    def _forget(self, end: int) -> None:
        if self._watched.pop(end, None) is not None and self._events is not None:
            self._events.forget(end)


def _writable(descriptor: int, seconds: float) -> None:
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    poll.poll(seconds * 1000)
