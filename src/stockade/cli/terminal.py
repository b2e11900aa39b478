"""The user's terminal and the program's, connected.

The program has a pseudo-terminal that was made inside its sandbox; of the
user's it gets nothing but the keys that are typed, and what it shows is
copied out. While it has the keyboard the user's terminal is raw: Ctrl-C,
Ctrl-Z and the rest are for the line discipline inside, which knows whose
they are.

If stdout is not the terminal, or we are in the background, the keyboard may
be wanted by others (`stockade run -- make | less`). Then the program begins
in the background of its own terminal: the kernel stops it when it wants to
read, the gate says so, and only then is the keyboard taken.

A program that is stopped, by Ctrl-Z or otherwise, stops us and our job, with
the terminal as it was; `fg` and `bg` wake both. On every way out the terminal
is put back as it was found.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec

from stockade.gate import client
from stockade.live.modes import CANCEL, Modes
from stockade.sandbox.steps import READABLE, WRITABLE, Events
from stockade.sandbox.streams import CHUNK
from stockade.sandbox.supervise import LEFT

#: As many bytes are held back for a terminal that takes nothing; then the program waits.
MOST = 1 << 16
#: And of keys for a program that reads none. What comes then is lost, since the way out must always be heard.
MOST_KEYS = 4 << 20
#: Ctrl-] this often within so many seconds ends the run, whatever the program does with its keys.
WAY_OUT, TIMES, WITHIN = 0x1D, 3, 1.0
WAY_OUT_WORDS = "Ctrl-] three times"
#: How often a terminal that nobody has open inside is looked at again.
AGAIN = 0.1
#: A terminal answers what it is asked in turn: after a last question of ours, and this much silence, it has
#: answered all. So long it is given at most if it does not answer, and if it does not stop.
LAST_QUESTION, LAST_ANSWER, SILENCE, NO_ANSWER, NO_END = b"\x1b[5n", b"\x1b[0n", 0.1, 0.5, 5.0
#: What was asked before that has been answered long since.
RECENT = 5.0
#: How long the last words may take at a terminal that takes nothing, before Ctrl-C works again.
STALLED_SECONDS = 0.5
TERMINFO = ("/usr/share/terminfo", "/usr/lib/terminfo", "/lib/terminfo")
USUAL = "xterm-256color"
_KERNEL_TERMIOS = 36
_TIOCGDEV = 0x80045432
#: Where `termios` has the local modes.
LFLAG = 3
_HELD = {getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "TTOU", "TSTP", "WINCH")}


def apart() -> tuple[int, ...]:
    """Which of stdout and stderr are not the terminal that stdin is."""
    ours = _device(0)
    return tuple(number for number in (1, 2) if _device(number) != ours)


def _device(descriptor: int) -> bytes | None:
    """The number of the terminal, also where it was opened as /dev/tty."""
    try:
        return fcntl.ioctl(descriptor, _TIOCGDEV, bytes(4))
    except OSError:
        return None


class Told(Protocol):
    """Whoever is told what becomes of the job: the one who attends to the program."""

    def signal(self, number: int, *, in_front: bool | None = None) -> None:
        """Signal the program; first give it the foreground of its terminal, or take it away."""


class Terminal:
    """Looks after the terminal of one program; see `stockade.sandbox.streams.Terminal`."""

    def __init__(self, until: float | None = None) -> None:
        #: Whether some output was never taken by the user's terminal.
        self.lost = False
        self._until = until
        self._apart = apart()
        self._own: list[int] = []
        self._in = self._reopened(os.O_RDONLY)
        self._out = self._reopened(os.O_WRONLY)
        self._behind = 1 in self._apart or not self._in_front()
        self._modes = Modes()
        self._saved: list[Any] | None = None
        #: When to see again whether anybody has the program's terminal open.
        self._vacant: float | None = None
        self._ending = self._unseen = False
        self._ways_out: list[float] = []
        self._channel: Told | None = None
        self._events: Events | None = None
        self._handlers: dict[int, Any] = {}
        self._signals = -1
        self._woken = False

    def _reopened(self, way: int) -> int:
        """The user's terminal for us alone: that we do not block on it must not concern others.

        After `su` it belongs to somebody else; then a copy of stdin has to do.
        """
        try:
            found = os.open("/proc/self/fd/0", way | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            found = os.dup(0)
        self._own.append(found)
        return found

    def fit(self, program: client.Program) -> client.Program:
        """The program, with a terminal like the user's."""
        lines, columns = struct.unpack("HHHH", self._size())[:2]
        env = dict(program.env)
        for name in ("TERM", "COLORTERM"):
            if name in os.environ:
                env.setdefault(name, os.environ[name])
        if "TERMINFO" not in env and env.get("TERM") == os.environ.get("TERM"):
            env["TERM"] = _described(env.get("TERM", ""))
        return msgspec.structs.replace(
            program,
            env=env,
            size=(lines, columns),
            settings=fcntl.ioctl(self._in, termios.TCGETS, bytes(_KERNEL_TERMIOS)),
            apart=self._apart,
            behind=self._behind,
        )

    def connect(self, outer: int, channel: Told, events: Events) -> None:
        """Take over the outer end of the program's terminal."""
        self._own.append(outer)
        os.set_blocking(outer, False)
        self._own.append(writer := os.dup(outer))
        self._channel, self._events, self._outer, self._writer = channel, events, outer, writer
        self._screen = _Flow(events, outer, self._out, self._modes.see)
        self._keys = _Flow(events, self._in, writer, self._typed, lossy=True)
        self._listen()
        self._resize()
        self._screen.read(True)
        if not self._behind:
            self._take()

    def move(self, end: int) -> None:
        """Copy what there is to copy."""
        if end == self._signals:
            self._hear()
        elif end in (self._out, self._outer):
            self._show(end)
        elif end in (self._in, self._writer):
            self._hand_in(end)

    def _hand_in(self, end: int) -> None:
        try:
            going = self._keys.move(end)
        except OSError:  # of the program's terminal, which nobody has open
            self._keys.pending.clear()
            return
        if not going:
            self._hung_up()

    def _show(self, end: int) -> None:
        try:
            if not self._screen.move(end):
                # Nobody has it open; a process inside may open it again.
                self._vacant = time.monotonic() + AGAIN
                self._screen.read(False)
        except OSError:  # of the user's terminal
            self._hung_up()

    def _hung_up(self) -> None:
        """The user's terminal is gone: the run is to end, unless that is on its way."""
        self._drop()
        self._keys.read(False)
        if not self._ending:
            raise KeyboardInterrupt("the terminal was hung up")

    def patience(self) -> float | None:
        """Nothing tells when a terminal is opened again."""
        return None if self._vacant is None else max(0.0, self._vacant - time.monotonic())

    def look(self) -> None:
        """See whether anybody has opened it."""
        if self._vacant is not None and time.monotonic() >= self._vacant:
            self._vacant = None
            self._screen.read(True)

    def stopped(self, number: int) -> None:
        """The program was stopped: it wants the terminal and does not have it, or it is to wait."""
        if self._channel is None:
            return
        wants = number in (signal.SIGTTIN, signal.SIGTTOU)
        if not (wants and self._saved is None and self._in_front()):
            with contextlib.suppress(OSError):
                self._screen.drain(LEFT)
            self._leave()
            really = self._stop(number if wants else signal.SIGTSTP)
            if wants and not really and not self._in_front():
                # Nobody could ever bring us to the front, and the program would ask for ever.
                raise KeyboardInterrupt("the program wants a terminal that it cannot have")
        in_front = self._in_front()
        if in_front:
            self._take()
        self._channel.signal(signal.SIGCONT, in_front=in_front)

    def _stop(self, number: int) -> bool:
        """Stop with the rest of our job, as the terminal's driver would do it. Whether that was possible."""
        self._woken = False
        handler = signal.signal(number, signal.SIG_DFL)
        os.kill(0, number)
        time.sleep(0)  # the handler of SIGCONT runs
        signal.signal(number, handler)
        return self._woken

    def rest(self) -> None:
        """Show what was left when the program ended. A terminal that takes nothing can be left by Ctrl-C."""
        if self._channel is None:
            return
        with contextlib.suppress(OSError):  # hung up: nobody sees it
            self._screen.drain(LEFT, hold=True)
            soon = time.monotonic() + STALLED_SECONDS
            if self._flush(soon if self._until is None else min(soon, self._until)):
                return
            self._hear_ctrl_c()
            self.lost = not self._flush(self._until)

    def _flush(self, until: float | None) -> bool:
        while self._screen.pending:
            patience = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([], [self._out], [], patience)[1]:
                return False
            self._screen.push()
        return True

    def end(self) -> None:
        """The run is being ended."""
        self._ending = True

    def drop(self) -> None:
        """Show nothing more."""
        if self._channel is not None:
            self._drop()

    def _drop(self) -> None:
        if self._screen.pending:  # the terminal may be in the middle of a sequence
            self._unseen = True
        self._screen.drop()

    def close(self) -> None:
        """Put everything back as it was found."""
        with _undisturbed():
            if self._channel is not None:
                self._tidy_up()
            self._channel = None
            while self._own:
                os.close(self._own.pop())

    def _tidy_up(self) -> None:
        off = b""
        if self._unseen or self._screen.pending:
            off = CANCEL
            self._modes.doubt()
        self._screen.close()
        self._keys.close()
        with contextlib.suppress(OSError):
            off += self._modes.off(struct.unpack("HHHH", self._size())[0])
            if off and self._in_front():
                self._say(off)
        asked = self._modes.asked is not None and time.monotonic() - self._modes.asked < RECENT
        if self._saved is not None and (off or asked):
            with contextlib.suppress(OSError, termios.error):  # hung up
                self._hear_out()
        self._leave()
        self._stop_listening()

    def _hear_out(self) -> None:
        """What the terminal tells a program that has ended must not become the user's next command."""
        self._say(LAST_QUESTION)
        end, heard, answers = time.monotonic() + NO_END, b"", 0
        while (left := end - time.monotonic()) > 0:
            # The program may have asked the same, and the terminal still have much to say after that.
            silence = SILENCE if answers > self._modes.statuses else NO_ANSWER
            if not select.select([self._in], [], [], min(silence, left))[0]:
                break
            if not (data := os.read(self._in, CHUNK)):
                break
            heard += data
            answers += heard.count(LAST_ANSWER)
            heard = heard[1 - len(LAST_ANSWER) :]
        termios.tcflush(self._in, termios.TCIFLUSH)

    def _say(self, words: bytes) -> None:
        """Show words of ours. A terminal that takes nothing is given a moment."""
        self._screen.pending += words
        self._flush(time.monotonic() + STALLED_SECONDS)

    # The user's terminal

    def _in_front(self) -> bool:
        """Whether the user's terminal is ours to read; one that controls nobody's jobs is anybody's."""
        try:
            return os.tcgetpgrp(self._in) == os.getpgrp()
        except OSError:
            return True

    def _take(self) -> None:
        """From now on the keys are the program's."""
        try:
            if self._saved is None:
                self._saved = termios.tcgetattr(self._in)
            termios.tcsetattr(self._in, termios.TCSANOW, _raw(self._saved))
        except termios.error:
            self._hung_up()
            return
        self._resize()
        self._keys.read(True)

    def _hear_ctrl_c(self) -> None:
        """The keys are nobody's any more, and Ctrl-C is for us; what is shown still passes as it is."""
        if self._saved is not None:
            self._keys.read(False)
            settings = _raw(self._saved)
            settings[LFLAG] |= termios.ISIG
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, settings)

    def _leave(self) -> None:
        """Give the keyboard back as it was."""
        if self._saved is None:
            return
        self._keys.read(False)
        saved, self._saved = self._saved, None
        with _undisturbed(), contextlib.suppress(termios.error, OSError):  # hung up
            termios.tcsetattr(self._in, termios.TCSANOW, saved)

    def _typed(self, data: bytes) -> None:
        # Other keys may come in between: a program can make the terminal answer without pause.
        if count := data.count(WAY_OUT):
            now = time.monotonic()
            self._ways_out = [then for then in self._ways_out if now - then < WITHIN] + [now] * count
            if len(self._ways_out) >= TIMES:
                raise KeyboardInterrupt(WAY_OUT_WORDS)

    def _size(self) -> bytes:
        return fcntl.ioctl(self._in, termios.TIOCGWINSZ, bytes(8))

    def _resize(self) -> None:
        with contextlib.suppress(OSError):  # hung up
            fcntl.ioctl(self._outer, termios.TIOCSWINSZ, self._size())

    # Signals: their numbers arrive in a pipe, and are dealt with between other things

    def _listen(self) -> None:
        assert self._events is not None
        self._signals, writer = os.pipe()
        self._own += [self._signals, writer]
        os.set_blocking(self._signals, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP):
            self._handlers[number] = signal.signal(number, self._note)
        # It would end us with the terminal as it is.
        self._handlers[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, signal.default_int_handler)
        self._events.watch(self._signals)

    def _stop_listening(self) -> None:
        if self._signals >= 0 and self._events is not None:
            self._events.forget(self._signals)
            signal.set_wakeup_fd(-1)
            self._signals = -1
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note(self, number: int, _: object) -> None:
        self._woken |= number == signal.SIGCONT

    def _hear(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(BlockingIOError):
            heard = os.read(self._signals, 4096)
            if signal.SIGTSTP in heard:
                # Whether it stops is the program's to say; if it does, we do.
                self._channel.signal(signal.SIGTSTP)
            if signal.SIGCONT in heard and self._saved is not None:
                self._come_back()
            if signal.SIGWINCH in heard:
                self._resize()

    def _come_back(self) -> None:
        """Somebody stopped us without asking, and the shell has taken the terminal meanwhile."""
        assert self._channel is not None
        if self._in_front():
            self._take()
        else:
            self._saved = None
            self._keys.read(False)
            self._channel.signal(signal.SIGCONT, in_front=False)


class _Flow:
    """Copies what one descriptor yields to another that may be slow, and holds little in between."""

    def __init__(
        self,
        events: Events,
        source: int,
        sink: int,
        seen: Callable[[bytes], None],
        *,
        lossy: bool = False,
    ) -> None:
        self.pending = bytearray()
        self._lossy = lossy
        self._events, self._source, self._sink, self._seen = events, source, sink, seen
        self._watched: set[int] = set()
        self._reading = self._dropping = False

    def read(self, wanted: bool) -> None:
        """Whether the source is to be read."""
        self._reading = wanted
        self._aim()

    def move(self, end: int) -> bool:
        """Read or write; False when the source has ended."""
        going = True
        if end == self._source and end in self._watched:
            going = self._pull() is not None
        self.push()
        self._aim()
        return going

    def drain(self, most: int, *, hold: bool = False) -> None:
        """Copy what there is; all that the sink does not take is held only if that is wished."""
        while most > 0 and (hold or len(self.pending) < MOST) and (got := self._pull()):
            most -= got
            self.push()

    def push(self) -> None:
        """Write what the sink takes."""
        try:
            while self.pending:
                del self.pending[: os.write(self._sink, self.pending[:CHUNK])]
        except BlockingIOError:
            pass

    def drop(self) -> None:
        """From now on everything that is read goes nowhere."""
        self._dropping = True
        self.pending.clear()
        self._aim()

    def close(self) -> None:
        self._reading = False
        self.pending.clear()
        self._aim()

    def _pull(self) -> int | None:
        """How much there was; None at the end, which the kernel calls EIO at a terminal."""
        try:
            data = os.read(self._source, CHUNK)
        except BlockingIOError:
            return 0
        except OSError:
            return None
        if not data:
            return None
        if not self._dropping:
            self._seen(data)
            if not self._lossy or len(self.pending) < MOST_KEYS:
                self.pending += data
        return len(data)

    def _aim(self) -> None:
        room = self._lossy or len(self.pending) < MOST
        wanted = {self._source: READABLE} if self._reading and room else {}
        if self.pending:
            wanted[self._sink] = WRITABLE
        for end in self._watched - wanted.keys():
            self._events.forget(end)
        for end in wanted.keys() - self._watched:
            self._events.watch(end, wanted[end])
        self._watched = set(wanted)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No signal comes between: half a restoration would be none. SIGTTOU would stop one in the background."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raw(settings: list[Any]) -> list[Any]:
    """The settings of a terminal that hands everything on as it comes (cfmakeraw)."""
    iflag, oflag, cflag, lflag, ispeed, ospeed, keys = settings
    t = termios
    iflag &= ~(
        t.IGNBRK | t.BRKINT | t.PARMRK | t.ISTRIP | t.INLCR | t.IGNCR | t.ICRNL | t.IXON | t.IXOFF | t.IXANY
    )
    oflag &= ~t.OPOST
    lflag &= ~(t.ECHO | t.ECHONL | t.ICANON | t.ISIG | t.IEXTEN)
    cflag = cflag & ~(t.CSIZE | t.PARENB) | t.CS8
    return [iflag, oflag, cflag, lflag, ispeed, ospeed, [*keys[: t.VTIME], 0, 1, *keys[t.VMIN + 1 :]]]


def _described(name: str) -> str:
    """The name of the terminal, or of a usual one if no description of it is among the system's files."""
    known = any(
        os.path.exists(f"{place}/{letter}/{name}")
        for place in TERMINFO
        for letter in (name[:1], f"{ord(name[0]):x}" if name else "")
    )
    return name if known or name == "dumb" else USUAL
