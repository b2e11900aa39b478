"""Connects the user's terminal with the program's.

The program has a pseudo-terminal that was made inside its sandbox. It gets
only the keys that the user types, and its output is copied to the user's
terminal. While it has the keyboard the user's terminal is raw: the line
discipline inside handles Ctrl-C, Ctrl-Z and the rest, since it knows the
program's process groups.

If stdout is not the terminal, or we are in the background, another process
may want the keyboard (`stockade run -- make | less`). Then the program begins
in the background of its own terminal: the kernel stops it when it tries to
read, the gate reports that, and only then do we take the keyboard.

A question to the user (`terminal_question`) takes the terminal from the program
until it is answered: its output waits, and its keys too.

When the program stops, by Ctrl-Z or otherwise, we restore the terminal and
stop with our job; `fg` and `bg` wake both. On every way out the terminal is
restored.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from stockade.gate import client
from stockade.result import NetworkQuestion
from stockade.runs.io.eventloop import Events
from stockade.runs.io.streams import CHUNK, TAIL
from stockade.runs.options import Answer
from stockade.runs.supervise import LEFT
from stockade.sessions.attach.terminal_flow import MOST_KEYS, Flow
from stockade.sessions.attach.terminal_modes import ABORT, Modes
from stockade.sessions.attach.terminal_question import TerminalQuestion

#: Ctrl-] TIMES times WITHIN seconds ends the run, whatever the program does with its keys.
WAY_OUT, TIMES, WITHIN = 0x1D, 3, 1.0
WAY_OUT_WORDS = "Ctrl-] three times"
#: How many seconds pass before we look again at a terminal that no process inside has open.
AGAIN = 0.1
#: A terminal answers queries in order: after its answer to a last query of ours, and SILENCE seconds, it has
#: answered all. NO_ANSWER is how long we wait for a terminal that does not answer, NO_END for one that does
#: not stop.
LAST_QUESTION, LAST_ANSWER, SILENCE, NO_ANSWER, NO_END = b"\x1b[5n", b"\x1b[0n", 0.1, 0.5, 5.0
#: How long a stalled terminal may delay the last output before Ctrl-C works again.
STALLED_SECONDS = 0.5
TERMINFO = ("/usr/share/terminfo", "/usr/lib/terminfo", "/lib/terminfo")
USUAL = "xterm-256color"
_KERNEL_TERMIOS = 36
_TIOCGDEV = 0x80045432
#: The index of the local modes in what `termios` returns.
LFLAG = 3
_BLOCKED = {getattr(signal, f"SIG{name}") for name in ("INT", "TERM", "HUP", "QUIT", "TTOU", "TSTP", "WINCH")}


def redirected() -> tuple[int, ...]:
    """Return which of stdout and stderr are not the terminal that stdin is."""
    ours = _device(0)
    return tuple(number for number in (1, 2) if _device(number) != ours)


def _device(descriptor: int) -> bytes | None:
    """Return the device number of the terminal, also if it was opened as /dev/tty."""
    try:
        return fcntl.ioctl(descriptor, _TIOCGDEV, bytes(4))
    except OSError:
        return None


class JobObserver(Protocol):
    """Passes the job's signals on to the program."""

    def signal(self, number: int, *, in_front: bool | None = None) -> None:
        """Signal the program, after moving it to the foreground or background of its terminal."""


class UserTerminal:
    """Looks after the terminal of one program; see `stockade.runs.io.streams.TerminalHandler`."""

    def __init__(self, until: float | None = None) -> None:
        #: Whether the user's terminal never took some of the output.
        self.lost = False
        #: Whether the user has typed the way out.
        self.left = False
        self._until = until
        self._apart = redirected()
        self._own: list[int] = []
        self._in = self._reopen(os.O_RDONLY)
        self._out = self._reopen(os.O_WRONLY)
        self._behind = 1 in self._apart or not self._in_front()
        self._modes = Modes()
        self._tail = b""
        self._saved: list[Any] | None = None
        #: When to check again whether a process inside has opened the program's terminal.
        self._vacant: float | None = None
        self._ending = self._unseen = False
        self._ways_out: list[float] = []
        self._channel: JobObserver | None = None
        self._events: Events | None = None
        self._handlers: dict[int, Any] = {}
        self._signals = -1
        self._woken = False
        #: Questions that wait, from another thread, what wakes the loop for them, and the one being asked.
        self._waiting: deque[TerminalQuestion] = deque()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._own.append(self._bell)
        self._asking: TerminalQuestion | None = None
        self._closed, self._lock = False, threading.Lock()

    def ask(self, question: NetworkQuestion) -> Answer:
        """Ask the user, from another thread than the loop's; the answer is no if that is not possible."""
        asked = TerminalQuestion(question)
        with self._lock:
            if self._closed:
                return "no"
            self._waiting.append(asked)
            os.eventfd_write(self._bell, 1)
        return asked.wait()

    def _reopen(self, way: int) -> int:
        """Open the user's terminal anew, so that O_NONBLOCK does not affect other processes.

        After `su` the terminal belongs to another user; then we use a copy of stdin.
        """
        try:
            descriptor = os.open("/proc/self/fd/0", way | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError:
            descriptor = os.dup(0)
        self._own.append(descriptor)
        return descriptor

    def fit(self, program: client.Program) -> client.Program:
        """Return the program with a terminal like the user's."""
        lines, columns = struct.unpack("HHHH", self._size())[:2]
        env = dict(program.env)
        for name in ("TERM", "COLORTERM"):
            if name in os.environ:
                env.setdefault(name, os.environ[name])
        if "TERMINFO" not in env and env.get("TERM") == os.environ.get("TERM"):
            env["TERM"] = _terminal_name(env.get("TERM", ""))
        return msgspec.structs.replace(
            program,
            env=env,
            size=(lines, columns),
            settings=fcntl.ioctl(self._in, termios.TCGETS, bytes(_KERNEL_TERMIOS)),
            apart=self._apart,
            behind=self._behind,
        )

    def connect(self, outer: int, channel: JobObserver, events: Events) -> None:
        """Connect the outer end of the program's terminal, and own it from now on."""
        self._own.append(outer)
        os.set_blocking(outer, False)
        self._own.append(writer := os.dup(outer))
        self._channel, self._events, self._outer, self._writer = channel, events, outer, writer
        self._screen = Flow(events, outer, self._out, self._see)
        self._keys = Flow(events, self._in, writer, self._watch_for_way_out, lossy=True)
        self._listen()
        self._resize()
        self._screen.read(True)
        if not self._behind:
            self._take_keyboard()
        events.watch(self._bell)

    def move(self, end: int) -> None:
        """Handle a descriptor that is ready: copy its data, or handle signals."""
        if end == self._signals:
            self._handle_signals()
        elif end == self._bell:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)
            self._ask_next()
        elif end == self._in and self._asking is not None:
            self._hear_answer(self._asking)
        elif end in (self._out, self._outer):
            self._show(end)
        elif end in (self._in, self._writer):
            self._hand_in(end)

    def _hand_in(self, end: int) -> None:
        try:
            going = self._keys.move(end)
        except OSError:  # no process inside has the program's terminal open
            self._keys.pending.clear()
            return
        if not going:
            self._hung_up()

    def _show(self, end: int) -> None:
        try:
            if not self._screen.move(end):
                # No process inside has it open, but one may open it again.
                self._vacant = time.monotonic() + AGAIN
                self._screen.read(False)
        except OSError:  # the user's terminal failed
            self._hung_up()

    def _hung_up(self) -> None:
        """Cancel the run because the user's terminal is gone, unless it is ending already."""
        self._drop()
        self._keys.read(False)
        if not self._ending:
            raise KeyboardInterrupt("the terminal was hung up")

    def patience(self) -> float | None:
        """Return the seconds until the next `look`: no event reports that a terminal is opened again."""
        times = [self._vacant, None if self._asking is None else self._asking.until]
        next_one = min((one for one in times if one is not None), default=None)
        return None if next_one is None else max(0.0, next_one - time.monotonic())

    def look(self) -> None:
        """Try to read again from a terminal that no process inside had open, and end a question in time."""
        if self._asking is not None and time.monotonic() >= self._asking.until:
            self._end_question()
        if self._vacant is not None and time.monotonic() >= self._vacant:
            self._vacant = None
            self._screen.read(self._asking is None)

    # A question

    def _ask_next(self) -> None:
        """Show the next question, if the keyboard is ours; nobody is asked in the background."""
        while self._waiting and self._asking is None:
            question = self._waiting.popleft()
            if question.settled:
                continue
            soon = time.monotonic() + STALLED_SECONDS
            if self._saved is None or self._ending or not self._in_front() or not self._flush(soon):
                question.settle("no")
                continue
            assert self._events is not None
            # What was typed until now is for the program.
            with contextlib.suppress(OSError):
                self._keys.drain(MOST_KEYS, hold=True)
            self._keys.read(False)
            self._screen.read(False)
            self._asking = question
            try:
                self._say(ABORT + self._modes.off(struct.unpack("HHHH", self._size())[0]))
                # The terminal may still be answering the program, with words that the program chose.
                self._discard_answers()
                self._say(b"\x1b[0m\r\n" + question.text())
                self._events.watch(self._in)
            except (OSError, termios.error):
                self._asking = None
                question.settle("no")
                self._hung_up()

    def _hear_answer(self, question: TerminalQuestion) -> None:
        try:
            data = os.read(self._in, CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._end_question()
            self._hung_up()
            return
        try:
            self._watch_for_way_out(data)
            with contextlib.suppress(OSError):
                self._say(question.feed(data))
        except KeyboardInterrupt:
            self._end_question()
            raise
        if question.settled:
            self._end_question()

    def _end_question(self) -> None:
        """Give the terminal back to the program."""
        question, self._asking = self._asking, None
        if question is None:
            return
        assert self._events is not None
        question.settle("no")
        with contextlib.suppress(OSError, ValueError):
            self._events.forget(self._in)
        with contextlib.suppress(OSError):
            self._say(b"\r" + self._modes.on())
        self._screen.read(self._vacant is None)
        if self._saved is not None:
            self._keys.read(True)
        self._redraw()
        self._ask_next()

    def _redraw(self) -> None:
        """Let a program that uses the whole screen draw it anew: it hears of a change of size."""
        if self._modes.alternate:
            with contextlib.suppress(OSError):
                lines, columns, *pixels = struct.unpack("HHHH", self._size())
                smaller = struct.pack("HHHH", max(1, lines - 1), columns, *pixels)
                fcntl.ioctl(self._outer, termios.TIOCSWINSZ, smaller)
            self._resize()

    def _refuse_questions(self) -> None:
        with self._lock:
            self._closed = True
        self._end_question()
        while self._waiting:
            self._waiting.popleft().settle("no")

    def stopped(self, number: int) -> None:
        """Handle a stop of the program: give it the terminal that it wants, or stop with it."""
        if self._channel is None:
            return
        wants = number in (signal.SIGTTIN, signal.SIGTTOU)
        if not (wants and self._saved is None and self._in_front()):
            with contextlib.suppress(OSError):
                self._screen.drain(LEFT)
            self._give_back_keyboard()
            really = self._stop(number if wants else signal.SIGTSTP)
            if wants and not really and not self._in_front():
                # An orphaned process group cannot come to the front, and the program would ask for ever.
                raise KeyboardInterrupt("the program wants a terminal that it cannot have")
        in_front = self._in_front()
        if in_front:
            self._take_keyboard()
        self._channel.signal(signal.SIGCONT, in_front=in_front)

    def _stop(self, number: int) -> bool:
        """Stop with the rest of our job, as the terminal's driver would; return whether that was possible."""
        self._woken = False
        handler = signal.signal(number, signal.SIG_DFL)
        os.kill(0, number)
        time.sleep(0)  # the handler of SIGCONT runs
        signal.signal(number, handler)
        return self._woken

    def rest(self) -> None:
        """Show the remaining output after the program's end. Ctrl-C gives up on a stalled terminal."""
        if self._channel is None:
            return
        self._refuse_questions()
        with contextlib.suppress(OSError):  # hung up
            self._screen.drain(LEFT, hold=True)
            soon = time.monotonic() + STALLED_SECONDS
            if self._flush(soon if self._until is None else min(soon, self._until)):
                return
            self._hear_ctrl_c()
            self.lost = not self._flush(self._until)

    def tail(self) -> bytes:
        """Return the end of what the program printed."""
        return self._tail

    def _see(self, data: bytes) -> None:
        self._modes.see(data)
        self._tail = (self._tail + data[-TAIL:])[-TAIL:]

    def _flush(self, until: float | None) -> bool:
        while self._screen.pending:
            patience = None if until is None else max(0.0, until - time.monotonic())
            if not select.select([], [self._out], [], patience)[1]:
                return False
            self._screen.push()
        return True

    def end(self) -> None:
        """Note that the run is being ended."""
        self._ending = True
        self._end_question()

    def drop(self) -> None:
        """Discard all further output."""
        if self._channel is not None:
            self._drop()

    def _drop(self) -> None:
        if self._screen.pending:  # the terminal may be in the middle of a sequence
            self._unseen = True
        self._screen.drop()

    def close(self) -> None:
        """Restore the terminal and close our descriptors."""
        with _signals_blocked():
            self._refuse_questions()
            if self._channel is not None:
                self._tidy_up()
            self._channel = None
            while self._own:
                os.close(self._own.pop())

    def _tidy_up(self) -> None:
        off = b""
        if self._unseen or self._screen.pending:
            off = ABORT
            self._modes.doubt()
        self._screen.close()
        self._keys.close()
        with contextlib.suppress(OSError):
            off += self._modes.off(struct.unpack("HHHH", self._size())[0])
            if off and self._in_front():
                self._say(off)
        if self._saved is not None and (off or self._modes.asked):
            with contextlib.suppress(OSError, termios.error):  # hung up
                self._discard_answers()
        self._give_back_keyboard()
        self._stop_listening()

    def _discard_answers(self) -> None:
        """Discard the terminal's answers to the program: they must not become the user's next command."""
        self._say(LAST_QUESTION)
        end, heard, answers = time.monotonic() + NO_END, b"", 0
        while (left := end - time.monotonic()) > 0:
            # The program may have sent the same query, with more answers to come after that one.
            silence = SILENCE if answers > self._modes.statuses else NO_ANSWER
            if not select.select([self._in], [], [], min(silence, left))[0]:
                break
            if not (data := os.read(self._in, CHUNK)):
                break
            heard += data
            answers += heard.count(LAST_ANSWER)
            heard = heard[1 - len(LAST_ANSWER) :]
        termios.tcflush(self._in, termios.TCIFLUSH)

    def _say(self, data: bytes) -> None:
        """Show data of our own. A stalled terminal gets a moment."""
        self._screen.pending += data
        self._flush(time.monotonic() + STALLED_SECONDS)

    # The user's terminal

    def _in_front(self) -> bool:
        """Whether we may read the user's terminal: we have its foreground, or it controls no session."""
        try:
            return os.tcgetpgrp(self._in) == os.getpgrp()
        except OSError:
            return True

    def _take_keyboard(self) -> None:
        """Give the keyboard to the program from now on."""
        try:
            if self._saved is None:
                self._saved = termios.tcgetattr(self._in)
            termios.tcsetattr(self._in, termios.TCSANOW, _raw(self._saved))
        except termios.error:
            self._hung_up()
            return
        self._resize()
        self._keys.read(self._asking is None)

    def _hear_ctrl_c(self) -> None:
        """Stop reading keys, so that Ctrl-C interrupts us; output still passes unchanged."""
        if self._saved is not None:
            self._keys.read(False)
            settings = _raw(self._saved)
            settings[LFLAG] |= termios.ISIG
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._in, termios.TCSANOW, settings)

    def _give_back_keyboard(self) -> None:
        """Stop reading keys, and restore the terminal's settings."""
        self._end_question()
        if self._saved is None:
            return
        self._keys.read(False)
        saved, self._saved = self._saved, None
        with _signals_blocked(), contextlib.suppress(termios.error, OSError):  # hung up
            termios.tcsetattr(self._in, termios.TCSANOW, saved)

    def _watch_for_way_out(self, data: bytes) -> None:
        # Allow other keys in between: a program can make the terminal answer without pause.
        if count := data.count(WAY_OUT):
            now = time.monotonic()
            self._ways_out = [then for then in self._ways_out if now - then < WITHIN] + [now] * count
            if len(self._ways_out) >= TIMES:
                self.left = True
                raise KeyboardInterrupt(WAY_OUT_WORDS)

    def _size(self) -> bytes:
        return fcntl.ioctl(self._in, termios.TIOCGWINSZ, bytes(8))

    def _resize(self) -> None:
        with contextlib.suppress(OSError):  # hung up
            fcntl.ioctl(self._outer, termios.TIOCSWINSZ, self._size())

    # Signals: their numbers arrive in a pipe, and the event loop handles them

    def _listen(self) -> None:
        assert self._events is not None
        self._signals, writer = os.pipe()
        self._own += [self._signals, writer]
        os.set_blocking(self._signals, False)
        os.set_blocking(writer, False)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        for number in (signal.SIGWINCH, signal.SIGCONT, signal.SIGTSTP):
            self._handlers[number] = signal.signal(number, self._note_signal)
        # By default it would kill us with the terminal still raw.
        self._handlers[signal.SIGQUIT] = signal.signal(signal.SIGQUIT, signal.default_int_handler)
        self._events.watch(self._signals)

    def _stop_listening(self) -> None:
        if self._signals >= 0 and self._events is not None:
            self._events.forget(self._signals)
            self._events.forget(self._bell)
            signal.set_wakeup_fd(-1)
            self._signals = -1
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers.clear()

    def _note_signal(self, number: int, _: object) -> None:
        self._woken |= number == signal.SIGCONT

    def _handle_signals(self) -> None:
        assert self._channel is not None
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(self._signals, 4096)
            if signal.SIGTSTP in numbers:
                # The program decides whether it stops; if it does, we stop too.
                self._channel.signal(signal.SIGTSTP)
            if signal.SIGCONT in numbers and self._saved is not None:
                self._resume()
            if signal.SIGWINCH in numbers:
                self._resize()

    def _resume(self) -> None:
        """Recover from a SIGSTOP, during which the shell has taken the terminal."""
        assert self._channel is not None
        if self._in_front():
            self._take_keyboard()
        else:
            self._saved = None
            self._keys.read(False)
            self._channel.signal(signal.SIGCONT, in_front=False)


@contextlib.contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block signals, so that none interrupts a restoration; SIGTTOU would stop one in the background."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _raw(settings: list[Any]) -> list[Any]:
    """Return raw settings, as by cfmakeraw."""
    iflag, oflag, cflag, lflag, ispeed, ospeed, keys = settings
    t = termios
    iflag &= ~(
        t.IGNBRK | t.BRKINT | t.PARMRK | t.ISTRIP | t.INLCR | t.IGNCR | t.ICRNL | t.IXON | t.IXOFF | t.IXANY
    )
    oflag &= ~t.OPOST
    lflag &= ~(t.ECHO | t.ECHONL | t.ICANON | t.ISIG | t.IEXTEN)
    cflag = cflag & ~(t.CSIZE | t.PARENB) | t.CS8
    return [iflag, oflag, cflag, lflag, ispeed, ospeed, [*keys[: t.VTIME], 0, 1, *keys[t.VMIN + 1 :]]]


def _terminal_name(name: str) -> str:
    """Return the terminal's name if the system's terminfo has it, or else that of a common terminal."""
    known = any(
        os.path.exists(f"{place}/{letter}/{name}")
        for place in TERMINFO
        for letter in (name[:1], f"{ord(name[0]):x}" if name else "")
    )
    return name if known or name == "dumb" else USUAL
