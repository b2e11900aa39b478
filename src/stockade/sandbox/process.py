"""`Process`: a command that runs while its caller goes on."""

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
from collections.abc import Callable
from typing import Any

import msgspec

from stockade.errors import PolicyError, SetupError, TimeoutError
from stockade.gate import client, wire
from stockade.linux import os_errors
from stockade.linux.procstat import PARENT, stat_fields
from stockade.result import Result
from stockade.runs.command import GONE, still_running_error
from stockade.runs.io.eventloop import Events, Steps, drive
from stockade.runs.io.streams import DEVNULL, PIPE, STDOUT, empty_input
from stockade.runs.launch import LaunchedSandbox, gate_ended
from stockade.runs.supervise import LAST_WORDS, RunEnding, Watch


class ProcessHandles(msgspec.Struct, frozen=True):
    """The supervisor's handles on a started program: its streams and its keeper."""

    watch: Watch
    pid: int
    #: Descriptors of stdin, stdout and stderr, or -1; on a terminal the first two are the same terminal.
    streams: tuple[int, int, int]
    terminal: bool
    #: A pidfd of the gate; the sandbox may have closed its own.
    gate: int
    #: The gate's refusal, if nothing was started.
    refused: wire.Reply | None = None


def start_steps(
    box: LaunchedSandbox,
    program: client.Program,
    stdio: tuple[int | None, int | None, int | None],
    pty: bool | tuple[int, int],
    events: Events,
) -> Steps[ProcessHandles]:
    """Start a program and wait until it runs or the gate has refused it."""
    with os_errors.setup_errors():
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
                if reply is not None and reply.kind == wire.REPLY_TERMINAL:
                    (ours[0],) = reply.descriptors
                    ours[1] = os.dup(ours[0])
                elif reply is not None and reply.kind == wire.REPLY_STARTED:
                    return ProcessHandles(
                        watch, reply.pid, (ours[0], ours[1], ours[2]), bool(pty), os.dup(box.pidfd)
                    )
                else:
                    return ProcessHandles(
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


def _pipes(stdin: int | None, stdout: int | None, stderr: int | None) -> tuple[list[int], tuple[int, ...]]:
    """Make the pipes and return our ends and the program's."""
    known = (None, PIPE, DEVNULL)
    for name, given in (("stdin", stdin), ("stdout", stdout), ("stderr", stderr)):
        if given not in known and (name, given) != ("stderr", STDOUT):
            raise PolicyError(
                f"{name}={given!r}: a program inside does not get descriptors of the host",
                hint="use PIPE and copy the data, or DEVNULL",
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


class ProcessBase:
    """What `Process` and `AsyncProcess` share: everything but the waiting and the streams.

    `make_result` makes the result; `abandoned` is called instead if the caller never waited for the end.
    """

    def __init__(
        self, parts: ProcessHandles, make_result: Callable[[RunEnding], Result], abandoned: Callable[[], None]
    ) -> None:
        self._watch = parts.watch
        self._channel: wire.Channel | None = parts.watch.channel
        self._make_result = make_result
        self._abandoned = abandoned
        self._result: Result | None = None
        self._gate = parts.gate
        self._closed = False
        self._owner = os.getpid()
        #: The PID of its keeper on the host, once it was paused.
        self._keeper = 0
        self._terminal = parts.streams[0] if parts.terminal else -1
        #: The pid of the program's first process on the host.
        self.pid = parts.pid
        if parts.refused is not None:
            self._finish(RunEnding(reply=parts.refused, wall=0))

    def __repr__(self) -> str:
        state = "running" if self._result is None else self._result.outcome.value
        return (
            f"<{type(self).__name__} {self.pid}: {'closed' if self._closed and not self._result else state}>"
        )

    def signal(self, number: int) -> None:
        """Send a signal to its process group."""
        if (channel := self._channel) is not None:
            channel.signal(signals.Signals(number))

    def kill(self, grace: float | None = None) -> None:
        """Send TERM to all its processes and KILL after the grace; by default the grace of its start."""
        if (channel := self._channel) is not None:
            channel.end(self._watch.program.grace if grace is None else grace)

    def pause(self) -> None:
        """Stop all its processes until `resume`. Its time limit keeps running."""
        if (channel := self._channel) is not None:
            box = self._watch.box
            with box.pausing:
                # A commit in between stops everything, and continues only what is not recorded here.
                if fields := stat_fields(f"/proc/{self.pid}"):
                    self._keeper = int(fields[PARENT])
                    box.paused.add(self._keeper)
                channel.signal(signals.SIGSTOP, everything=True)

    def resume(self) -> None:
        """Continue all its processes."""
        if (channel := self._channel) is not None:
            self._forget_pause()
            channel.signal(signals.SIGCONT, everything=True)

    def _forget_pause(self) -> None:
        with self._watch.box.pausing:
            self._watch.box.paused.discard(self._keeper)

    def resize(self, lines: int, columns: int) -> None:
        """Tell the program's terminal its new size."""
        if self._terminal < 0:
            raise SetupError("the process has no terminal", stage="terminal", hint="start it with pty=True")
        size = struct.pack("HHHH", lines, columns, 0, 0)
        import termios

        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, size)

    def _wait_steps(self, events: Events, timeout: float | None, began: float) -> Steps[Result]:
        until = None if timeout is None else began + timeout
        if self._result is not None:
            return self._result
        if self._channel is None:
            raise closed()
        events.watch(self._channel.fileno())
        egress = self._watch.box.egress_needed
        if egress >= 0 and not self._watch.egress_ended:
            events.watch(egress)
        while True:
            yield None if until is None else max(0.0, until - time.monotonic())
            if egress in events.ready:
                events.forget(egress)
                self._watch.end_without_egress()
            if self._channel.fileno() in events.ready:
                reply = self._channel.receive()
                if reply is None or reply.kind in LAST_WORDS:
                    events.forget(self._channel.fileno())
                    if self._closed:
                        raise closed()
                    wall = self._watch.took(reply)
                    gate_died = reply is None and (yield from gate_ended(self._gate, events))
                    if gate_died:
                        reply = self._watch.box.last_words()
                    ending = RunEnding(
                        reply=reply, wall=wall, gate_died=gate_died, before=self._watch.before,
                        egress_ended=self._watch.egress_ended,
                    )  # fmt: skip
                    return self._finish(ending)
            elif until is not None and time.monotonic() >= until:
                raise still_running_error(timeout)

    def _finish(self, ended: RunEnding) -> Result:
        self._result = self._make_result(ended)
        self._close_channel()
        return self._result

    def _hang_up(self) -> bool:
        """Make a waiting caller stop. A forked child must not: it only closes its copy; then return False."""
        self._closed = True
        if self._owner != os.getpid():
            return False
        if (channel := self._channel) is not None:
            channel.hang_up()
        return True

    def _close_channel(self) -> None:
        """Close the channel: the keeper sees that and ends what still runs."""
        if self._channel is not None:
            self._forget_pause()
            self._channel.close()
            self._channel = None
            os.close(self._gate)
            if self._result is None and self._owner == os.getpid() and not sys.is_finalizing():
                self._abandoned()


class Process(ProcessBase):
    """A command running in a living sandbox.

    >>> import stockade, subprocess
    >>> with stockade.Sandbox() as box:
    ...     process = box.start(["tr", "a-z", "A-Z"], stdin=subprocess.PIPE)
    ...     process.stdin.write(b"loud\\n"), process.stdin.close()
    ...     process.stdout.read(), process.wait().ok
    (5, None)
    (b'LOUD\\n', True)

    Its time limit applies whether or not you wait for it. When you close it, leave its `with` statement or
    drop the last reference to it, its remaining processes end.
    """

    def __init__(
        self, parts: ProcessHandles, make_result: Callable[[RunEnding], Result], abandoned: Callable[[], None]
    ) -> None:
        super().__init__(parts, make_result, abandoned)
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
        """Wait for the end and return the result. A `TimeoutError` after the timeout leaves it running."""
        began = time.monotonic()
        if not self._lock.acquire(timeout=-1 if timeout is None else timeout):
            raise still_running_error(timeout)
        try:
            with Events() as events:
                return drive(self._wait_steps(events, timeout, began), events)
        finally:
            self._lock.release()

    def poll(self) -> Result | None:
        """Return the result, or None while it runs."""
        with contextlib.suppress(TimeoutError):
            return self.wait(0)
        return None

    def close(self) -> None:
        """End its remaining processes and close its streams."""
        with self._lock if self._hang_up() else contextlib.nullcontext():
            self._close_channel()
        self._terminal = -1
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def closed() -> SetupError:
    """Return the error for a process that was closed before its end was known."""
    return SetupError("the process was closed", stage="process")


def _reader(descriptor: int, terminal: bool) -> io.BufferedReader | None:
    if descriptor < 0:
        return None
    return io.BufferedReader(_TerminalReader(descriptor) if terminal else io.FileIO(descriptor))


class _TerminalReader(io.RawIOBase):
    """The outer end of a terminal. When its last user has gone, the kernel reports EIO, not end of file."""

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
