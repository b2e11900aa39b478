"""Watching one run: its streams, its limits, and how it ends.

Both output streams are drained from the start, so that no program blocks
because nobody reads. The gate watches the time, the memory and the mounts,
so that a run ends also while its supervisor is stopped; the supervisor sees
to it that the gate does. How the run ended is what the gate and the kernel
say, never what was printed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from stockade.errors import PolicyError
from stockade.gate import client
from stockade.sandbox import scarce
from stockade.sandbox.launch import Box, Prepared, died
from stockade.sandbox.steps import Events, Steps
from stockade.sandbox.streams import Output, Sink, Spilled, SpillPlace, Streams, Terminal

if TYPE_CHECKING:
    from stockade.gate.template import Template
    from stockade.receipt.account import Account
    from stockade.sandbox.delegate import Delegation

LEFT = 1 << 20  # as much as a pipe can be made to hold
GRACE = 2.0
#: A gate that is this much later than it should be is stuck, and is killed.
LATE = 5.0
#: After these nothing more is said about a run.
LAST_WORDS = (client.EXITED, client.EXEC_FAILED, client.FAILED)


class Beside(Protocol):
    """Whoever talks with a program on two more descriptors, besides its streams."""

    #: The program's ends, closed by `begin`.
    theirs: tuple[int, int]

    def begin(self, channel: client.Channel, events: Events) -> None:
        """The program has its ends; the run is ended through the channel."""

    def move(self, end: int) -> None:
        """Do what the descriptor is ready for, if it is one that is watched here."""

    def patience(self) -> float | None:
        """How long to wait at most before `look` is called."""

    def look(self) -> None:
        """See to what no descriptor tells."""

    def rest(self) -> None:
        """After the end, take what was left."""

    def drop(self) -> None:
        """The run is being ended, and nobody wants to hear more."""

    def close(self) -> None:
        """Let go of everything; harmless when repeated."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and what to do with its streams."""

    program: client.Program
    given: bytes = b""
    source: int | None = None
    limit: int
    on_stdout: Sink | None = None
    on_stderr: Sink | None = None
    #: Where output beyond the limit goes, by the name of its stream. None: nothing is kept at all.
    spill: SpillPlace | None
    #: The sandbox goes on when this run has ended.
    kept: bool
    #: What to do once the program has been started.
    meanwhile: Callable[[], object] = lambda: None
    #: What is told the number of its first process on the host, where the program is to tell.
    started: Callable[[int], object] = lambda pid: None
    #: What looks after the program's terminal, if it has one instead of pipes.
    terminal: Terminal | None = None
    #: Who talks with the program on its descriptors 3 and 4.
    beside: Beside | None = None
    #: What ends the run when it is raised and is part of the result, instead of being raised further.
    cancelled_by: tuple[type[BaseException], ...] = ()
    #: What answers where the program may ask for sandboxes.
    delegates: Callable[[], Delegation] | None = None

    def streams(self) -> Streams:
        """Its pipes."""
        with scarce.refused():
            return Streams(
                given=self.given,
                source=self.source,
                limit=self.limit,
                sinks=(self.on_stdout, self.on_stderr),
                spill=self.spill,
                terminal=self.terminal,
                apart=(1, 2) if self.terminal is None else self.program.apart,
            )


def goes_on(cmd: Sequence[str], template: Template | None) -> bool:
    """Whether a command goes on in the template that its sandbox is a copy of."""
    own = template_of(cmd)
    if own is not None and own is not template:
        raise PolicyError("the sandbox is none of this WarmPython's", hint="open one with its `sandbox()`")
    return own is not None


def template_of(cmd: Sequence[str]) -> Template | None:
    """The template that a command goes on in, if it does: see `gate.template.Resumed`."""
    return getattr(cmd, "template", None)


class Ended(msgspec.Struct, frozen=True):
    """What was seen of a run's end. `reply` is None if whoever attended to it died first."""

    reply: client.Reply | None
    wall: float
    #: In a living sandbox: whether that was the gate, and not the run's own keeper.
    gate_died: bool = False
    #: Whether the sandbox was for this run alone.
    alone: bool = False
    #: How many processes of the sandbox had been killed for want of memory before.
    ooms: int = 0
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    spilled: tuple[Spilled, ...] = ()
    #: The SHA-256 of each stream that went through our hands.
    digests: dict[str, str] = {}


def may_ask(run: Run, prepared: Prepared, account: Account | None) -> Run:
    """The run, with the right to ask for sandboxes where its policy has that.

    A worker is talked with where others ask, so that no function in one has the right.
    """
    if not prepared.resolved.policy.delegate or run.beside is not None:
        return run
    from stockade.sandbox.delegate import offered

    return offered(run, prepared, account)


def supervise(box: Box, run: Run, streams: Streams, events: Events) -> Steps[Ended]:
    """Start the program and stay with it until it has ended, and with a one-shot run everything else."""
    if run.delegates is None:
        return (yield from _supervise(box, run, streams, events, None))
    asked = run.delegates()
    try:
        return (yield from _supervise(box, run, streams, events, asked))
    finally:
        if not run.kept:  # it has nothing more to say, and would be ready all the time
            with contextlib.suppress(OSError, ValueError):
                events.forget(box.connection.fileno())
        yield from asked.ended(events)


def _supervise(
    box: Box, run: Run, streams: Streams, events: Events, asked: Delegation | None
) -> Steps[Ended]:
    watch = Watch(box, run.program, events)
    beside = run.beside
    more = () if beside is None else beside.theirs
    channel = watch.start(streams.theirs, kept=run.kept, more=more if asked is None else asked.theirs)
    streams.close(*streams.theirs)
    pumps = Pumps(streams, events, run.started, beside)
    try:
        if beside is not None:
            beside.begin(channel, events)
        try:
            if asked is not None:
                asked.begin()
            run.meanwhile()
            reply = yield from watch.until_end(pumps)
        except run.cancelled_by:
            pumps.end()
            reply = yield from watch.ended_by_us(pumps)
        except BaseException:
            # Whoever stops watching stops the run; a living sandbox goes on without it.
            pumps.end()
            pumps.drop()
            yield from watch.ended_by_us(pumps)
            raise
        pumps.rest()
        pumps.close()
        watch.close()
        wall = watch.took(reply)
        gate_died = reply is None and (not run.kept or (yield from died(box.pidfd, events)))
        return Ended(
            # The gate may have said why it gave up.
            reply=box.last_words() if gate_died and run.kept else reply,
            wall=wall,
            gate_died=gate_died,
            alone=not run.kept,
            ooms=watch.ooms,
            stdout=streams.content(1),
            stderr=streams.content(2),
            truncated=streams.truncated,
            spilled=streams.spilled(),
            digests=streams.digests(),
        )
    finally:
        pumps.close()
        watch.close()
        if channel is not box.connection:
            channel.close()


class Pumps:
    """Moves what is in the pipes of a run, or its terminal, whenever there is something to move."""

    def __init__(
        self, streams: Streams, events: Events, started: Callable[[int], object], beside: Beside | None
    ) -> None:
        self._streams, self._events, self._started = streams, events, started
        self._beside = beside
        self._outputs: dict[int, Output] = {output.reader: output for output in streams.outputs}
        self._feed = streams.feed
        self._fed = -1
        self._terminal = streams.terminal
        for end in self._outputs:
            events.watch(end)
        self._aim()

    def move(self, end: int) -> None:
        """Do what the descriptor is ready for."""
        if end in self._outputs:
            self._drain(end)
        elif end == self._fed and self._feed is not None:
            if self._feed.step():
                self._aim()
            else:
                self._stop_feeding()
        elif self._terminal is not None:
            self._terminal.move(end)
        elif self._beside is not None:
            self._beside.move(end)

    def hear(self, reply: client.Reply, channel: client.Channel) -> None:
        """What is said of a run that goes on."""
        if reply.kind == client.STARTED:
            self._started(reply.pid)
        if self._terminal is None:
            return
        if reply.kind == client.TERMINAL:
            self._terminal.connect(reply.descriptors[0], channel, self._events)
        elif reply.kind == client.STOPPED:
            self._terminal.stopped(reply.status)

    def patience(self) -> float | None:
        """How long to wait at most before `look` is called."""
        other = self._terminal if self._beside is None else self._beside
        return None if other is None else other.patience()

    def look(self) -> None:
        """See to what no descriptor tells."""
        other = self._terminal if self._beside is None else self._beside
        if other is not None:
            other.look()

    def rest(self) -> None:
        """After the end, take what was left in the pipes; others may write for ever."""
        for end in tuple(self._outputs):
            self._drain(end, LEFT)
        other = self._terminal if self._beside is None else self._beside
        if other is not None:
            other.rest()

    def end(self) -> None:
        """The run is being ended."""
        if self._terminal is not None:
            self._terminal.end()

    def drop(self) -> None:
        """From now on only drain: a program that is to end must not wait for a reader."""
        for output in self._outputs.values():
            output.drop()
        other = self._terminal if self._beside is None else self._beside
        if other is not None:
            other.drop()

    def close(self) -> None:
        if self._beside is not None:
            self._beside.close()
            self._beside = None
        if self._terminal is not None:
            self._terminal.close()
            self._terminal = None
        for end in tuple(self._outputs):
            self._events.forget(end)
            del self._outputs[end]
        self._stop_feeding()

    def _drain(self, end: int, most: int = 1) -> None:
        while most > 0:
            got = self._outputs[end].read()
            if got == 0:
                del self._outputs[end]
                self._events.forget(end)
                self._streams.close(end)
            if got <= 0:
                return
            most -= got

    def _aim(self) -> None:
        waiting = self._feed.waiting_for() if self._feed is not None else None
        if waiting is None:
            self._stop_feeding()
        elif waiting[0] != self._fed:
            if self._fed >= 0:
                self._events.forget(self._fed)
            self._fed = waiting[0]
            self._events.watch(*waiting)

    def _stop_feeding(self) -> None:
        if self._fed >= 0:
            self._events.forget(self._fed)
            self._fed = -1
        if self._feed is not None:
            self._streams.close(self._feed.writer)
            self._feed = None


class Watch:
    """One run from its start to its end, without its streams."""

    def __init__(self, box: Box, program: client.Program, events: Events) -> None:
        self.box, self.program, self.events = box, program, events
        self.began = time.monotonic()
        self.ooms = 0 if box.group is None else box.group.oom_kills()
        self.channel: client.Channel = box.connection
        self._watched: list[int] = []
        self._deadline: float | None = None

    def start(self, stdio: tuple[int, ...], *, kept: bool, more: tuple[int, ...] = ()) -> client.Channel:
        """Ask the gate to start the program; `more` are its descriptors 3 and 4."""
        with scarce.refused():
            entrance = group.program_entrance() if (group := self.box.group) is not None else None
            try:
                self.channel = self.box.connection.execute(
                    self.program, stdio, kept=kept, entrance=entrance, more=more
                )
            finally:
                if entrance is not None:
                    os.close(entrance)
        if kept:
            self._watch(self.channel.fileno())
        if self.program.wall is not None:
            self._deadline = self.began + self.program.wall + self.program.grace + LATE
        return self.channel

    def until_end(self, pumps: Pumps | None = None) -> Steps[client.Reply | None]:
        """Wait for the word that the run has ended; None if that never comes."""
        own = self.channel.fileno()
        while True:
            yield self._patience(pumps)
            for end in self.events.ready:
                if end == own:
                    reply = self.channel.receive()
                    if reply is None or reply.kind in LAST_WORDS:
                        return reply
                    if pumps is not None:
                        pumps.hear(reply, self.channel)
                elif pumps is not None:
                    pumps.move(end)
            if pumps is not None:
                pumps.look()
            self._check_time()

    def ended_by_us(self, pumps: Pumps | None = None) -> Steps[client.Reply | None]:
        """End the run: TERM, grace, KILL. Returns when it is over."""
        self.channel.end(self.program.grace)
        self._deadline = time.monotonic() + self.program.grace + LATE
        try:
            return (yield from self.until_end(pumps))
        except BaseException:
            self.channel.end(0)
            raise

    def took(self, reply: client.Reply | None) -> float:
        """How long it took: until the gate saw its end, which may be earlier than it is heard of."""
        end = reply.at if reply is not None and reply.at else time.monotonic()
        return max(0.0, end - self.began)

    def close(self) -> None:
        while self._watched:
            self.events.forget(self._watched.pop())

    def _watch(self, descriptor: int, *what: int) -> None:
        self.events.watch(descriptor, *what)
        self._watched.append(descriptor)

    def _patience(self, pumps: Pumps | None) -> float | None:
        left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
        other = None if pumps is None else pumps.patience()
        return min((wait for wait in (left, other) if wait is not None), default=None)

    def _check_time(self) -> None:
        """Kill a gate that does not keep the time."""
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._deadline = None
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.box.pidfd, signal.SIGKILL)
