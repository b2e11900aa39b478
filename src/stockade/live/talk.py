"""One run on a line: what is sent, what comes back, and how it is ended when its time is over.

The time is kept in four steps. First the driver is interrupted, and with it
what it has started since the run began: SIGINT, as of Ctrl-C; jobs of earlier
runs hear nothing. After the grace, the same processes but for the driver are
killed. When the driver does not answer then, it is ended with
everything it has started, and at last the sandbox itself. Should the
supervisor be stopped meanwhile, the driver's keeper ends it a little later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

import msgspec

from stockade.gate import client
from stockade.live.family import Moment
from stockade.live.line import Line
from stockade.sandbox import scarce
from stockade.sandbox.launch import died
from stockade.sandbox.steps import WRITABLE, Events, Steps
from stockade.sandbox.streams import CHUNK, Output, Spill, Spilled
from stockade.sandbox.supervise import LAST_WORDS, LATE, LEFT, Ended, Run

#: What a driver is given to answer once everything it started has been killed.
ANSWER = 1.0
#: A number, a status and a size: the first line of an answer is no longer.
LONGEST_HEAD = 64


class Told(msgspec.Struct, frozen=True):
    """What a driver answers: how the code ended, and what else it has to say."""

    status: int
    content: bytes = b""


class Answers:
    """Finds the answer in what a driver says: a line with the number, a status and a size, then the content.

    Whatever else is written there is passed over.
    """

    def __init__(self, number: bytes, most: int) -> None:
        self._mark = b"\n" + number + b" "
        self._most = most
        self._buffer = bytearray()
        self._head: tuple[int, int] | None = None
        #: Whether more was announced than is taken.
        self.too_much = False

    def feed(self, data: bytes) -> Told | None:
        """The answer, once it is whole."""
        self._buffer += data
        if self._head is None and not self._found_head():
            return None
        assert self._head is not None
        status, size = self._head
        if len(self._buffer) < size:
            return None
        return Told(status, bytes(self._buffer[:size]))

    def _found_head(self) -> bool:
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


class Sending:
    """Bytes on their way into a descriptor that may take them slowly."""

    def __init__(self, descriptor: int, data: bytes) -> None:
        self.descriptor = descriptor
        self._pending = memoryview(data)

    def step(self) -> bool:
        """Send what is taken; whether there is more."""
        try:
            self._pending = self._pending[os.write(self.descriptor, self._pending) :]
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._pending)


class Talk:
    """One run on a line."""

    def __init__(
        self, line: Line, run: Run, request: bytes, number: bytes, events: Events, most: int
    ) -> None:
        self._line, self._run, self._events = line, run, events
        self._answers = Answers(number, most)
        self._told: Told | None = None
        self._last: client.Reply | None = None
        self._over = False
        self._failure: BaseException | None = None
        self._spills = [
            None if run.spill is None else Spill(name, run.spill) for name in ("stdout", "stderr")
        ]
        sinks, readers = (run.on_stdout, run.on_stderr), (line.stdout, line.stderr)
        self._outputs = {
            reader: Output(run.limit, sink, spill, reader)
            for reader, sink, spill in zip(readers, sinks, self._spills, strict=True)
        }
        self._sending: Sending | None = Sending(line.asks, request)
        self._feed: Sending | None = None
        self._watched: list[int] = []
        self._ladder = Ladder(line, run.program)

    def steps(self) -> Steps[tuple[Told | None, Ended]]:
        """Ask, and stay until there is an answer or the driver has ended."""
        line = self._line
        began = time.monotonic()
        ooms = 0 if line.box.group is None else line.box.group.oom_kills()
        before = line.used() or (0.0, 0.0)
        try:
            with scarce.refused():
                self._begin()
            while not self._is_over():
                with self._heeding():
                    yield self._ladder.patience()
                for end in self._events.ready:
                    with self._heeding():
                        self._move(end)
                self._ladder.check()
            if self._failure is not None:
                raise self._failure
            for reader in self._outputs:
                self._drain(reader, LEFT)
            wall = time.monotonic() - began
            gate_died = self._over and self._last is None and (yield from died(line.box.pidfd, self._events))
            reply = line.box.last_words() if gate_died else self._reply(before)
            return self._told, Ended(
                reply=reply,
                wall=wall,
                gate_died=gate_died,
                ooms=ooms,
                stdout=self._outputs[line.stdout].content(),
                stderr=self._outputs[line.stderr].content(),
                truncated=any(output.truncated for output in self._outputs.values()),
                spilled=self._spilled(),
                digests={
                    "stdout": self._outputs[line.stdout].digest(),
                    "stderr": self._outputs[line.stderr].digest(),
                },
            )
        finally:
            self._end()

    @property
    def ended(self) -> bool:
        """Whether the driver is gone, and not only the run."""
        return self._over

    @contextlib.contextmanager
    def _heeding(self) -> Iterator[None]:
        """Whoever stops watching stops the run; what was raised is raised when that is done."""
        try:
            yield
        except BaseException as error:
            for output in self._outputs.values():
                output.drop()
            self._ladder.hurry()
            self._failure = self._failure or error

    def _begin(self) -> None:
        line = self._line
        if self._run.given:
            self._feed = Sending(line.writer(), self._run.given)
            self._watch(self._feed.descriptor, WRITABLE)
        self._watch(line.channel.fileno())
        self._watch(line.asks, WRITABLE)
        self._watch(line.answers)
        for reader in self._outputs:
            self._watch(reader)
        self._ladder.begin()

    def _end(self) -> None:
        for end in tuple(self._watched):
            self._forget(end)
        self._stop_feeding()
        self._spilled()
        if not self._over:
            self._ladder.end()
            if self._run.given:
                self._line.forget_input()

    def _is_over(self) -> bool:
        return self._over or self._told is not None

    def _move(self, end: int) -> None:
        line = self._line
        if end in self._outputs:
            self._drain(end)
        elif end == line.answers:
            self._listen()
        elif end == line.asks:
            self._ask()
        elif end == line.channel.fileno():
            self._hear(line.channel.receive())
        elif self._feed is not None and end == self._feed.descriptor and not self._feed.step():
            self._stop_feeding()

    def _ask(self) -> None:
        if self._sending is not None and not self._sending.step():
            self._sending = None
            self._forget(self._line.asks)

    def _listen(self) -> None:
        try:
            data = os.read(self._line.answers, CHUNK)
        except BlockingIOError:
            return
        if not data:
            # Its keeper says how it ends.
            self._forget(self._line.answers)
        elif self._told is None:
            self._told = self._answers.feed(data)
            if self._answers.too_much:
                self._ladder.give_up()

    def _hear(self, reply: client.Reply | None) -> None:
        if reply is None or reply.kind in LAST_WORDS:
            self._last, self._over = reply, True

    def _drain(self, reader: int, most: int = 1) -> None:
        while most > 0 and (got := self._outputs[reader].read()) > 0:
            most -= got
        if most > 0 and got == 0:
            self._forget(reader)

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

    def _spilled(self) -> tuple[Spilled, ...]:
        closed = (spill.close() for spill in self._spills if spill is not None)
        return tuple(found for found in closed if found is not None)

    def _reply(self, before: tuple[float, float]) -> client.Reply | None:
        """How the run ended, as the gate would say it."""
        replace, late = msgspec.structs.replace, self._ladder.timed_out
        if self._over:
            if self._last is None or self._last.kind != client.EXITED:
                return self._last
            user, system = self._last.user - before[0], self._last.system - before[1]
            ended = client.BY_TIME if late else self._last.ended
            return replace(self._last, user=max(0.0, user), system=max(0.0, system), ended=ended)
        assert self._told is not None
        after = self._line.used() or before
        return client.Reply(
            kind=client.EXITED, operation="plan", error=0, status=self._told.status << 8, index=0,
            ended=client.BY_TIME if late else client.ITSELF, user=after[0] - before[0],
            system=after[1] - before[1], peak=0, switches=0, text="", pid=0, descriptors=(),
        )  # fmt: skip


class Ladder:
    """The time of one run, and what is done when it is over, step by step."""

    def __init__(self, line: Line, program: client.Program) -> None:
        self._line, self._wall, self._grace = line, program.wall, program.grace
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
        """Take the next step if it is time."""
        if self._until is not None and time.monotonic() >= self._until:
            self.timed_out = self.timed_out or self._stage == 0
            self._climb()

    def hurry(self) -> None:
        """Whoever waited does not any longer: begin to end it, or be done with it."""
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
            patience = self._grace
        elif self._stage == 2:
            self._line.signal(signal.SIGKILL, self._began, itself=False)
            patience = ANSWER
        elif self._stage == 3:
            self._line.channel.end(0)
        else:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._line.box.pidfd, signal.SIGKILL)
        self._until = time.monotonic() + patience
