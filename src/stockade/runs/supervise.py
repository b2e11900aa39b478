"""Supervise one run: its streams, its limits, and its end.

The supervisor drains both output streams from the start, so that no program blocks on a full pipe. The gate
watches the time, the memory and the mounts, so that a run also ends while its supervisor is stopped; the
supervisor kills a gate that is late. How the run ended is what the gate and the kernel report, never what the
program printed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from stockade.errors import PolicyError
from stockade.gate import client, wire
from stockade.linux import os_errors
from stockade.result import Decision, SpillFile
from stockade.runs.cgroup import Baseline
from stockade.runs.io.eventloop import Events, Steps
from stockade.runs.io.streams import (
    FULL,
    NOTHING_PASSED,
    Output,
    Sink,
    SpillPlace,
    Streams,
    TerminalHandler,
)
from stockade.runs.launch import LaunchedSandbox, gate_ended

if TYPE_CHECKING:
    from stockade.gate.template import Template
    from stockade.runs.network.decision_follower import DecisionFollower
    from stockade.sandbox.delegation import Delegation

LEFT = 1 << 20  # as much as a pipe can be made to hold
GRACE = 2.0
#: A gate that is this many seconds late is stuck, and is killed.
LATE = 5.0
#: The gate sends nothing more about a run after one of these.
LAST_WORDS = (wire.REPLY_EXITED, wire.REPLY_EXEC_FAILED, wire.REPLY_FAILED)


class SideChannel(Protocol):
    """A conversation with the program on two more descriptors, besides its streams."""

    #: The program's ends, closed by `begin`.
    theirs: tuple[int, int]

    def begin(self, channel: wire.Channel, events: Events) -> None:
        """Begin once the program has its ends; `channel` can end the run."""

    def move(self, end: int) -> None:
        """Read or write a descriptor that is ready, if it is one of this channel's."""

    def patience(self) -> float | None:
        """Return how many seconds to wait at most before the next call of `look`."""

    def look(self) -> None:
        """Do what is due by time and not because a descriptor is ready."""

    def rest(self) -> None:
        """Read what is left after the program has ended."""

    def drop(self) -> None:
        """Ignore everything from now on: the run is being ended."""

    def close(self) -> None:
        """Close all descriptors; may be called again."""


class StageTies(Protocol):
    """What ties the run of a stage to the others of its pipeline."""

    def take_ends(self) -> Mapping[int, int]:
        """Hand over the ends of pipes that the program gets, by number; the caller closes them."""

    def walls_up(self, events: Events) -> Steps[None]:
        """Note that the walls of this stage are up, and wait until those of all others are."""


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """What to run, and what to do with its streams."""

    program: client.Program
    given: bytes = b""
    source: int | None = None
    limit: int
    on_stdout: Sink | None = None
    on_stderr: Sink | None = None
    #: Where output beyond the limit goes, by the name of its stream. None: no output is kept at all.
    spill: SpillPlace | None
    #: Whether the sandbox goes on when this run has ended.
    kept: bool
    #: Called once the program has been started.
    meanwhile: Callable[[], object] = lambda: None
    #: Called with the PID of the program on the host, if the gate is to report it.
    started: Callable[[int], object] = lambda pid: None
    #: Handles the program's terminal, if it has one instead of pipes.
    terminal: TerminalHandler | None = None
    #: Talks with the program on its descriptors 3 and 4.
    beside: SideChannel | None = None
    #: Gets each decision of network rules as it is recorded, also those for other programs of the sandbox.
    on_decision: Callable[[Decision], object] | None = None
    #: Exceptions that end the run and become part of its result instead of being raised further.
    cancelled_by: tuple[type[BaseException], ...] = ()
    #: Makes the delegation that answers the program's requests for sandboxes, if it may send any.
    delegates: Callable[[], Delegation] | None = None
    #: What ties the run to the other stages of a pipeline.
    stage: StageTies | None = None

    def streams(self) -> Streams:
        """Make the pipes of this run."""
        with os_errors.setup_errors():
            return Streams(
                given=self.given,
                source=self.source,
                limit=self.limit,
                sinks=(self.on_stdout, self.on_stderr),
                spill=self.spill,
                terminal=self.terminal,
                apart=(1, 2) if self.terminal is None else self.program.apart,
                passed=NOTHING_PASSED if self.stage is None else self.stage.take_ends(),
            )


def resumes_template(cmd: Sequence[str], template: Template | None) -> bool:
    """Whether a command resumes the template that its sandbox is a copy of; refuse another template's."""
    own = template_of(cmd)
    if own is not None and own is not template:
        raise PolicyError(
            "this sandbox was not opened by this WarmPython",
            hint="open one with its `sandbox()`",
        )
    return own is not None


def template_of(cmd: Sequence[str]) -> Template | None:
    """Return the template that a command resumes, if any: see `gate.template.TemplateArgv`."""
    return getattr(cmd, "template", None)


class RunEnding(msgspec.Struct, frozen=True):
    """What the supervisor observed of a run's end. `reply` is None if the gate or its keeper died first."""

    reply: wire.Reply | None
    wall: float
    #: Whether the gate died, and not only the run's own keeper.
    gate_died: bool = False
    #: Why the run was to end when the supervisor killed a gate that was late: by time or by request.
    ended_late: int = wire.ENDED_ITSELF
    #: Whether the run was ended because its egress process had ended.
    egress_ended: bool = False
    #: Whether the sandbox was for this run alone.
    alone: bool = False
    #: The counters of its sandbox when it began.
    before: Baseline = Baseline()
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    spilled: tuple[SpillFile, ...] = ()
    #: The SHA-256 of each stream that the supervisor read.
    digests: dict[str, str] = {}
    #: The end of what the program printed as an error, or on its terminal.
    tail: bytes = b""


def supervise(box: LaunchedSandbox, run: Run, streams: Streams, events: Events) -> Steps[RunEnding]:
    """Start the program, answer its requests for sandboxes, and wait until it has ended.

    If the sandbox is for this run alone, everything inside has ended too.
    """
    if run.delegates is None:
        return (yield from _supervise_program(box, run, streams, events, None))
    delegation = run.delegates()
    try:
        return (yield from _supervise_program(box, run, streams, events, delegation))
    finally:
        if not run.kept:  # the connection is at its end, and would be ready all the time
            with contextlib.suppress(OSError, ValueError):
                events.forget(box.connection.fileno())
        yield from delegation.ended(events)


def _supervise_program(
    box: LaunchedSandbox, run: Run, streams: Streams, events: Events, delegation: Delegation | None
) -> Steps[RunEnding]:
    watch = Watch(box, run.program, events)
    beside = run.beside
    more = () if beside is None else beside.theirs
    more = more if delegation is None else delegation.theirs
    channel = watch.start(streams.theirs, kept=run.kept, awaited=run.kept, more=(*more, *streams.more))
    streams.close(*streams.theirs, *streams.more)
    pumps = Pumps(streams, events, run.started, beside)
    if box.egress is not None:
        pumps.follow(box.egress.follow(run.on_decision, events))
    try:
        if beside is not None:
            beside.begin(channel, events)
        try:
            if delegation is not None:
                delegation.begin()
            run.meanwhile()
            reply = yield from watch.until_end(pumps)
        except run.cancelled_by:
            pumps.end()
            reply = yield from watch.end_run(pumps)
        except BaseException:
            # A run does not go on unwatched; a living sandbox goes on without it.
            pumps.end()
            pumps.drop()
            yield from watch.end_run(pumps)
            raise
        pumps.rest()
        pumps.close()
        watch.close()
        wall = watch.took(reply)
        gate_died = reply is None and (not run.kept or (yield from gate_ended(box.pidfd, events)))
        return RunEnding(
            # The gate may have sent a reason before it died.
            reply=box.last_words() if gate_died and run.kept else reply,
            wall=wall,
            gate_died=gate_died,
            ended_late=watch.ended_late,
            egress_ended=watch.egress_ended,
            alone=not run.kept,
            before=watch.before,
            stdout=streams.content(1),
            stderr=streams.content(2),
            truncated=streams.truncated,
            spilled=streams.spilled(),
            digests=streams.digests(),
            tail=streams.tail(),
        )
    finally:
        pumps.close()
        watch.close()
        if channel is not box.connection:
            channel.close()


def shorter(one: float | None, other: float | None) -> float | None:
    """Return the shorter of two waits; None is for ever."""
    return min((wait for wait in (one, other) if wait is not None), default=None)


class Pumps:
    """Reads and writes the pipes of a run, or its terminal, whenever one of them is ready."""

    def __init__(
        self, streams: Streams, events: Events, started: Callable[[int], object], beside: SideChannel | None
    ) -> None:
        self._streams, self._events, self._started = streams, events, started
        self._beside = beside
        self._outputs: dict[int, Output] = {output.reader: output for output in streams.outputs}
        self._feed = streams.feed
        self._fed = -1
        self._terminal = streams.terminal
        self._network: DecisionFollower | None = None
        #: The outputs that are not read because their consumer is full.
        self._paused: set[int] = set()
        for end in self._outputs:
            events.watch(end)
        self._aim()

    def follow(self, network: DecisionFollower) -> None:
        """Look at the decisions of network rules as they are recorded."""
        self._network = network

    def move(self, end: int) -> None:
        """Read or write a descriptor that is ready."""
        if end in self._outputs:
            self._drain(end)
            self._pause_if_full(end)
        elif self._network is not None and end == self._network.descriptor:
            self._network.move()
        elif end == self._fed and self._feed is not None:
            if self._feed.step():
                self._aim()
            else:
                self._stop_feeding()
        elif self._terminal is not None:
            self._terminal.move(end)
        elif self._beside is not None:
            self._beside.move(end)

    def hear(self, reply: wire.Reply, channel: wire.Channel) -> None:
        """Handle a message of the gate about a run that goes on."""
        if reply.kind == wire.REPLY_STARTED:
            self._started(reply.pid)
        if self._terminal is None:
            return
        if reply.kind == wire.REPLY_TERMINAL:
            self._terminal.connect(reply.descriptors[0], channel, self._events)
        elif reply.kind == wire.REPLY_STOPPED:
            self._terminal.stopped(reply.status)

    def patience(self) -> float | None:
        """Return how many seconds to wait at most before the next call of `look`."""
        other = self._terminal if self._beside is None else self._beside
        patience = shorter(None if other is None else other.patience(), FULL if self._paused else None)
        return patience if self._network is None else shorter(patience, self._network.patience())

    def look(self) -> None:
        """Do what is due by time and not because a descriptor is ready."""
        other = self._terminal if self._beside is None else self._beside
        if other is not None:
            other.look()
        if self._network is not None:
            self._network.look()

    def rest(self) -> None:
        """Read what is left in the pipes after the end: at most `LEFT`, for others may write for ever."""
        for end in tuple(self._outputs):
            self._drain(end, LEFT)
        other = self._terminal if self._beside is None else self._beside
        if other is not None:
            other.rest()
        if self._network is not None:
            self._network.read()

    def end(self) -> None:
        """Tell the terminal that the run is being ended."""
        if self._terminal is not None:
            self._terminal.end()

    def drop(self) -> None:
        """Only drain from now on, so that a program that has to end does not block on a full pipe."""
        for output in self._outputs.values():
            output.drop()
        for end in tuple(self._paused):
            self._resume(end)
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
            self._forget(end)
            del self._outputs[end]
        if self._network is not None:
            self._network.close()
            self._network = None
        self._stop_feeding()

    def _drain(self, end: int, most: int = 1) -> None:
        while most > 0:
            got = self._outputs[end].read()
            if got == 0:
                del self._outputs[end]
                self._forget(end)
                self._streams.close(end)
            if got <= 0:
                return
            most -= got

    def _pause_if_full(self, end: int) -> None:
        output = self._outputs.get(end)
        if output is not None and output.full:
            self._events.forget(end)
            self._paused.add(end)
            output.when_room(lambda: self._resume(end))

    def _resume(self, end: int) -> None:
        if end in self._paused:
            self._paused.remove(end)
            self._events.watch(end)

    def _forget(self, end: int) -> None:
        if end in self._paused:
            self._paused.remove(end)
        else:
            self._events.forget(end)

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

    def __init__(self, box: LaunchedSandbox, program: client.Program, events: Events) -> None:
        self.box, self.program, self.events = box, program, events
        self.began = time.monotonic()
        self.before = Baseline()
        self.channel: wire.Channel = box.connection
        #: Whether the run is being ended because its egress process has ended.
        self.egress_ended = False
        #: Why the run was to end when the gate was killed because it was late.
        self.ended_late = wire.ENDED_ITSELF
        self._ends_by = wire.ENDED_BY_TIME
        self._watched: list[int] = []
        #: From when on everything inside is being killed, in a sandbox for this run alone.
        self._kill: float | None = None
        self._deadline: float | None = None
        self._alone = False

    def start(
        self, stdio: tuple[int, ...], *, kept: bool, awaited: bool = False, more: tuple[int, ...] = ()
    ) -> wire.Channel:
        """Ask the gate to start the program; `more` are its descriptors from 3 on."""
        with os_errors.setup_errors():
            group = self.box.group
            if group is not None:
                self.before = group.baseline() if kept else Baseline(group.oom_kills())
            entrance = None if group is None else group.program_entrance()
            try:
                self.channel = self.box.connection.execute(
                    self.program, stdio, kept=kept, awaited=awaited, entrance=entrance, more=more
                )
            finally:
                if entrance is not None:
                    os.close(entrance)
        if kept:
            self._watch(self.channel.fileno())
        self._alone = not kept
        if self.program.wall is not None:
            self._expect_end(self.began + self.program.wall, wire.ENDED_BY_TIME)
        return self.channel

    def until_end(self, pumps: Pumps | None = None) -> Steps[wire.Reply | None]:
        """Wait for the gate's report that the run has ended; None if the gate or its keeper died first."""
        own, egress = self.channel.fileno(), self.box.egress_needed
        if egress >= 0 and egress not in self._watched and not self.egress_ended:
            self._watch(egress)
        while True:
            yield self._patience(pumps)
            for end in self.events.ready:
                if end == egress and end in self._watched:
                    self.end_without_egress()
                elif end == own:
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

    def end_without_egress(self) -> None:
        """End the run (TERM, grace, KILL): its egress process has ended, and the policy wants that."""
        if self.box.egress_needed in self._watched:
            self._watched.remove(self.box.egress_needed)
            self.events.forget(self.box.egress_needed)
        self.egress_ended = True
        self.channel.end(self.program.grace)
        self._expect_end(time.monotonic(), wire.ENDED_BY_REQUEST)

    def end_run(self, pumps: Pumps | None = None) -> Steps[wire.Reply | None]:
        """End the run (TERM, grace, KILL) and wait until it is over."""
        self.channel.end(self.program.grace)
        self._expect_end(time.monotonic(), wire.ENDED_BY_REQUEST)
        try:
            return (yield from self.until_end(pumps))
        except BaseException:
            self.channel.end(0)
            raise

    def took(self, reply: wire.Reply | None) -> float:
        """Return the wall time of the run, until the gate saw its end."""
        end = reply.at if reply is not None and reply.at else time.monotonic()
        return max(0.0, end - self.began)

    def close(self) -> None:
        while self._watched:
            self.events.forget(self._watched.pop())

    def _watch(self, descriptor: int, *what: int) -> None:
        self.events.watch(descriptor, *what)
        self._watched.append(descriptor)

    def _expect_end(self, asked: float, by: int) -> None:
        """Note when the gate asks the programs to end: it kills them after the grace period."""
        self._ends_by = by
        self._kill = asked + self.program.grace if self._alone else None
        self._deadline = asked + self.program.grace + LATE

    def _patience(self, pumps: Pumps | None) -> float | None:
        until = shorter(self._kill, self._deadline)
        left = None if until is None else max(0.0, until - time.monotonic())
        return left if pumps is None else shorter(left, pumps.patience())

    def _check_time(self) -> None:
        """Lift limits.cpu once everything inside is being killed; kill the gate if it is late."""
        now = time.monotonic()
        if self._kill is not None and now >= self._kill:
            self._kill = None
            self._lift_cpu()
        # With a message that waits it is not the gate that is late, but this process.
        if self._deadline is not None and now >= self._deadline and not self._has_message():
            self._deadline = None
            self.ended_late = self._ends_by
            self._lift_cpu()
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.box.pidfd, signal.SIGKILL)

    def _has_message(self) -> bool:
        waiting = select.poll()
        waiting.register(self.channel.fileno(), select.POLLIN)
        return bool(waiting.poll(0))

    def _lift_cpu(self) -> None:
        if self.box.group is not None:
            self.box.group.lift_cpu()
