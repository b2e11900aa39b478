"""The supervisor's connection to a program inside that serves many requests.

Inside runs a driver: a shell or an interpreter that reads requests from its
descriptor 3. It answers on descriptor 4 with the number of the request, which
is random and new for each. Both are pipes and not sockets: from a socket, the
kernel would give the program a pidfd of the supervisor. Output comes through
two pipes and contains no marks: when the answer arrives, everything printed
before it is in the pipes, and the supervisor drains them. Input goes through a
pipe that the supervisor opens for writing for one run and closes again, so
that each run sees an end of file.

The driver is as untrusted as the code that it runs. The supervisor takes an
exit code and a value from it as that code's claims about itself: the driver
can lie about them or keep silent, no more. The supervisor never relies on the
driver for the time, the usage, or whether the driver has died.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from stockade.gate import client, wire
from stockade.linux import os_errors, proctree
from stockade.runs.command import GONE
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.io.streams import empty_input
from stockade.runs.launch import LaunchedSandbox
from stockade.runs.supervise import LAST_WORDS, Watch

#: Enough reads to empty the largest pipe that an ordinary user can make.
MOST_READS = 32
#: How many seconds to wait for a driver's first sign of life.
SLOW = 2.0


class DriverConnection:
    """A living driver and the supervisor's ends of its pipes."""

    def __init__(self, box: LaunchedSandbox, watch: Watch, ends: tuple[int, ...]) -> None:
        self.box, self.channel = box, watch.channel
        #: The reading ends of its stdin, stdout and stderr; the pipe for requests, and the one for answers.
        self.stdin, self.stdout, self.stderr, self.asks, self.answers = ends
        self.owner = os.getpid()
        #: The driver's pid on the host, and a pidfd of it; -1 if it ended at once.
        self._pid, self._process = 0, -1

    def set_process(self, pid: int) -> None:
        """Remember the driver's process, if it is a descendant of the sandbox's gate."""
        process = proctree.look(pid)
        if proctree.is_below(process, proctree.number_of(self.box.pidfd)):
            self._pid, self._process = pid, proctree.hold(process)

    @property
    def ended(self) -> bool:
        """Whether the driver has ended since its last answer."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def used(self) -> tuple[float, float] | None:
        """Return user and system seconds of the driver and its reaped children; None if it has ended."""
        process = proctree.look(self._pid) if self._process >= 0 else None
        if process is None or not proctree.lives(self._process):
            return None
        return process.user, process.system

    def signal(self, number: int, since: proctree.Moment, *, itself: bool) -> None:
        """Signal the processes that the driver has started since then, and with `itself` the driver too."""
        if self._process < 0:
            return
        # Found first: an interrupted bash starts a process that writes down its variables and functions.
        started = proctree.find_below(self._pid, self._process, since)
        if itself:  # first, or it continues with its script when the process that it waits for has ended
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)
        proctree.signal_each(started, number)

    def interrupt_again(self, since: proctree.Moment) -> None:
        """Interrupt the driver once more if it sleeps and nothing that it has started since then runs.

        Bash looks for signals between commands: one that arrives just before `read` opens a pipe does
        not end that call.
        """
        if self._process >= 0 and proctree.sleeps_alone(self._pid, since):
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGINT)

    def writer(self) -> int:
        """Open a new writing end of its stdin. The previous one is closed, so this is the only one."""
        return os.open(f"/proc/self/fd/{self.stdin}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def forget_input(self) -> None:
        """Discard input that an earlier run did not read; bounded, because a program may keep writing."""
        empty = os.open(f"/proc/self/fd/{self.stdin}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for _ in range(MOST_READS):
                if not os.read(empty, 1 << 16):
                    break
        except BlockingIOError:
            pass
        finally:
            os.close(empty)

    def close(self) -> None:
        """Close all ends. The keeper sees its socket closed and ends what still runs."""
        self.channel.close()
        for end in (self.stdin, self.stdout, self.stderr, self.asks, self.answers, self._process):
            if end >= 0:
                os.close(end)


def start_driver(
    box: LaunchedSandbox, program: client.Program, events: Events
) -> Steps[DriverConnection | wire.Reply]:
    """Start a driver and return its connection, or the gate's reply that refuses it."""
    with os_errors.setup_errors(), _pipe_ends() as (ours, theirs):
        watch = Watch(box, msgspec.structs.replace(program, tell=True), events)
        watch.start(theirs, kept=True)
        line = DriverConnection(box, watch, ours)
    try:
        while True:
            yield None
            if watch.channel.fileno() not in events.ready:
                continue
            reply = watch.channel.receive()
            if reply is not None and reply.kind == wire.REPLY_STARTED:
                line.set_process(reply.pid)
                return line
            watch.close()
            line.close()
            return reply or GONE
    except BaseException:
        watch.channel.end(0)
        watch.close()
        line.close()
        raise
    finally:
        watch.close()


def startup_refusal(line: DriverConnection, events: Events) -> Steps[wire.Reply | None]:
    """Wait for a driver's first words. If it failed to start, close its line and return the gate's reply."""
    channel, reply = line.channel.fileno(), None
    watched = [line.answers, channel]
    for end in watched:
        events.watch(end)
    try:
        until = time.monotonic() + SLOW
        # If the driver takes longer, the run waits for it, within the run's own timeout.
        while reply is None and (left := until - time.monotonic()) > 0:
            yield left
            if line.answers in events.ready:
                with suppress(BlockingIOError):
                    if os.read(line.answers, 4096):
                        return None
                    # The driver has closed its end; its keeper will say why.
                    watched.remove(line.answers)
                    events.forget(line.answers)
            if channel in events.ready:
                heard = line.channel.receive() or GONE
                reply = heard if heard.kind in LAST_WORDS else None
        return reply
    except BaseException:
        reply = GONE
        raise
    finally:
        for end in watched:
            events.forget(end)
        if reply is not None:
            line.channel.end(0)
            line.close()


@contextmanager
def _pipe_ends() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Make the pipes and yield our ends and the driver's. Close the driver's ends, and ours on an error."""
    ours: list[int] = []
    theirs: list[int] = []
    try:
        ours.append(empty_input())
        theirs.append(os.dup(ours[0]))
        for given in ("out", "err", "asks", "answers"):
            reader, writer = os.pipe()
            mine, its = (writer, reader) if given == "asks" else (reader, writer)
            ours.append(mine)
            theirs.append(its)
            # The driver can open our end too and take the data first: the supervisor must not block then.
            os.set_blocking(mine, False)
        yield tuple(ours), tuple(theirs)
    except BaseException:
        for end in ours:
            os.close(end)
        raise
    finally:
        for end in theirs:
            os.close(end)
