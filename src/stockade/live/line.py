"""The line to a program inside that is asked again and again.

Inside runs a driver: a shell or an interpreter that waits on its descriptor 3
for what to run. It answers on descriptor 4, with the number that the request
came with, chosen anew for each and not to be guessed. Both are pipes: to
whoever has the other end of a socket, the kernel hands out a pidfd of us. What is printed goes
through two pipes and holds no marks: when the answer is there, everything
that was printed before is in the pipes, and is taken out. Input goes through
a pipe that the supervisor opens for writing for one run and closes again, so
that each run sees an end.

The driver is made of the same untrusted stuff as the code it runs. What it
says is judged as such code's own words about itself: an exit code, a value.
It can lie about those or keep silent, no more. How long it may take, what it
uses and whether it has died are not asked of it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import msgspec

from stockade.gate import client
from stockade.live import family
from stockade.sandbox import scarce
from stockade.sandbox.launch import Box
from stockade.sandbox.process import GONE
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.streams import empty_input
from stockade.sandbox.supervise import LAST_WORDS, Watch

#: As many as empty the largest pipe that an ordinary user can make.
MOST_READS = 32
#: How long it is waited to hear whether a driver is there at all.
SLOW = 2.0


class Line:
    """A driver that lives, and our ends of what it holds."""

    def __init__(self, box: Box, watch: Watch, ends: tuple[int, ...]) -> None:
        self.box, self.channel = box, watch.channel
        #: The reading ends of its stdin, stdout and stderr; where it is asked, and where it answers.
        self.stdin, self.stdout, self.stderr, self.asks, self.answers = ends
        self.owner = os.getpid()
        #: Of the driver, as the host counts; and a pidfd of it, -1 if it ended at once.
        self._pid, self._process = 0, -1

    def born(self, pid: int) -> None:
        """The driver's process is there, somewhere below the gate."""
        process = family.look(pid)
        if family.is_below(process, family.number_of(self.box.pidfd)):
            self._pid, self._process = pid, family.hold(process)

    @property
    def ended(self) -> bool:
        """Whether it has ended since it last answered."""
        poll = select.poll()
        poll.register(self.channel.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def used(self) -> tuple[float, float] | None:
        """Seconds of the processor that it and those it waited for have had; None when it has ended."""
        process = family.look(self._pid) if self._process >= 0 else None
        if process is None or not family.lives(self._process):
            return None
        return process.user, process.system

    def signal(self, number: int, since: family.Moment, *, itself: bool) -> None:
        """Signal what it has started since then, and if so wished `itself`."""
        if self._process < 0:
            return
        if itself:  # first, lest it goes on when what it waits for has ended
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)
        family.signal_below(self._pid, self._process, number, since)

    def writer(self) -> int:
        """A new writing end of its stdin: the one before was closed, and this one is the only one."""
        return os.open(f"/proc/self/fd/{self.stdin}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def forget_input(self) -> None:
        """Take out what an earlier run was given and did not read; somebody inside may write for ever."""
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
        """Let go. Its keeper ends what still runs when nobody listens any more."""
        self.channel.close()
        for end in (self.stdin, self.stdout, self.stderr, self.asks, self.answers, self._process):
            if end >= 0:
                os.close(end)


def opening(box: Box, program: client.Program, events: Events) -> Steps[Line | client.Reply]:
    """Start a driver, or say why that was refused."""
    with scarce.refused(), _ends() as (ours, theirs):
        watch = Watch(box, msgspec.structs.replace(program, tell=True), events)
        watch.start(theirs, kept=True)
        line = Line(box, watch, ours)
    try:
        while True:
            yield None
            if watch.channel.fileno() not in events.ready:
                continue
            reply = watch.channel.receive()
            if reply is not None and reply.kind == client.STARTED:
                line.born(reply.pid)
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


def refused(line: Line, events: Events) -> Steps[client.Reply | None]:
    """Why a driver that speaks when it is there never came, and its line is closed; None if it did come."""
    channel, reply = line.channel.fileno(), None
    watched = [line.answers, channel]
    for end in watched:
        events.watch(end)
    try:
        until = time.monotonic() + SLOW
        # One that takes longer is waited for by the run, whose time that is.
        while reply is None and (left := until - time.monotonic()) > 0:
            yield left
            if line.answers in events.ready:
                with suppress(BlockingIOError):
                    if os.read(line.answers, 4096):
                        return None
                    # Nobody has the other end; who attends to it says why.
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
def _ends() -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Our ends and the driver's, which are closed when it has them; ours are if it was not started."""
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
            # The driver can open the other end as well and be faster: the supervisor must not wait then.
            os.set_blocking(mine, False)
        yield tuple(ours), tuple(theirs)
    except BaseException:
        for end in ours:
            os.close(end)
        raise
    finally:
        for end in theirs:
            os.close(end)
