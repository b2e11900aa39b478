"""What a holder and those who attach to its terminals tell each other.

A connection is a socket of messages. With its first message the client hands
over one end of a pair of streams: from then on what is typed and shown goes
there as it is, and the messages say the rest. Only the holder's user gets as
far as that: the socket lies in the state directory, and the kernel says who
connects.
"""

from __future__ import annotations

import _socket as socket  # as in stockade.gate.client
import array
import contextlib
import os
import select
import struct
from typing import Annotated, Any

import msgspec

from stockade.errors import SetupError
from stockade.sandbox.records import text
from stockade.sandbox.result import Enforced
from stockade.workspace.layers import Change, Lost

#: What both sides must agree about.
VERSION = 1
MOST_BYTES = 1 << 16
_PLACE = socket.CMSG_SPACE(4)
_CREDENTIALS = struct.Struct("=iII")

Cells = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """From the client, once, with a stream: which terminal, and what the client's own is like."""

    version: int
    #: The number of a terminal; 0 for the one that was last attached to, -1 for a new one.
    terminal: int
    lines: Cells
    columns: Cells
    settings: Annotated[bytes, msgspec.Meta(max_length=36)]
    env: Annotated[dict[str, str], msgspec.Meta(max_length=8)]
    #: Only what the terminal has shown so far is wanted: it comes as a file.
    look: bool = False


class Size(msgspec.Struct, tag=True, frozen=True):
    """From the client: its terminal has another size."""

    lines: Cells
    columns: Cells


class Again(msgspec.Struct, tag=True, frozen=True):
    """From the client: its terminal has shown other things meanwhile."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """From the holder: what is shown comes now."""

    sandbox: str
    terminal: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """From the holder: why not."""

    message: str
    hint: str


class Over(msgspec.Struct, tag=True, frozen=True):
    """From the holder, with a file: the program of the terminal has ended, or that is all there is to see."""


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What is in that file: how it ended, and if the sandbox has ended with it, what it changed."""

    outcome: str
    exit_code: int
    signal: int | None
    reason: str
    hint: str
    #: The terminals in which the sandbox goes on.
    others: tuple[int, ...] = ()
    discarded: bool = False
    controls: dict[str, Enforced] = {}
    changes: tuple[Change, ...] = ()
    workspace: str = ""
    lost: tuple[Lost, ...] = ()
    #: What went wrong afterwards.
    error: str = ""


FromClient = Hello | Size | Again
FromHolder = Joined | Refused | Over


def encoded(letter: msgspec.Struct) -> bytes:
    """A letter as it is sent. What is not UTF-8 in a name is replaced."""
    try:
        return msgspec.json.encode(letter)
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(msgspec.to_builtins(letter)))


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_text(key): _as_text(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(inner) for inner in value]
    return text(value) if isinstance(value, str) else value


class Line:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, letter: FromClient | FromHolder, *descriptors: int) -> bool:
        """Whether it could be told: the other side may be gone, or read nothing."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        with contextlib.suppress(OSError):
            self._socket.sendmsg([encoded(letter)], [rights] if descriptors else [])
            return True
        return False

    def receive(self, kind: object) -> tuple[FromClient | FromHolder | None, int]:
        """The next letter and its descriptor, or -1. None where the other side has gone, or is no such."""
        arguments = (MOST_BYTES, _PLACE, socket.MSG_CMSG_CLOEXEC)
        try:
            try:
                data, ancillary, flags, _ = self._socket.recvmsg(*arguments)
            except ConnectionResetError:
                # It went before it read all that we said. That is told once; its last words come after.
                data, ancillary, flags, _ = self._socket.recvmsg(*arguments)
        except ConnectionError:
            return None, -1
        passed = array.array("i")
        for level, what, content in ancillary:
            if (level, what) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                passed.frombytes(content[: len(content) // 4 * 4])
        try:
            if not data or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or len(passed) > 1:
                raise ValueError
            return msgspec.json.decode(data, type=kind), passed.pop() if passed else -1
        except (msgspec.MsgspecError, ValueError, RecursionError):
            for descriptor in passed:
                os.close(descriptor)
            return None, -1

    @property
    def hung_up(self) -> bool:
        """Whether the other side has gone, also if it said something before."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def peer(self) -> int:
        """The user at the other end, as the kernel knows it."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(found)[1])

    def close(self) -> None:
        self._socket.close()


def listening(directory: str, name: str) -> socket.socket:
    """A socket of that name. The path may be longer than an address can be, the way to it is not."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    place = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end.bind(f"/proc/self/fd/{place}/{name}")
        end.listen(16)
        end.setblocking(False)
        return end
    except BaseException:
        end.close()
        raise
    finally:
        os.close(place)


def accepted(listener: socket.socket) -> Line | None:
    """Whoever connects next, if it is our own user."""
    try:
        descriptor, _ = listener._accept()  # type: ignore[attr-defined]
    except OSError:
        return None
    end = socket.socket(fileno=descriptor)
    end.setblocking(False)
    line = Line(end)
    if line.peer() != os.geteuid():
        line.close()
        return None
    return line


def connected(directory: int, name: str) -> Line | None:
    """The way to the holder whose socket that is; None if it is gone."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        end.connect(f"/proc/self/fd/{directory}/{name}")
    except (FileNotFoundError, ConnectionError):
        end.close()
        return None
    except OSError as error:
        end.close()
        raise SetupError(
            f"the sandbox cannot be attached to: {error.strerror}", stage="attach", errno=error.errno or 0
        ) from None
    return Line(end)


def line_pair() -> tuple[Line, Line]:
    """Both ends of a connection, the second for a holder that is being started."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    return Line(ours), Line(theirs)


def file_of(content: bytes) -> int:
    """A file in memory, as much of the content as there is memory for."""
    file = os.memfd_create("letter")
    with contextlib.suppress(OSError):
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
    return file


def content_of(file: int) -> bytes:
    """What is in a file that was handed over, which is closed."""
    with open(file, "rb") as content:
        content.seek(0)
        return content.read()


def streams() -> tuple[int, int]:
    """A pair of streams."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return ours.detach(), theirs.detach()


def is_stream(descriptor: int) -> bool:
    """Whether it is one of those."""
    try:
        end = socket.socket(fileno=descriptor)
    except (OSError, ValueError):  # no socket, or no descriptor
        return False
    found = (end.family, end.type)
    end.detach()
    return found == (socket.AF_UNIX, socket.SOCK_STREAM)
