"""Packets that carry descriptors, and files in memory."""

from __future__ import annotations

import _socket as socket  # the standard module costs milliseconds to import
import array
import os
import struct

import msgspec

CREDENTIALS = struct.Struct("=iII")


class Packet(msgspec.Struct, frozen=True):
    """One packet of a socket, the descriptors that came with it, and the sender's pid or 0."""

    data: bytes
    descriptors: tuple[int, ...]
    pid: int
    flags: int

    def close(self) -> None:
        """Close the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def receive(end: socket.socket, size: int, room: int) -> Packet | None:
    """Receive one packet, with `room` bytes for what the kernel adds; None if the peer has gone."""
    arguments = (size, room, socket.MSG_CMSG_CLOEXEC)
    try:
        try:
            data, ancillary, flags, _ = end.recvmsg(*arguments)
        except ConnectionResetError:
            # The peer closed before it read everything. The kernel says so once; its last packets follow.
            data, ancillary, flags, _ = end.recvmsg(*arguments)
    except ConnectionResetError:
        return None
    numbers, pid = array.array("i"), 0
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers.frombytes(content[: len(content) // 4 * 4])
        elif level == socket.SOL_SOCKET and kind == socket.SCM_CREDENTIALS:
            pid = CREDENTIALS.unpack(content)[0]
    return Packet(data, tuple(numbers), pid, flags)


def memory_file(name: str, content: bytes) -> int:
    """Return a descriptor of an anonymous file with the content, at the end of it."""
    file = os.memfd_create(name)
    try:
        view = memoryview(content)
        while view:
            view = view[os.write(file, view) :]
        return file
    except BaseException:
        os.close(file)
        raise
