"""One terminal of a kept sandbox, and those who are attached to it: none, one or several.

The program's terminal is drained whether or not anybody looks. What it shows
goes to everybody, and into the scrollback for those who come later. The one
who came last is asked what the program asks its terminal; the others see it
without the questions, or it would have several answers. The terminal is as
large as the smallest of theirs.

A client that takes nothing is waited for a moment, as one's own terminal
would be. Then the program goes on without it, and what it missed is drawn
afresh from the scrollback when it takes something again.
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

from stockade.gate import client
from stockade.live.letters import Again, FromClient, Hello, Line, Over, Size
from stockade.live.modes import CANCEL, Unasked
from stockade.live.scrollback import MOST as MOST_SHOWN
from stockade.live.scrollback import Scrollback
from stockade.sandbox.steps import READABLE, WRITABLE, Events
from stockade.sandbox.streams import CHUNK
from stockade.sandbox.supervise import LEFT

#: As many bytes wait for a client; then the program does, and after so many seconds no longer.
MOST, STALLED_SECONDS = 1 << 16, 0.5
#: As many keys wait for a program; then those who type do.
MOST_KEYS = 1 << 16
#: How often a terminal that nobody has open inside is looked at again.
AGAIN = 0.1
#: A full-screen program draws itself anew when its terminal changes, so it does for a moment.
SMALLER_SECONDS = 0.05


class Client:
    """One who is attached."""

    def __init__(self, line: Line, stream: int, hello: Hello) -> None:
        self.line, self.stream = line, stream
        self._socket = socket.socket(fileno=stream)
        self.size = (hello.lines, hello.columns)
        self.pending = bytearray()
        self.unasked = Unasked()
        #: Since when the program waits for it.
        self.since: float | None = None
        #: It has missed something; and it is being shown that, which nobody waits for.
        self.behind = self.catching_up = False

    def read(self) -> bytes:
        """What was typed. Whether we wait is not for a flag to say that the client can change too."""
        return self._socket.recv(CHUNK, socket.MSG_DONTWAIT)

    def push(self) -> None:
        """Give it what it takes."""
        while self.pending:
            del self.pending[: self._socket.send(self.pending[:CHUNK], socket.MSG_DONTWAIT)]

    def close(self) -> None:
        self._socket.close()
        self.line.close()


class Shared:
    """Looks after the terminal of one program; see `stockade.sandbox.streams.Terminal`."""

    def __init__(self, number: int, hello: Hello) -> None:
        self.number = number
        self._hello = hello
        self._clients: list[Client] = []
        self._scrollback = Scrollback()
        self._keys = bytearray()
        self._events: Events | None = None
        self._channel: client.Channel | None = None
        self._outer = self._writer = -1
        self._watched: dict[int, int] = {}
        self._ended = False
        #: When to see again whether anybody has the program's terminal open.
        self._vacant: float | None = None
        self._smaller: float | None = None
        self._size = (hello.lines, hello.columns)

    # Of those who are attached

    @property
    def clients(self) -> tuple[Client, ...]:
        return tuple(self._clients)

    def shown(self) -> bytes:
        """What it has shown so far."""
        return self._scrollback.shown(afresh=False)

    def join(self, one: Client) -> None:
        """Show a new one what there was, and from now on what there is."""
        one.pending += self._scrollback.shown(afresh=False, unasked=one.unasked)
        if self._clients:
            # What has begun goes on for the new one, and may be a question.
            before = self._clients[-1]
            before.pending += CANCEL if one.unasked.within else b""
            before.unasked = one.unasked.copy()
        one.pending += one.unasked.held()
        self._clients.append(one)
        one.catching_up = True
        self._fit_all(draw=True)
        self._push(one)
        self._aim()

    def leave(self, one: Client) -> None:
        """It has detached, or is gone."""
        if one in self._clients:
            self._clients.remove(one)
            if self._clients and not (last := self._clients[-1]).behind:
                last.pending += self._scrollback.modes.spoken_of() + last.unasked.held()
            for end in (one.stream, one.line.fileno()):
                self._forget(end)
            one.close()
            self._fit_all()
            self._aim()

    def leave_all(self, parting: int = -1) -> None:
        """Tell everybody that it is over, with a file that says how, and let go of them."""
        for one in self.clients:
            if parting >= 0:
                one.line.send(Over(), parting)
            self.leave(one)

    # What a run asks of its terminal

    def fit(self, program: client.Program) -> client.Program:
        """The program, with a terminal like that of the client who wanted it."""
        return msgspec.structs.replace(
            program,
            env={**self._hello.env, **program.env},
            size=self._size,
            settings=self._hello.settings,
        )

    def connect(self, outer: int, channel: client.Channel, events: Events) -> None:
        """Take over the outer end of the program's terminal."""
        os.set_blocking(outer, False)
        self._channel, self._events = channel, events
        self._outer, self._writer = outer, os.dup(outer)
        self._vacant, self._ended = None, False
        self._fit_all()
        self._aim()

    def stopped(self, number: int) -> None:
        """A shell that stops itself would wait for ever: nobody outside controls it as a job."""
        if self._channel is not None:
            self._channel.signal(signal.SIGCONT, in_front=True)

    def move(self, end: int) -> None:
        """Copy what there is to copy."""
        if end == self._outer:
            self._show()
        elif end == self._writer:
            self._hand_in()
        for one in self.clients:
            if end == one.line.fileno():
                self._hear(one)
            elif end == one.stream:
                self._serve(one)
        self._aim()

    def patience(self) -> float | None:
        """Until a client has been waited for long enough, or a terminal may have been opened again."""
        now = time.monotonic()
        waits = [until - now for until in (self._vacant, self._smaller) if until is not None]
        waits += [one.since + STALLED_SECONDS - now for one in self._clients if one.since is not None]
        return max(0.0, min(waits)) if waits else None

    def look(self) -> None:
        """See to what no descriptor tells."""
        now = time.monotonic()
        if self._smaller is not None and now >= self._smaller:
            self._smaller = None
            self._resize(self._size)
        if self._vacant is not None and now >= self._vacant:
            self._vacant = None
        self._aim()

    def rest(self) -> None:
        """Take what was left when the program ended, and give those who are attached a moment to take it."""
        most = LEFT
        while most > 0 and (got := self._pull()) > 0:
            most -= got
        until = time.monotonic() + STALLED_SECONDS
        for one in self.clients:
            while one in self._clients and one.pending and (left := until - time.monotonic()) > 0:
                _writable(one.stream, left)
                self._push(one)

    def end(self) -> None:
        """The run is being ended."""

    def drop(self) -> None:
        """What it still shows is shown."""

    def close(self) -> None:
        """Let go of the program's terminal. Those who are attached stay until they are told why."""
        self._ended = True
        self._aim()
        self._events = self._channel = None
        if self._outer >= 0:
            os.close(self._outer)
            os.close(self._writer)
            self._outer = self._writer = -1

    # Between them

    def _hear(self, one: Client) -> None:
        try:
            letter, descriptor = one.line.receive(FromClient)
        except BlockingIOError:
            return
        if descriptor >= 0:
            os.close(descriptor)
        if isinstance(letter, Size):
            one.size = (letter.lines, letter.columns)
            self._fit_all()
        elif isinstance(letter, Again):
            self._afresh(one)
            self._fit_all(draw=True)
        else:
            self.leave(one)

    def _serve(self, one: Client) -> None:
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
            self._afresh(one)
        self._push(one)

    def _hand_in(self) -> None:
        try:
            while self._keys:
                del self._keys[: os.write(self._writer, self._keys[:CHUNK])]
        except BlockingIOError:
            pass
        except OSError:  # nobody has the terminal open
            self._keys.clear()

    def _show(self) -> None:
        if self._pull() < 0:
            # Nobody has it open; a process inside may open it again.
            self._vacant = time.monotonic() + AGAIN

    def _pull(self) -> int:
        """How much there was; -1 at the end, which the kernel calls EIO at a terminal.

        The kernel yields a page at a time, and what is done with it costs more than to read it.
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
                # Who came in the middle of something does not see the rest of it as text.
                asked = one is self._clients[-1] and not one.unasked.leaves_out
                one.pending += shown if asked else one.unasked.feed(shown)
                self._push(one)
        return len(data)

    def _push(self, one: Client) -> None:
        """Give a client what it takes."""
        try:
            one.push()
            one.catching_up = False
        except BlockingIOError:
            pass
        except OSError:
            self.leave(one)

    def _afresh(self, one: Client) -> None:
        one.behind, one.catching_up, one.since = False, True, None
        one.unasked = Unasked()
        one.pending[:] = self._scrollback.shown(afresh=True, unasked=one.unasked)
        if one is self._clients[-1]:
            one.pending += one.unasked.held()

    def _wait_for(self, one: Client) -> bool:
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

    def _fit_all(self, *, draw: bool = False) -> None:
        """Make the terminal as large as the smallest of theirs; `draw` lets what fills it draw itself."""
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

    def _aim(self) -> None:
        """Watch what there is something to do for."""
        if self._events is None:
            return
        wanted: dict[int, int] = {}
        if not self._ended:
            # Each is asked: it is noted since when it is waited for.
            held = [self._wait_for(one) for one in self._clients]
            if not any(held) and self._vacant is None:
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
