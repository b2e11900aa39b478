"""The messages between a holder and the clients that attach to its terminals.

A connection is a socket of messages. With its first message the client passes
one end of a pair of streams: from then on keys and output go through the
stream unchanged, and everything else is a message. Only the holder's own user
can connect: the socket lies in the state directory, and the holder checks the
peer's credentials, which the kernel supplies.
"""

from __future__ import annotations

import _socket as socket  # as in stockade.gate.client
import array
import contextlib
import os
import select
from typing import Annotated, Any

import msgspec

from stockade.errors import SetupError
from stockade.linux.descriptors import CREDENTIALS, receive
from stockade.linux.plain_text import text
from stockade.result import Change, Denial, Enforcement, Handoff, LostChange

#: The version of the protocol, which both sides must share.
VERSION = 1
MOST_BYTES = 1 << 16
#: How many changes a report lists by name: a program may have made very many.
SHOWN_CHANGES = 100
_PLACE = socket.CMSG_SPACE(4)

Cells = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]


class Hello(msgspec.Struct, tag=True, frozen=True):
    """From the client, once, with a stream: which terminal it wants, and what its own is like."""

    version: int
    #: The number of a terminal; 0 for the one that a client last attached to, -1 for a new one.
    terminal: int
    lines: Cells
    columns: Cells
    settings: Annotated[bytes, msgspec.Meta(max_length=36)]
    env: Annotated[dict[str, str], msgspec.Meta(max_length=8)]
    #: The client wants only what the terminal has shown so far; the holder sends it as a file.
    look: bool = False


class WindowSize(msgspec.Struct, frozen=True, tag="Size"):
    """From the client: its terminal has another size."""

    lines: Cells
    columns: Cells


class Redraw(msgspec.Struct, frozen=True, tag="Again"):
    """From the client: its terminal has shown other things meanwhile and needs a redraw."""


class AttachAcceptance(msgspec.Struct, frozen=True, tag="Joined"):
    """From the holder: the client is attached, and the output follows on the stream."""

    sandbox: str
    terminal: int


class AttachRefusal(msgspec.Struct, frozen=True, tag="Refused"):
    """From the holder: why it refuses the client."""

    message: str
    hint: str


class TerminalEnd(msgspec.Struct, frozen=True, tag="Over"):
    """From the holder, with a file: the terminal's program has ended, or a `look` is complete."""


class TerminalEndReport(msgspec.Struct, frozen=True, kw_only=True):
    """The content of that file: how the program ended and, if the sandbox ended too, what it changed."""

    outcome: str
    exit_code: int
    signal: int | None
    reason: str
    hint: str
    #: The terminals in which the sandbox goes on.
    others: tuple[int, ...] = ()
    discarded: bool = False
    controls: dict[str, Enforcement] = {}
    denials: tuple[Denial, ...] = ()
    #: The first changes, and how many there are in all.
    changes: tuple[Change, ...] = ()
    changed: int = 0
    changes_cut: str = ""
    workspace: str = ""
    lost: tuple[LostChange, ...] = ()
    handoffs: tuple[Handoff, ...] = ()
    warnings: tuple[str, ...] = ()
    #: What went wrong afterwards.
    error: str = ""


FromClient = Hello | WindowSize | Redraw
FromHolder = AttachAcceptance | AttachRefusal | TerminalEnd


def encoded(message: msgspec.Struct) -> bytes:
    """Encode a message. Bytes of names that are not UTF-8 are replaced."""
    try:
        return msgspec.json.encode(message)
    except UnicodeEncodeError:
        return msgspec.json.encode(_as_text(msgspec.to_builtins(message)))


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_text(key): _as_text(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_text(inner) for inner in value]
    return text(value) if isinstance(value, str) else value


class AttachSocket:
    """One end of a connection."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, message: FromClient | FromHolder, *descriptors: int) -> bool:
        """Send a message; return False if the other side has gone or does not read."""
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        with contextlib.suppress(OSError):
            self._socket.sendmsg([encoded(message)], [rights] if descriptors else [])
            return True
        return False

    def receive(self, kind: object) -> tuple[FromClient | FromHolder | None, int]:
        """Return the next message and its descriptor, or -1; None if the peer has gone or sent nonsense."""
        try:
            packet = receive(self._socket, MOST_BYTES, _PLACE)
        except ConnectionError:
            return None, -1
        if packet is None:
            return None, -1
        try:
            cut = packet.flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
            if not packet.data or cut or len(packet.descriptors) > 1:
                raise ValueError
            return msgspec.json.decode(packet.data, type=kind), next(iter(packet.descriptors), -1)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            packet.close()
            return None, -1

    @property
    def hung_up(self) -> bool:
        """Whether the other side has gone, even if unread messages are left."""
        poll = select.poll()
        poll.register(self._socket, 0)
        return bool(poll.poll(0))

    def peer(self) -> int:
        """Return the uid at the other end, from the kernel."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        return int(CREDENTIALS.unpack(found)[1])

    def close(self) -> None:
        self._socket.close()


def listen(directory: str, name: str, kind: int = socket.SOCK_SEQPACKET) -> socket.socket:
    """Listen on a socket of that name; through /proc/self/fd, because its path may exceed an address."""
    end = socket.socket(socket.AF_UNIX, kind | socket.SOCK_CLOEXEC)
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


def accept_client(listener: socket.socket) -> AttachSocket | None:
    """Accept the next connection; return None if it failed or is not from our own user."""
    try:
        descriptor, _ = listener._accept()  # type: ignore[attr-defined]
    except OSError:
        return None
    end = socket.socket(fileno=descriptor)
    end.setblocking(False)
    line = AttachSocket(end)
    if line.peer() != os.geteuid():
        line.close()
        return None
    return line


def connected(directory: int, name: str) -> AttachSocket | None:
    """Connect to the holder that owns the socket; return None if it has gone."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        end.connect(f"/proc/self/fd/{directory}/{name}")
    except (FileNotFoundError, ConnectionError):
        end.close()
        return None
    except OSError as error:
        end.close()
        raise SetupError(
            f"cannot attach to the sandbox: {error.strerror}", stage="attach", errno=error.errno or 0
        ) from None
    return AttachSocket(end)


def line_pair() -> tuple[AttachSocket, AttachSocket]:
    """Return both ends of a connection; the second is for a holder that is about to start."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    theirs.setblocking(False)
    return AttachSocket(ours), AttachSocket(theirs)


def memory_file(content: bytes) -> int:
    """Return a memory file with the content, or as much of it as fits into memory."""
    file = os.memfd_create("letter")
    with contextlib.suppress(OSError):
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
    return file


def content_of(file: int) -> bytes:
    """Return the content of a file that the holder passed, and close the file."""
    with open(file, "rb") as content:
        content.seek(0)
        return content.read()


def streams() -> tuple[int, int]:
    """Return the two ends of a new stream."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return ours.detach(), theirs.detach()


def is_stream(descriptor: int) -> bool:
    """Whether a descriptor is an end of such a stream."""
    try:
        end = socket.socket(fileno=descriptor)
    except (OSError, ValueError):  # not a socket, or not a descriptor
        return False
    found = (end.family, end.type)
    end.detach()
    return found == (socket.AF_UNIX, socket.SOCK_STREAM)
