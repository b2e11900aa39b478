"""The sockets for datagrams inside: where each was sent to, and how an answer comes from there."""

from __future__ import annotations

import socket
import struct

# <linux/in.h> and <linux/in6.h>; Python 3.11 has no IP_PKTINFO.
_IP_PKTINFO = 8
_IPV6_RECVPKTINFO, _IPV6_PKTINFO = 49, 50
_IPV4_INFO = struct.Struct("=i4s4s")
_IPV6_INFO = struct.Struct("=16si")
#: Room for what the kernel says about one datagram.
ANCILLARY_SIZE = socket.CMSG_SPACE(_IPV6_INFO.size) + socket.CMSG_SPACE(_IPV4_INFO.size)

#: What `recvmsg` and `sendmsg` call ancillary data.
Ancillary = list[tuple[int, int, bytes]]


def prepare_datagrams(listener: socket.socket, family: int) -> None:
    """Let a listener for datagrams tell the address that each was sent to."""
    listener.setblocking(False)
    if family == 4:
        listener.setsockopt(socket.IPPROTO_IP, _IP_PKTINFO, 1)
    else:
        listener.setsockopt(socket.IPPROTO_IPV6, _IPV6_RECVPKTINFO, 1)


def asked_address(ancillary: Ancillary) -> str:
    """Return the address that a datagram was sent to; empty if the kernel did not tell."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO) and len(data) == _IPV4_INFO.size:
            return socket.inet_ntop(socket.AF_INET, _IPV4_INFO.unpack(data)[2])
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_PKTINFO) and len(data) == _IPV6_INFO.size:
            return socket.inet_ntop(socket.AF_INET6, _IPV6_INFO.unpack(data)[0])
    return ""


def reply_source(ancillary: Ancillary) -> Ancillary:
    """Return what makes an answer come from the address that a datagram was sent to."""
    for level, kind, data in ancillary:
        if (level, kind) == (socket.IPPROTO_IP, _IP_PKTINFO) and len(data) == _IPV4_INFO.size:
            return [(level, kind, _IPV4_INFO.pack(0, _IPV4_INFO.unpack(data)[2], bytes(4)))]
        if (level, kind) == (socket.IPPROTO_IPV6, _IPV6_PKTINFO) and len(data) == _IPV6_INFO.size:
            return [(level, kind, _IPV6_INFO.pack(_IPV6_INFO.unpack(data)[0], 0))]
    return []
