"""The streams of one run: what the program reads, and what it prints.

The output limit bounds the memory in use, whatever the program prints. Output past the limit goes to a spill
file in the state directory and is counted.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from stockade import state
from stockade.errors import SetupError, StockadeError
from stockade.gate import client, wire
from stockade.linux.sha256 import Sha256Stream
from stockade.result import SpillFile
from stockade.runs.io.eventloop import READABLE, WRITABLE, Events

if TYPE_CHECKING:
    from stockade.runs.register.register import RegisterEntry

CHUNK = 1 << 16
#: How much of the end of what a program prints is kept for hints.
TAIL = 4096
#: A program that prints for ever must not fill the disk: output past this is counted, not kept.
MOST_SPILLED = 4 << 30
Sink = Callable[[bytes], object]
#: How often, in seconds, to look again at streams that are not read because their consumer is full.
FULL = 1.0
#: Given a stream's name, returns the path to write its output to and the path for the complete file.
SpillPlace = Callable[[str], tuple[str, str]]
#: The numbers of `subprocess`, which is slow to import.
PIPE, STDOUT, DEVNULL = -1, -2, -3
NOTHING_PASSED: Mapping[int, int] = MappingProxyType({})


class StreamConsumer:
    """A sink that takes a stream over: the run keeps nothing of it, and does not read while the sink is full.

    A program whose output nobody takes then waits, as it does in a pipeline.
    """

    #: Whether the supervisor is to stop reading.
    full = False

    def __call__(self, data: bytes) -> None:
        """Take the next piece of the stream."""
        raise NotImplementedError

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once there is room again."""
        raise NotImplementedError


class Spill:
    """Writes a stream's output past the limit to a spill file, which it makes when first needed."""

    def __init__(self, stream: str, place: SpillPlace) -> None:
        self.stream = stream
        self._place = place
        self._part = self._path = ""
        self._file = -1
        self._size = self._lost = 0

    def write(self, data: bytes) -> None:
        """Keep the data if there is room; a full disk loses the data but never fails the run."""
        view = memoryview(data)
        try:
            if not self._part:
                self._part, self._path = self._place(self.stream)
                self._file = os.open(self._part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            while view and self._file >= 0 and self._size < MOST_SPILLED:
                wrote = os.write(self._file, view)
                self._size += wrote
                view = view[wrote:]
        except (OSError, StockadeError):
            pass
        self._lost += len(view)

    def close(self) -> SpillFile | None:
        """Complete the file and return it; None if nothing was spilled."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            try:
                if self._size:
                    os.rename(self._part, self._path)
            except OSError:
                self._lost, self._size = self._lost + self._size, 0
            if not self._size:  # the disk was full, or the directory is gone
                with contextlib.suppress(OSError):
                    os.unlink(self._part)
        if self._size or self._lost:
            return SpillFile(self.stream, self._path if self._size else "", self._size, self._lost)
        return None


def spill_place(home: str, entry: RegisterEntry | None) -> SpillPlace:
    """Return where output past the limit goes: beside the sandbox's record until it is complete."""

    def place(stream: str) -> tuple[str, str]:
        directory = f"{state.ensure(home)}/output"
        os.makedirs(directory, mode=0o700, exist_ok=True)
        name = f"{os.urandom(6).hex()}.{stream}"
        final = f"{directory}/{name}"
        return final if entry is None else entry.scratch(name), final

    return place


class Output:
    """One output stream of the program: passed on as it comes, kept up to the limit, spilled beyond it."""

    def __init__(self, limit: int, sink: Sink | None, spill: Spill | None, reader: int = -1) -> None:
        """Make a pipe, or use `reader`, the reading end of a pipe that the caller closes."""
        self.reader, self.writer = (reader, -1) if reader >= 0 else os.pipe()
        # The program can open its own end for reading and read first: the supervisor must not block then.
        os.set_blocking(self.reader, False)
        self._room = limit if spill else 0
        self._sink = sink
        self._consumer = sink if isinstance(sink, StreamConsumer) else None
        self._spill = None if self._consumer is not None else spill
        self._kept = bytearray()
        self._digest = Sha256Stream()
        self.truncated = False
        self.tail = b""

    def read(self) -> int:
        """Read what is there and return how many bytes it was; 0 at the end, -1 if there is nothing yet."""
        try:
            data = os.read(self.reader, CHUNK)
        except BlockingIOError:
            return -1
        if data:
            self._digest.update(data)
            self.tail = (self.tail + data[-TAIL:])[-TAIL:]
        if self._sink is not None and data:
            self._sink(data)
        if self._spill is not None and data:
            if self._room:
                self._kept += data[: self._room]
            if len(data) > self._room:
                self.truncated = True
                self._spill.write(data[self._room :])
            self._room -= min(self._room, len(data))
        return len(data)

    @property
    def full(self) -> bool:
        """Whether to read nothing more until the consumer has room."""
        return self._consumer is not None and self._consumer.full

    def when_room(self, resume: Callable[[], None]) -> None:
        """Call `resume` once the consumer has room; at once if there is none."""
        if self._consumer is None:
            resume()
        else:
            self._consumer.when_room(resume)

    def drop(self) -> None:
        """Pass on and keep nothing more: only drain the pipe."""
        self._sink = self._spill = self._consumer = None

    def digest(self) -> str:
        """Return the SHA-256 of everything that was read, kept or not."""
        return self._digest.hexdigest()

    def content(self) -> bytes:
        kept, self._kept = self._kept, bytearray()
        return bytes(kept)


class Input:
    """What the program reads: given bytes, then what a descriptor yields."""

    def __init__(self, given: bytes, source: int | None) -> None:
        self._pending = memoryview(given)
        self.source = source
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def waiting_for(self) -> tuple[int, int] | None:
        """Return what to wait for: the program to read what is pending, or the source to yield more."""
        if self._pending:
            return self.writer, WRITABLE
        return None if self.source is None else (self.source, READABLE)

    def step(self) -> bool:
        """Do what was waited for; False when there is nothing more to write to the program."""
        try:
            if self._pending:
                self._pending = self._pending[os.write(self.writer, self._pending) :]
            elif self.source is not None:
                self._pending = memoryview(os.read(self.source, CHUNK))
                if not self._pending:
                    return False
        except BlockingIOError:
            return True
        except BrokenPipeError:
            return False
        return bool(self._pending) or self.source is not None


class TerminalHandler(Protocol):
    """Handles the terminal of a program; `sessions.attach.user_terminal` connects it with the user's."""

    def fit(self, program: client.Program) -> client.Program:
        """Return the program with the modes and the size of its terminal."""

    def connect(self, outer: int, channel: wire.Channel, events: Events) -> None:
        """Take the outer end of the terminal, and the channel that can wake the program."""

    def stopped(self, number: int) -> None:
        """Handle that this signal stopped the program."""

    def move(self, end: int) -> None:
        """Read or write a descriptor that is ready, if it is one of this terminal's."""

    def patience(self) -> float | None:
        """Return how many seconds to wait at most before the next call of `look`."""

    def look(self) -> None:
        """Do what is due by time and not because a descriptor is ready."""

    def rest(self) -> None:
        """Read what is left after the program has ended."""

    def end(self) -> None:
        """Note that the run is being ended, so that no further request for that is needed."""

    def tail(self) -> bytes:
        """Return the end of what the program printed."""

    def drop(self) -> None:
        """Show nothing more: only drain the terminal."""

    def close(self) -> None:
        """Close all descriptors; may be called again."""


class Streams:
    """The pipes of one run. The caller that makes them closes them."""

    def __init__(
        self,
        *,
        given: bytes,
        source: int | None,
        limit: int,
        sinks: tuple[Sink | None, Sink | None],
        spill: SpillPlace | None,
        terminal: TerminalHandler | None = None,
        apart: tuple[int, ...] = (1, 2),
        passed: Mapping[int, int] = NOTHING_PASSED,
    ) -> None:
        """Make them. `passed` are descriptors that the program gets as they are, by its numbers."""
        self._open: set[int] = set(passed.values())
        self._spills: list[Spill] = []
        self.terminal = terminal
        self.feed: Input | None = None
        self._outputs: dict[int, Output] = {}
        theirs = dict(passed)
        try:
            for number in apart:
                if number not in passed:
                    self._outputs[number] = self._output(number, limit, sinks[number - 1], spill)
                    theirs[number] = self._outputs[number].writer
            if terminal is None and 0 not in passed:
                theirs[0] = self._input(given, source)
        except BaseException:
            self.close()
            raise
        self.outputs = tuple(self._outputs.values())
        #: The program's ends: its standard streams, and what it has besides them.
        self.theirs = tuple(theirs[number] for number in sorted(theirs) if number <= 2)
        self.more = tuple(theirs[number] for number in sorted(theirs) if number > 2)

    def _input(self, given: bytes, source: int | None) -> int:
        self.feed = Input(given, source) if given or source is not None else None
        if self.feed is None:
            stdin = empty_input()
        else:
            stdin = self.feed.reader
            self._open.add(self.feed.writer)
        self._open.add(stdin)
        return stdin

    def content(self, number: int) -> bytes:
        """Return the bytes that were kept of stdout (1) or stderr (2)."""
        return self._outputs[number].content() if number in self._outputs else b""

    def tail(self) -> bytes:
        """Return the end of what the program printed as an error, or on its terminal."""
        if 2 in self._outputs:
            return self._outputs[2].tail
        return b"" if self.terminal is None else self.terminal.tail()

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each stream; the output of a terminal is not one."""
        return {("stdout", "stderr")[number - 1]: output.digest() for number, output in self._outputs.items()}

    def _output(self, number: int, limit: int, sink: Sink | None, place: SpillPlace | None) -> Output:
        kept = None if place is None else Spill(("stdout", "stderr")[number - 1], place)
        output = Output(limit, sink, kept)
        self._open |= {output.reader, output.writer}
        if kept is not None:
            self._spills.append(kept)
        return output

    @property
    def truncated(self) -> bool:
        return any(output.truncated for output in self.outputs)

    def spilled(self) -> tuple[SpillFile, ...]:
        """Complete the spill files and return them."""
        return tuple(file for spill in self._spills if (file := spill.close()) is not None)

    def close(self, *ends: int) -> None:
        """Close these ends, or all that are still open."""
        for end in ends or tuple(self._open):
            # First: after an interruption in between, the number may be another file's.
            self._open.remove(end)
            os.close(end)
        if not ends:
            self.spilled()


def empty_input() -> int:
    """Return a pipe at its end. Not the host's /dev/null: a program of root would own its inode."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader


class OutputCopy:
    """Writes everything to a descriptor, blocking or not.

    While we wait here, nothing checks the run's time limit. So from `until` on we do not wait for a stalled
    reader, and further output is lost, as when a program is killed while it writes to a full pipe.
    """

    def __init__(self, descriptor: int, until: float | None = None) -> None:
        self.lost = False
        self._descriptor = descriptor
        self._until = until
        # A pipe that is ready takes this much; more may block, which matters only with a time limit.
        self._most = None if until is None else select.PIPE_BUF
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)

    def __call__(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self.lost:
            patience = None if self._until is None else max(0.0, self._until - time.monotonic()) * 1000
            if not self._poll.poll(patience):
                self.lost = True
                break
            try:
                view = view[os.write(self._descriptor, view[: self._most]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError:
                raise
            except OSError as error:
                raise SetupError(
                    f"cannot write to descriptor {self._descriptor}: {error.strerror}",
                    stage="output",
                    errno=error.errno or 0,
                ) from None
