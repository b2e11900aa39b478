"""One run on a driver's connection: send the request, collect output and answer, enforce the timeout.

The supervisor enforces the timeout in four steps. First it interrupts the
driver and the processes that the driver has started since the run began, with
SIGINT, as Ctrl-C does; jobs of earlier runs get no signal. A shell that goes on
sleeping is interrupted again. After the grace the supervisor kills the same
processes, except the driver. If the driver still does not answer, the
supervisor ends it with everything that it has started, and at last the sandbox
itself. If the supervisor is stopped meanwhile, the driver's keeper ends the
driver a little later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from stockade.gate import client, wire
from stockade.linux import os_errors
from stockade.linux.proctree import Moment
from stockade.result import SpillFile
from stockade.runs.cgroup import Baseline
from stockade.runs.io.eventloop import WRITABLE, Events, Steps
from stockade.runs.io.streams import CHUNK, FULL, Output, Spill
from stockade.runs.launch import gate_ended
from stockade.runs.supervise import LAST_WORDS, LATE, LEFT, Run, RunEnding, shorter
from stockade.sessions.connection import DriverConnection

if TYPE_CHECKING:
    from stockade.runs.network.decision_follower import DecisionFollower

#: How many seconds pass before a shell that sleeps on is interrupted again.
AGAIN = 0.25
#: How many seconds a driver has to answer once everything that it started has been killed.
ANSWER = 1.0
#: The longest first line of an answer: a number, a status and a size.
LONGEST_HEAD = 64


class DriverReply(msgspec.Struct, frozen=True):
    """A driver's answer: how the code ended, and further content."""

    status: int
    content: bytes | bytearray = b""


class Answers:
    """Finds the answer in a driver's bytes: a line with the number, a status and a size, then the content.

    Everything else is skipped.
    """

    def __init__(self, number: bytes, most: int) -> None:
        self._mark = b"\n" + number + b" "
        self._most = most
        self._buffer = bytearray()
        self._head: tuple[int, int] | None = None
        #: Whether the driver announced more content than the limit.
        self.too_much = False

    def feed(self, data: bytes) -> DriverReply | None:
        """Take more bytes; return the answer once it is complete."""
        self._buffer += data
        if self._head is None and not self._parse_head():
            return None
        assert self._head is not None
        status, size = self._head
        if len(self._buffer) < size:
            return None
        del self._buffer[size:]
        return DriverReply(status, self._buffer)

    def _parse_head(self) -> bool:
        while (start := self._buffer.find(self._mark)) >= 0:
            end = self._buffer.find(b"\n", start + 1, start + LONGEST_HEAD)
            if end < 0 and len(self._buffer) < start + LONGEST_HEAD:
                del self._buffer[:start]
                return False
            words = bytes(self._buffer[start + len(self._mark) : max(end, 0)]).split(b" ")
            del self._buffer[: start + 1 if end < 0 else end + 1]
            if len(words) == 2 and all(word.isdigit() for word in words):
                self._head = int(words[0]) & 0xFF, int(words[1])
                self.too_much = self._head[1] > self._most
                return not self.too_much
        del self._buffer[: -len(self._mark)]
        return False


class SlowWriter:
    """Writes bytes to a descriptor that may accept them slowly."""

    def __init__(self, descriptor: int, data: bytes) -> None:
        self.descriptor = descriptor
        self._pending = memoryview(data)

    def step(self) -> bool:
        """Write as much as the descriptor accepts; return whether more is left."""
        try:
            self._pending = self._pending[os.write(self.descriptor, self._pending) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._pending)


class Exchange:
    """One run on a driver's connection."""

    def __init__(
        self,
        line: DriverConnection,
        run: Run,
        request: bytes,
        number: bytes,
        events: Events,
        most: int,
        *,
        insistent: bool = False,
    ) -> None:
        self._line, self._run, self._events = line, run, events
        self._answers = Answers(number, most)
        self._answer: DriverReply | None = None
        self._last: wire.Reply | None = None
        self._over = self._egress_ended = False
        self._failure: BaseException | None = None
        self._spills = [
            None if run.spill is None else Spill(name, run.spill) for name in ("stdout", "stderr")
        ]
        sinks, readers = (run.on_stdout, run.on_stderr), (line.stdout, line.stderr)
        self._outputs = {
            reader: Output(run.limit, sink, spill, reader)
            for reader, sink, spill in zip(readers, sinks, self._spills, strict=True)
        }
        self._sending: SlowWriter | None = SlowWriter(line.asks, request)
        self._feed: SlowWriter | None = None
        self._watched: list[int] = []
        #: The outputs that are not read because their consumer is full.
        self._paused: set[int] = set()
        self._ladder = Ladder(line, run.program, insistent)
        self._network: DecisionFollower | None = None

    def steps(self) -> Steps[tuple[DriverReply | None, RunEnding]]:
        """Send the request and wait until the driver has answered or ended."""
        line = self._line
        began = time.monotonic()
        baseline = Baseline() if line.box.group is None else line.box.group.baseline()
        before = line.used() or (0.0, 0.0)
        try:
            with os_errors.setup_errors():
                self._begin()
            while not self._is_over():
                with self._deferring_errors():
                    yield self._patience()
                for end in self._events.ready:
                    with self._deferring_errors():
                        self._move(end)
                self._ladder.check()
                if self._network is not None:
                    self._network.look()
            if self._failure is not None:
                raise self._failure
            for reader in self._outputs:
                self._drain(reader, LEFT)
            wall = time.monotonic() - began
            gate_died = (
                self._over and self._last is None and (yield from gate_ended(line.box.pidfd, self._events))
            )
            reply = line.box.last_words() if gate_died else self._reply(before)
            return self._answer, RunEnding(
                reply=reply,
                wall=wall,
                gate_died=gate_died,
                egress_ended=self._egress_ended,
                before=baseline,
                stdout=self._outputs[line.stdout].content(),
                stderr=self._outputs[line.stderr].content(),
                truncated=any(output.truncated for output in self._outputs.values()),
                spilled=self._spilled(),
                digests={
                    "stdout": self._outputs[line.stdout].digest(),
                    "stderr": self._outputs[line.stderr].digest(),
                },
                tail=self._outputs[line.stderr].tail,
            )
        finally:
            self._end()

    @property
    def ended(self) -> bool:
        """Whether the driver has ended, and not only the run."""
        return self._over

    @contextlib.contextmanager
    def _deferring_errors(self) -> Iterator[None]:
        """On an exception begin to end the run, and keep the exception to raise it when the run has ended."""
        try:
            yield
        except BaseException as error:
            for output in self._outputs.values():
                output.drop()
            for end in tuple(self._paused):
                self._resume(end)
            self._ladder.hurry()
            self._failure = self._failure or error

    def _begin(self) -> None:
        line = self._line
        if self._run.given:
            self._feed = SlowWriter(line.writer(), self._run.given)
            self._watch(self._feed.descriptor, WRITABLE)
        self._watch(line.channel.fileno())
        self._watch(line.asks, WRITABLE)
        self._watch(line.answers)
        for reader in self._outputs:
            self._watch(reader)
        if line.box.egress_needed >= 0:
            self._watch(line.box.egress_needed)
        if line.box.egress is not None:
            self._network = line.box.egress.follow(self._run.on_decision, self._events)
        self._ladder.begin()

    def _end(self) -> None:
        self._paused.clear()
        for end in tuple(self._watched):
            self._forget(end)
        if self._network is not None:
            self._network.close()
        self._stop_feeding()
        self._spilled()
        if not self._over:
            self._ladder.end()
            if self._run.given:
                self._line.forget_input()

    def _patience(self) -> float | None:
        patience = shorter(self._ladder.patience(), FULL if self._paused else None)
        return patience if self._network is None else shorter(patience, self._network.patience())

    def _is_over(self) -> bool:
        return self._over or self._answer is not None

    def _move(self, end: int) -> None:
        line = self._line
        if end in self._outputs:
            self._drain(end)
            self._pause_if_full(end)
        elif end == line.answers:
            self._read_answer()
        elif end == line.asks:
            self._ask()
        elif end == line.box.egress_needed:
            self._forget(end)
            self._egress_ended = True
            self._ladder.give_up()
        elif self._network is not None and end == self._network.descriptor:
            self._network.move()
        elif end == line.channel.fileno():
            self._take_reply(line.channel.receive())
        elif self._feed is not None and end == self._feed.descriptor and not self._feed.step():
            self._stop_feeding()

    def _ask(self) -> None:
        if self._sending is not None and not self._sending.step():
            self._sending = None
            self._forget(self._line.asks)

    def _read_answer(self) -> None:
        try:
            data = os.read(self._line.answers, CHUNK)
        except BlockingIOError:
            return
        if not data:
            # The keeper reports how the driver ends.
            self._forget(self._line.answers)
        elif self._answer is None:
            self._answer = self._answers.feed(data)
            if self._answers.too_much:
                self._ladder.give_up()

    def _take_reply(self, reply: wire.Reply | None) -> None:
        if reply is None or reply.kind in LAST_WORDS:
            self._last, self._over = reply, True

    def _drain(self, reader: int, most: int = 1) -> None:
        while most > 0 and (got := self._outputs[reader].read()) > 0:
            most -= got
        if most > 0 and got == 0:
            self._forget(reader)

    def _pause_if_full(self, reader: int) -> None:
        if self._outputs[reader].full and reader in self._watched:
            self._forget(reader)
            self._paused.add(reader)
            self._outputs[reader].when_room(lambda: self._resume(reader))

    def _resume(self, reader: int) -> None:
        if reader in self._paused:
            self._paused.remove(reader)
            self._watch(reader)

    def _stop_feeding(self) -> None:
        if self._feed is not None:
            self._forget(self._feed.descriptor)
            os.close(self._feed.descriptor)
            self._feed = None

    def _watch(self, descriptor: int, *what: int) -> None:
        self._events.watch(descriptor, *what)
        self._watched.append(descriptor)

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._watched:
            self._watched.remove(descriptor)
            self._events.forget(descriptor)

    def _spilled(self) -> tuple[SpillFile, ...]:
        closed = (spill.close() for spill in self._spills if spill is not None)
        return tuple(found for found in closed if found is not None)

    def _reply(self, before: tuple[float, float]) -> wire.Reply | None:
        """Return how the run ended, in the form of a reply of the gate."""
        replace, late = msgspec.structs.replace, self._ladder.timed_out
        if self._over:
            if self._last is None or self._last.kind != wire.REPLY_EXITED:
                return self._last
            user, system = self._last.user - before[0], self._last.system - before[1]
            ended = wire.ENDED_BY_TIME if late else self._last.ended
            return replace(self._last, user=max(0.0, user), system=max(0.0, system), ended=ended)
        assert self._answer is not None
        after = self._line.used() or before
        return wire.Reply(
            kind=wire.REPLY_EXITED, operation="plan", error=0, status=self._answer.status << 8, index=0,
            ended=wire.ENDED_BY_TIME if late else wire.ENDED_ITSELF, user=after[0] - before[0],
            system=after[1] - before[1], peak=0, switches=0, text="", pid=0, descriptors=(),
        )  # fmt: skip


class Ladder:
    """The timeout of one run, and the steps that end the run when the time is over."""

    def __init__(self, line: DriverConnection, program: client.Program, insistent: bool) -> None:
        self._line, self._wall, self._grace = line, program.wall, program.grace
        #: Whether a driver that sleeps on is interrupted again, and until when.
        self._insistent, self._grace_ends = insistent, 0.0
        self._until: float | None = None
        self._stage = 0
        self._began = Moment(0, 0)
        self.timed_out = False

    def begin(self) -> None:
        self._began = Moment.now()
        if self._wall is not None:
            self._until = time.monotonic() + self._wall
            self._line.channel.allow(self._wall + self._grace + ANSWER + LATE)

    def end(self) -> None:
        if self._wall is not None:
            self._line.channel.allow(None)

    def patience(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def check(self) -> None:
        """Take the next step if its time has come."""
        if self._until is None or (now := time.monotonic()) < self._until:
            return
        if self._stage == 1 and now < self._grace_ends:
            self._line.interrupt_again(self._began)
            self._until = min(now + AGAIN, self._grace_ends)
        else:
            self.timed_out = self.timed_out or self._stage == 0
            self._climb()

    def hurry(self) -> None:
        """Begin to end the run because the caller has stopped waiting; the second time, end the driver."""
        if self._stage == 0:
            self._climb()
        else:
            self.give_up()

    def give_up(self) -> None:
        """End the driver."""
        if self._stage < 3:
            self._stage = 2
            self._climb()

    def _climb(self) -> None:
        self._stage += 1
        patience = LATE
        if self._stage == 1:
            self._line.signal(signal.SIGINT, self._began, itself=True)
            self._grace_ends = time.monotonic() + self._grace
            patience = min(AGAIN, self._grace) if self._insistent else self._grace
        elif self._stage == 2:
            self._line.signal(signal.SIGKILL, self._began, itself=False)
            patience = ANSWER
        elif self._stage == 3:
            self._line.channel.end(0)
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._line.box.pidfd, signal.SIGKILL)
        self._until = time.monotonic() + patience
