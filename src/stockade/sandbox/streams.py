"""The streams of one run: what the program is given, and what it prints.

Memory is bounded by the output limit, whatever is printed. What comes after
the limit goes to a file in the state directory, and is counted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from stockade import state
from stockade.digest import Streamed
from stockade.errors import StockadeError
from stockade.gate import client
from stockade.sandbox.steps import READABLE, WRITABLE, Events

if TYPE_CHECKING:
    from stockade.sandbox.register import Entry

CHUNK = 1 << 16
#: A program that prints for ever must not fill the disk: from here on output is counted, not kept.
MOST_SPILLED = 4 << 30
Sink = Callable[[bytes], object]
#: For a stream's name: where its output is written to, and where it is put when it is whole.
SpillPlace = Callable[[str], tuple[str, str]]


class Spilled(msgspec.Struct, frozen=True):
    """Output past the limit: the file that has it, and how much of it was lost all the same."""

    stream: str
    path: str
    size: int
    lost: int = 0


class Spill:
    """Receives what is too much for memory. Made when it is first needed."""

    def __init__(self, stream: str, place: SpillPlace) -> None:
        self.stream = stream
        self._place = place
        self._part = self._path = ""
        self._file = -1
        self._size = self._lost = 0

    def write(self, data: bytes) -> None:
        """Keep the data if there is room; a full disk loses it, and never the run."""
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

    def close(self) -> Spilled | None:
        """What was spilled, or None if nothing was."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            try:
                if self._size:
                    os.rename(self._part, self._path)
            except OSError:
                self._lost, self._size = self._lost + self._size, 0
            if not self._size:  # the disk was full, or its place is gone
                with contextlib.suppress(OSError):
                    os.unlink(self._part)
        if self._size or self._lost:
            return Spilled(self.stream, self._path if self._size else "", self._size, self._lost)
        return None


def spill_place(home: str, entry: Entry | None) -> SpillPlace:
    """Where output past the limit goes: beside the sandbox's record until it is whole."""

    def place(stream: str) -> tuple[str, str]:
        directory = f"{state.ensure(home)}/output"
        os.makedirs(directory, mode=0o700, exist_ok=True)
        name = f"{os.urandom(6).hex()}.{stream}"
        final = f"{directory}/{name}"
        return final if entry is None else entry.scratch(name), final

    return place


class Output:
    """One stream of the program: handed on as it comes, kept up to the limit, spilled beyond it."""

    def __init__(self, limit: int, sink: Sink | None, spill: Spill | None, reader: int = -1) -> None:
        """A pipe of its own, or the reading end of one that somebody else has and closes."""
        self.reader, self.writer = (reader, -1) if reader >= 0 else os.pipe()
        # The program can open its own end for reading and be faster: the supervisor must not wait then.
        os.set_blocking(self.reader, False)
        self._room = limit if spill else 0
        self._sink = sink
        self._spill = spill
        self._kept = bytearray()
        self._digest = Streamed()
        self.truncated = False

    def read(self) -> int:
        """Take what is there and return how much it was; 0 at the end, -1 if there is nothing yet."""
        try:
            data = os.read(self.reader, CHUNK)
        except BlockingIOError:
            return -1
        if data:
            self._digest.update(data)
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

    def drop(self) -> None:
        """Hand on and keep nothing more; what comes is only drained."""
        self._sink = self._spill = None

    def digest(self) -> str:
        """The SHA-256 of all that came, kept or not."""
        return self._digest.hexdigest()

    def content(self) -> bytes:
        kept, self._kept = self._kept, bytearray()
        return bytes(kept)


class Input:
    """What the program reads: bytes that are given, then what a descriptor yields."""

    def __init__(self, given: bytes, source: int | None) -> None:
        self._pending = memoryview(given)
        self.source = source
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)

    def waiting_for(self) -> tuple[int, int] | None:
        """What to wait for next: the program to take what is pending, or the source to yield more."""
        if self._pending:
            return self.writer, WRITABLE
        return None if self.source is None else (self.source, READABLE)

    def step(self) -> bool:
        """Do what was waited for; False when the program can be given no more."""
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


class Terminal(Protocol):
    """Whoever looks after the terminal of a program; `cli.terminal` connects it with the user's."""

    def fit(self, program: client.Program) -> client.Program:
        """The program, with what its terminal is to be like."""

    def connect(self, outer: int, channel: client.Channel, events: Events) -> None:
        """Take over the outer end, and the channel by which the program can be woken."""

    def stopped(self, number: int) -> None:
        """The program was stopped by this signal."""

    def move(self, end: int) -> None:
        """Do what the descriptor is ready for, if it is one that this terminal watches."""

    def patience(self) -> float | None:
        """How long to wait at most before `look` is called."""

    def look(self) -> None:
        """See to what no descriptor tells."""

    def rest(self) -> None:
        """After the end, take what was left."""

    def end(self) -> None:
        """The run is being ended; nobody needs to ask for that again."""

    def drop(self) -> None:
        """Show nothing more; what comes is only drained."""

    def close(self) -> None:
        """Let go of everything; harmless when repeated."""


class Streams:
    """The pipes of one run. Whoever makes them closes them."""

    def __init__(
        self,
        *,
        given: bytes,
        source: int | None,
        limit: int,
        sinks: tuple[Sink | None, Sink | None],
        spill: SpillPlace | None,
        terminal: Terminal | None = None,
        apart: tuple[int, ...] = (1, 2),
    ) -> None:
        self._open: set[int] = set()
        self._spills: list[Spill] = []
        self.terminal = terminal
        self.feed: Input | None = None
        self._outputs: dict[int, Output] = {}
        stdin: tuple[int, ...] = ()
        try:
            for number in apart:
                self._outputs[number] = self._output(number, limit, sinks[number - 1], spill)
            if terminal is None:
                stdin = (self._input(given, source),)
        except BaseException:
            self.close()
            raise
        self.outputs = tuple(self._outputs.values())
        self.theirs = (*stdin, *(output.writer for output in self.outputs))

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
        """What was kept of stdout (1) or stderr (2)."""
        return self._outputs[number].content() if number in self._outputs else b""

    def digests(self) -> dict[str, str]:
        """The SHA-256 of each stream; what a terminal shows is not one."""
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

    def spilled(self) -> tuple[Spilled, ...]:
        """What went to files. They are complete afterwards."""
        return tuple(found for spill in self._spills if (found := spill.close()) is not None)

    def close(self, *ends: int) -> None:
        """Close these ends, or all that are still open."""
        for end in ends or tuple(self._open):
            os.close(end)
            self._open.remove(end)
        if not ends:
            self.spilled()


def empty_input() -> int:
    """An input with nothing in it. Not the host's /dev/null: root's program would own its inode."""
    reader, writer = os.pipe()
    os.close(writer)
    return reader
