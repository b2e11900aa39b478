"""The supervisor's end of the sealed channel: one call and its answer.

The event loop serves it together with the program's streams
(`runs.supervise.SideChannel`). It moves data in both directions as the pipes allow,
so neither side can deadlock on a full pipe, however large the call and its
result are. The worker is as untrusted as the function that it runs, and the
supervisor treats its answers accordingly: any breach of the protocol ends the
run.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections import deque
from collections.abc import Iterator

from stockade.functions import packing
from stockade.gate import client, wire
from stockade.inside import channel_crypto
from stockade.linux import os_errors
from stockade.runs.io.eventloop import WRITABLE, Events

#: Seconds that a worker has to exit after its last record, before the supervisor ends it.
PATIENCE = 2.0
READ = 1 << 18
PIPE = 1 << 20
#: More than enough to empty a pipe, and bounded, because a program may keep writing.
MOST_READS = 64
#: Bounded, because a program may read as fast as we write, and other descriptors need their turn.
MOST_WRITES = 8
#: A mark and a key, or a mark and a reason.
HELLO = 1 + channel_crypto.KEY
LONGEST_REASON = 1000
#: The largest record of an exception; a driver cuts its texts and arguments to less than a quarter.
MOST_ERROR = 16 << 20

BOOT = """\
import os
def take(size):
    data = b""
    while len(data) < size:
        more = os.read(3, size - len(data))
        if not more:
            os._exit(1)
        data += more
    return data
text = take(int(take(9)))
import hashlib
if hashlib.sha256(text).hexdigest() != "%s":
    os._exit(1)
import marshal
from _frozen_importlib_external import MAGIC_NUMBER
public, magic, codes, driver, sources = marshal.loads(text)
codes = marshal.loads(codes) if magic == MAGIC_NUMBER else {}
names = {"__name__": "stockade"}
exec(codes.get("") or compile(driver, "<stockade>", "exec", dont_inherit=True), names)
names["main"](sources, codes, public, text)
"""


class FunctionChannel:
    """One call. `values` are the function's values so far, `last` is its last record: (kind, content)."""

    @property
    def is_sealed(self) -> bool:
        """Whether both ends have agreed on a key, without which nothing was sent or taken."""
        return self._opener is not None

    def __init__(self, request: bytes, max_result: int, *, streams: bool = False) -> None:
        self._streams = streams
        self._agreement = channel_crypto.KeyAgreement()
        self._text = packing.worker_text(self._agreement.public)
        self._request, self._max_result = request, max_result
        self._opener: channel_crypto.Unsealer | None = None
        self._hello = b""
        self._outgoing: Iterator[bytes] = iter([b"%09d" % len(self._text) + self._text])
        self._pending = memoryview(b"")
        self._events: Events | None = None
        self._channel: wire.Channel | None = None
        self._watched: set[int] = set()
        self._until: float | None = None
        #: Whether the function was called; a failure before that is reported differently.
        self.begun = False
        self.values: deque[bytearray] = deque()
        self.last: tuple[bytes, bytearray] | None = None
        #: Why the answer was refused, and whether it was too large: then the supervisor has ended the run.
        self.refused = ""
        self.too_large = False
        with os_errors.setup_errors():
            self._open: set[int] = set()
            asked, self._asks = os.pipe()
            self._open |= {asked, self._asks}
            try:
                self._answers, answered = os.pipe()
            except BaseException:
                self.close()
                raise
            self._open |= {self._answers, answered}
        self.theirs = (asked, answered)
        # The program can open our ends too and take the data first: the supervisor must not block then.
        for end in (self._asks, self._answers):
            with contextlib.suppress(OSError):  # the kernel limits a user's total pipe memory
                fcntl.fcntl(end, fcntl.F_SETPIPE_SZ, PIPE)
        os.set_blocking(self._asks, False)
        os.set_blocking(self._answers, False)

    def boot(self) -> str:
        """Return the code that the interpreter executes first; it accepts only this channel's text."""
        return BOOT % hashlib.sha256(self._text).hexdigest()

    def begin(self, channel: wire.Channel, events: Events) -> None:
        """Close the program's ends, which it has inherited by now, and start to serve ours."""
        self._channel, self._events = channel, events
        for end in self.theirs:
            self._shut(end)
        self._watch(self._answers)
        self._watch(self._asks, WRITABLE)
        if self.refused:  # before it began
            channel.end(0)

    def move(self, end: int) -> None:
        """Serve a ready descriptor."""
        if end == self._asks and end in self._watched:
            self._send()
        elif end == self._answers and end in self._watched:
            self._receive()

    def patience(self) -> float | None:
        return None if self._until is None else max(0.0, self._until - time.monotonic())

    def look(self) -> None:
        if self._until is not None and time.monotonic() >= self._until:
            self._refuse("the interpreter answered but did not exit")

    def rest(self) -> None:
        """Read what the ended program has left in the pipe."""
        for _ in range(MOST_READS):
            if self._answers not in self._watched or not self._receive():
                break

    def drop(self) -> None:
        """Discard the answer: the caller has stopped waiting."""
        self.refused = self.refused or "the caller stopped waiting for it"
        self.values.clear()

    def abandon(self) -> None:
        """End the run, from any thread."""
        self.refused = self.refused or "the caller stopped waiting for it"
        if (channel := self._channel) is not None:
            channel.end(0)

    def forget(self) -> None:
        """Close a forked child's copies, without an effect on the parent's call."""
        if isinstance(self._channel, client.Connection):
            self._channel.forget()
        for end in tuple(self._open):
            self._shut(end)
        self._watched.clear()

    def close(self) -> None:
        for end in tuple(self._watched):
            self._forget(end)
        for end in tuple(self._open):
            self._shut(end)

    def _send(self) -> None:
        try:
            for _ in range(MOST_WRITES):
                if not self._pending:
                    following = next(self._outgoing, None)
                    if following is None:
                        self._forget(self._asks)  # until there is more
                        return
                    self._pending = memoryview(following)
                self._pending = self._pending[os.write(self._asks, self._pending) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._forget(self._asks)

    def _receive(self) -> bool:
        """Read some data; return whether there may be more."""
        try:
            data = os.read(self._answers, READ)
        except BlockingIOError:
            return False
        if not data:
            self._forget(self._answers)
            return False
        if self.last is None and not self.refused:
            try:
                self._hear(data)
            except channel_crypto.SealError as error:
                self._refuse(str(error))
            except OverflowError as error:
                self.too_large = True
                self._refuse(str(error))
        return True

    def _hear(self, data: bytes) -> None:
        if self._opener is None:
            self._hello += data
            if self._hello[:1] == b"!":
                reason = self._hello[1:LONGEST_REASON].decode("utf-8", "replace")
                raise channel_crypto.SealError(f"inside, {reason}")
            if self._hello[:1] != b"=":
                raise channel_crypto.SealError("the answer does not begin with a key")
            if len(self._hello) < HELLO:
                return
            sealer, self._opener = self._agreement.agree(self._hello[1:HELLO], self._text, first=True)
            data, self._hello = self._hello[HELLO:], b""
            self._outgoing = sealer.record(b"C", self._request)
            self._request = b""
            if self._asks not in self._watched:
                self._watch(self._asks, WRITABLE)
        for kind, content in self._opener.feed(data, self._max_result, MOST_ERROR):
            if self.last is not None:
                return  # ignore everything after the last record
            if kind == b"B" and not self.begun and not content:
                self.begun = True
            elif kind == b"V" and self._streams:
                self.values.append(content)
            elif kind in (b"R", b"E"):
                self.last = kind, content
                self._until = time.monotonic() + PATIENCE
            else:
                raise channel_crypto.SealError("the answer has a record of an unknown kind")

    def _refuse(self, why: str) -> None:
        """Discard the answer and end the run."""
        self.refused = self.refused or why
        self._until = None
        self.last = None
        self.values.clear()
        if self._channel is not None:
            self._channel.end(0)

    def _watch(self, end: int, *what: int) -> None:
        if self._events is not None:
            self._events.watch(end, *what)
            self._watched.add(end)

    def _forget(self, end: int) -> None:
        if end in self._watched and self._events is not None:
            self._watched.remove(end)
            with contextlib.suppress(FileNotFoundError, ValueError):
                self._events.forget(end)

    def _shut(self, end: int) -> None:
        if end in self._open:
            self._open.remove(end)
            os.close(end)
