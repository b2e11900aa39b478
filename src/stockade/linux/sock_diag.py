"""Ask the kernel which socket one TCP connection begins at.

A netlink socket answers for the network namespace that it was opened in, whoever uses it later. The question
names both ends of the connection, so that the kernel looks in its hash table and never lists sockets.
"""

from __future__ import annotations

import _socket as socket
import struct
import sys

#: A socket's own address and port, and those of the other end.
TcpEnds = tuple[str, int, str, int]

#: <linux/netlink.h>, <linux/sock_diag.h>
_REQUEST, _BY_FAMILY = 1, 20
_HEADER = struct.Struct("=IHHII")
#: Family, protocol, extensions, padding, states.
_WHAT = struct.Struct("=BBBBI")
#: Own port and the other end's, own address and the other end's, device, cookie (none is known).
_ENDS = struct.Struct("!HH16s16s12s")
_ANY = struct.pack("=III", 0, 0xFFFFFFFF, 0xFFFFFFFF)
#: Family, state, timer, retransmits; the ends; expiry, bytes in both queues, uid and inode.
_ANSWER = struct.Struct(f"=BBBB{_ENDS.size}xIIIII")
_ANSWER_SIZE = 4096
#: How many answers to earlier questions are thrown away.
_STALE = 16


def encode_question(ends: TcpEnds, number: int) -> bytes:
    """Return the question for the socket of a connection; ValueError if the ends are none."""
    own, own_port, other, other_port = ends
    family = socket.AF_INET6 if ":" in own else socket.AF_INET
    try:
        addresses = [socket.inet_pton(family, address).ljust(16, b"\0") for address in (own, other)]
        question = _WHAT.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + _ENDS.pack(
            own_port, other_port, *addresses, _ANY
        )
    except (OSError, struct.error) as error:
        raise ValueError(f"not the ends of a connection: {error}") from None
    return _HEADER.pack(_HEADER.size + len(question), _BY_FAMILY, _REQUEST, number, 0) + question


def decode_answer(answer: bytes, ends: TcpEnds, number: int) -> int:
    """Return the inode number of the socket in an answer; 0 if it has none or answers something else."""
    if len(answer) < _HEADER.size + _ANSWER.size:
        return 0
    size, kind, _, answered, _ = _HEADER.unpack_from(answer)
    if kind != _BY_FAMILY or answered != number or not _HEADER.size + _ANSWER.size <= size <= len(answer):
        return 0
    own_port, other_port, *_ = _ENDS.unpack_from(answer, _HEADER.size + 4)
    if (own_port, other_port) != (ends[1], ends[3]):
        return 0
    inode: int = _ANSWER.unpack_from(answer, _HEADER.size)[-1]
    return inode


def find_inode(netlink: int, ends: TcpEnds, number: int) -> int:
    """Return the inode number of a connection's socket, without waiting; 0 if there is no such connection.

    `netlink` is a NETLINK_SOCK_DIAG socket that does not block, `number` one that no earlier
    question had.
    """
    channel = socket.socket(fileno=netlink)
    try:
        # The kernel answers before the question's send returns.
        channel.sendto(encode_question(ends, number), (0, 0))
        for _ in range(_STALE):
            answer, sender = channel.recvfrom(_ANSWER_SIZE)
            if sender[0] == 0 and answer[8:12] == number.to_bytes(4, sys.byteorder):
                return decode_answer(answer, ends, number)
    except (OSError, ValueError):
        return 0
    finally:
        channel.detach()
    return 0
