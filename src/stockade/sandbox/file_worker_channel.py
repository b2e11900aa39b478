"""Messages between a supervisor and its file workers, with descriptors.

A message is one packet. One that is too long for a packet travels in a file in
memory, whose descriptor comes first.
"""

from __future__ import annotations

import _socket as socket
import errno
import os

import msgspec

from stockade import errors
from stockade.errors import LimitError, SetupError, StockadeError
from stockade.gate.wire import send_with_descriptors
from stockade.linux.descriptors import memory_file, receive

#: How long a packet may be: a third of what the kernel queues for a socket by default.
LONGEST_PACKET = 64 << 10
#: How long a message may be: a listing of the longest length, or the text of a replacement.
LONGEST_MESSAGE = 256 << 20
#: How many descriptors come with a message; the kernel allows 253.
MOST_DESCRIPTORS = 128
_ROOM = socket.CMSG_SPACE(4 * (MOST_DESCRIPTORS + 1))
_HERE, _IN_MEMORY = b"\0", b"\1"


class WorkerFailure(msgspec.Struct, frozen=True, array_like=True):
    """An error of a worker, to be raised by the supervisor."""

    kind: str
    message: str
    hint: str = ""
    errno: int = 0

    @classmethod
    def of(cls, error: StockadeError) -> WorkerFailure:
        """Describe an error; names in it may be any bytes.

        The hints of the kernel's refusals are for callers of `box.files`, and stay here.
        """
        number = getattr(error, "errno", None)
        hint = "" if isinstance(error, OSError) else printable(error.hint)
        return cls(type(error).__name__, printable(error.message), hint, number or 0)

    def error(self) -> StockadeError:
        """Return the error, of the same class as the worker's."""
        kind = getattr(errors, self.kind, StockadeError)
        found: StockadeError = kind(self.message, hint=self.hint)
        if isinstance(found, OSError | SetupError):
            found.errno = self.errno
        return found


def printable(text: str) -> str:
    """Show bytes that are not UTF-8 as `\\xNN`: neither JSON nor MessagePack can carry them in text."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def send(end: socket.socket, message: bytes, descriptors: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors, which stay the caller's."""
    if len(message) < LONGEST_PACKET:
        if descriptors:
            send_with_descriptors(end, _HERE + message, descriptors)
        else:
            end.send(_HERE + message)
        return
    if len(message) > LONGEST_MESSAGE:
        raise LimitError(f"the request or its answer takes more than {LONGEST_MESSAGE >> 20} MiB")
    memory = memory_file("message", message)
    try:
        send_with_descriptors(end, _IN_MEMORY, (memory, *descriptors))
    finally:
        os.close(memory)


def receive_message(end: socket.socket) -> tuple[bytes, tuple[int, ...]] | None:
    """Receive a message and its descriptors, which are now the caller's; None if the peer has gone.

    If this process has too many files open for them, that is an OSError (EMFILE).
    """
    packet = receive(end, LONGEST_PACKET, _ROOM)
    if packet is None or not packet.data:
        return None
    if packet.flags & socket.MSG_CTRUNC:
        packet.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    message, descriptors = packet.data[1:], packet.descriptors
    if packet.data[:1] == _IN_MEMORY:
        memory, *others = descriptors
        descriptors = tuple(others)
        try:
            message = _read(memory)
        finally:
            os.close(memory)
    return message, descriptors


def _read(memory: int) -> bytes:
    size = os.fstat(memory).st_size
    content = bytearray()
    while len(content) < size and (piece := os.pread(memory, size - len(content), len(content))):
        content += piece
    return bytes(content)
