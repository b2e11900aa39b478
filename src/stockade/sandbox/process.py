"""`Process`: a command that was started and goes on by itself."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import os
import signal as signals
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from stockade.errors import PolicyError, SetupError, TimeoutError
from stockade.gate import client
from stockade.sandbox import scarce
from stockade.sandbox.launch import Box, died
from stockade.sandbox.result import Result
from stockade.sandbox.steps import Events, Steps, drive
from stockade.sandbox.streams import empty_input
from stockade.sandbox.supervise import GRACE, LAST_WORDS, Ended, Watch

if TYPE_CHECKING:
    from stockade.live.background import Background
    from stockade.live.interpreter import Interpreter
    from stockade.live.shell import Shell
    from stockade.receipt.statement import Who
    from stockade.sandbox.launch import Prepared
    from stockade.sandbox.sandbox import Sandbox

#: The numbers of `subprocess`, which is slow to import.
PIPE, STDOUT, DEVNULL = -1, -2, -3


class Parts(msgspec.Struct, frozen=True):
    """What a started program leaves in our hands: descriptors for its streams, and who attends to it."""

    watch: Watch
    pid: int
    #: Of stdin, stdout and stderr, -1 where there is none; on a terminal the first two are one.
    streams: tuple[int, int, int]
    terminal: bool
    #: Of the gate, which its sandbox may have let go of.
    gate: int
    #: The refusal, where nothing was started.
    refused: client.Reply | None = None


def starting(
    box: Box,
    program: client.Program,
    stdio: tuple[int | None, int | None, int | None],
    pty: bool | tuple[int, int],
    events: Events,
) -> Steps[Parts]:
    """Start a program and wait until it is there."""
    with scarce.refused():
        size = pty if isinstance(pty, tuple) else program.size
        program = msgspec.structs.replace(program, tell=True, size=size)
        watch = Watch(box, program, events)
        ours, theirs = ([-1, -1, -1], ()) if pty else _pipes(*stdio)
        try:
            watch.start(theirs, kept=True)
        except BaseException:
            _close(*ours)
            raise
        finally:
            _close(*set(theirs))
        try:
            while True:
                yield None
                if watch.channel.fileno() not in events.ready:
                    continue
                reply = watch.channel.receive()
                if reply is not None and reply.kind == client.TERMINAL:
                    (ours[0],) = reply.descriptors
                    ours[1] = os.dup(ours[0])
                elif reply is not None and reply.kind == client.STARTED:
                    return Parts(watch, reply.pid, (ours[0], ours[1], ours[2]), bool(pty), os.dup(box.pidfd))
                else:
                    return Parts(
                        watch, 0, (ours[0], ours[1], ours[2]), bool(pty), os.dup(box.pidfd), reply or GONE
                    )
        except BaseException:
            watch.close()
            watch.channel.end(0)
            watch.channel.close()
            _close(*ours)
            raise
        finally:
            watch.close()


GONE = client.Reply(
    kind=client.EXEC_FAILED, operation="plan", error=0, status=0, index=0, ended=0, user=0, system=0, peak=0,
    switches=0, text="gate", pid=0, descriptors=(),
)  # fmt: skip


def _pipes(stdin: int | None, stdout: int | None, stderr: int | None) -> tuple[list[int], tuple[int, ...]]:
    """Our ends and the program's."""
    known = (None, PIPE, DEVNULL)
    for name, given in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        if given not in known and (name, given) != ("stderr", STDOUT):
            raise PolicyError(
                f"{name}={given!r}: a descriptor of the host is not handed in",
                hint="use PIPE and copy, or DEVNULL",
            )
    ours, theirs = [-1, -1, -1], [-1, -1, -1]
    try:
        if stdin == PIPE:
            theirs[0], ours[0] = os.pipe()
        else:
            theirs[0] = empty_input()
        for number, given in ((1, stdout), (2, stderr)):
            if given == STDOUT:
                theirs[2] = os.dup(theirs[1])
            else:
                ours[number], theirs[number] = os.pipe()
                if given != PIPE:
                    _close(ours[number])
                    ours[number] = -1
    except BaseException:
        _close(*ours, *theirs)
        raise
    return ours, tuple(theirs)


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        if descriptor >= 0:
            os.close(descriptor)


class Started:
    """What `Process` and `AsyncProcess` share: everything but the waiting and the streams.

    `judged` makes the result; `abandoned` is called instead where nobody has waited for it.
    """

    def __init__(
        self, parts: Parts, judged: Callable[[Ended], Result], abandoned: Callable[[], None]
    ) -> None:
        self._watch = parts.watch
        self._channel: client.Channel | None = parts.watch.channel
        self._judged = judged
        self._abandoned = abandoned
        self._result: Result | None = None
        self._gate = parts.gate
        self._closed = False
        self._owner = os.getpid()
        self._terminal = parts.streams[0] if parts.terminal else -1
        #: The number of the program's first process on the host.
        self.pid = parts.pid
        if parts.refused is not None:
            self._finish(Ended(reply=parts.refused, wall=0))

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if (channel := self._channel) is not None:
            channel.signal(signals.Signals(number))

    def kill(self, grace: float | None = None) -> None:
        """Ask every process of it to end, and kill what is left after the grace (that of its start, or 0)."""
        if (channel := self._channel) is not None:
            channel.end(self._watch.program.grace if grace is None else grace)

    def pause(self) -> None:
        """Stop every process of it until `resume`. Its time limit goes on."""
        if (channel := self._channel) is not None:
            channel.signal(signals.SIGSTOP, everything=True)

    def resume(self) -> None:
        """Let it go on."""
        if (channel := self._channel) is not None:
            channel.signal(signals.SIGCONT, everything=True)

    def resize(self, lines: int, columns: int) -> None:
        """Tell the program's terminal its new size."""
        if self._terminal < 0:
            raise SetupError("the process has no terminal", stage="terminal", hint="start it with pty=True")
        size = struct.pack("HHHH", lines, columns, 0, 0)
        import termios

        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def _waiting(self, events: Events, timeout: float | None, began: float) -> Steps[Result]:
        until = None if timeout is None else began + timeout
        if self._result is not None:
            return self._result
        if self._channel is None:
            raise closed()
        events.watch(self._channel.fileno())
        while True:
            yield None if until is None else max(0.0, until - time.monotonic())
            if events.ready:
                reply = self._channel.receive()
                if reply is None or reply.kind in LAST_WORDS:
                    events.forget(self._channel.fileno())
                    if self._closed:
                        raise closed()
                    wall = self._watch.took(reply)
                    gate_died = reply is None and (yield from died(self._gate, events))
                    if gate_died:
                        reply = self._watch.box.last_words()
                    ooms = self._watch.ooms
                    return self._finish(Ended(reply=reply, wall=wall, gate_died=gate_died, ooms=ooms))
            elif until is not None and time.monotonic() >= until:
                raise late(timeout)

    def _finish(self, ended: Ended) -> Result:
        self._result = self._judged(ended)
        self._let_go()
        return self._result

    def _hang_up(self) -> bool:
        """Whoever waits for it stops. Not for a forked child to do: it only lets go of its copy."""
        self._closed = True
        if self._owner != os.getpid():
            return False
        if (channel := self._channel) is not None:
            channel.hang_up()
        return True

    def _let_go(self) -> None:
        """Whoever attends to it ends what still runs when nobody listens any more."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
            os.close(self._gate)
            if self._result is None and self._owner == os.getpid() and not sys.is_finalizing():
                self._abandoned()


class Process(Started):
    """A command that runs in a living sandbox.

    >>> import stockade, subprocess
    >>> with stockade.Sandbox() as box:
    ...     process = box.start(["tr", "a-z", "A-Z"], stdin=subprocess.PIPE)
    ...     process.stdin.write(b"loud\\n"), process.stdin.close()
    ...     process.stdout.read(), process.wait().ok
    (5, None)
    (b'LOUD\\n', True)

    Its time limit holds whether or not anybody waits. When it is closed, collected or left by `with`,
    what still runs of it is ended.
    """

    def __init__(
        self, parts: Parts, judged: Callable[[Ended], Result], abandoned: Callable[[], None]
    ) -> None:
        super().__init__(parts, judged, abandoned)
        self._lock = threading.Lock()
        stdin, stdout, stderr = parts.streams
        self.stdin = io.FileIO(stdin, "wb") if stdin >= 0 else None
        self.stdout = _reader(stdout, parts.terminal)
        self.stderr = _reader(stderr, False)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_channel", None) is not None:
            self.close()

    def wait(self, timeout: float | None = None) -> Result:
        """How it ended, once it has. A `TimeoutError` after the timeout leaves it running."""
        began = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise late(timeout)
        try:
            with Events() as events:
                return drive(self._waiting(events, timeout, began), events)
        finally:
            self._lock.release()

    def poll(self) -> Result | None:
        """How it ended, or None while it runs."""
        with contextlib.suppress(TimeoutError):
            return self.wait(0)
        return None

    def close(self) -> None:
        """End what still runs of it, and close its streams."""
        with self._lock if self._hang_up() else contextlib.nullcontext():
            self._let_go()
        self._terminal = -1
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Used:
    """A `Sandbox` for the time of one call: it is not closed meanwhile."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    def __enter__(self) -> tuple[Box, Prepared]:
        with self._sandbox._quiet:
            opened = self._sandbox._opened()
            self._sandbox._using += 1
        return opened

    def __exit__(self, *_: object) -> None:
        with self._sandbox._quiet:
            self._sandbox._using -= 1
            self._sandbox._quiet.notify_all()


class Opening:
    """What else a `Sandbox` opens: things that live longer than one command."""

    def shell(self, *, first: bool = False) -> Shell:
        """One bash for many runs: directory, variables and functions stay. It starts with the first.

        With `first` it is process 2, the first one after the gate: nothing else may have been run before.
        """
        from stockade.live.shell import Shell

        return Shell(cast("Sandbox", self), first=first)

    def python(
        self, *, preload: Iterable[str] = (), executable: str = "python3", ipython: bool | None = None
    ) -> Interpreter:
        """One Python for many runs: its variables stay. It starts with the first, and imports `preload`.

        IPython's shell runs the code where that is installed inside, or as `ipython` says.
        """
        from stockade.live.interpreter import Interpreter

        return Interpreter(cast("Sandbox", self), preload, executable, ipython)

    def background(
        self,
        cmd: Sequence[str],
        *,
        input: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        timeout: float | None = None,
        grace: float = GRACE,
        who: Who | Mapping[str, str] | None = None,
    ) -> Background:
        """Start a command whose output is kept aside, outside, to be read from any byte on."""
        from stockade.live.background import Background

        return Background(
            cast("Sandbox", self), cmd, input=input, env=env, cwd=cwd, timeout=timeout, grace=grace, who=who
        )


def closed() -> SetupError:
    """Nobody can say any more how it ended."""
    return SetupError("the process was closed", stage="process")


def late(timeout: float | None) -> TimeoutError:
    """It has not ended in time, and goes on."""
    return TimeoutError(f"it still runs after {timeout:g} s", hint="wait longer, or kill() it")


def _reader(descriptor: int, terminal: bool) -> io.BufferedReader | None:
    if descriptor < 0:
        return None
    return io.BufferedReader(_Screen(descriptor) if terminal else io.FileIO(descriptor))


class _Screen(io.RawIOBase):
    """The outer end of a terminal. When its last user has gone, the kernel says EIO instead of the end."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def readinto(self, buffer: Any) -> int:
        try:
            return os.readv(self._descriptor, [buffer])
        except OSError as error:
            if error.errno == errno.EIO:
                return 0
            raise

    def close(self) -> None:
        if not self.closed:
            os.close(self._descriptor)
        super().close()
