"""Connections to the ports of a sandbox, from any process that holds the socket of a publisher."""

from __future__ import annotations

import _socket as socket
import errno
import os

import msgspec

from stockade.gate import wire

#: By family: 0 tries IPv4 first and then IPv6.
FAMILIES = {0: wire.CONNECT_ANY, 4: wire.CONNECT_IPV4, 6: wire.CONNECT_IPV6}


class InnerConnection(msgspec.Struct, frozen=True):
    """Init's answer to one request: a descriptor, or -1 and why there is none."""

    number: int
    #: A non-blocking TCP socket. It may still be connecting: it is connected once it can be written to.
    descriptor: int
    error: int


class Publisher(wire.Channel):
    """The outer end of a socket that `Connection.serve_publisher` handed to init.

    Init answers in order. It reads no request while a few answers wait to be received.
    """

    def ask(self, port: int, *, family: int = 0, number: int = 0) -> None:
        """Ask for a connection to a port on the sandbox's loopback address; the answer repeats `number`."""
        self._send(wire.REQUEST.pack(wire.REQUEST_CONNECT, FAMILIES[family], port, number, 0))

    def receive_connection(self) -> InnerConnection | None:
        """Wait for the next answer; None when init has ended or serves another publisher."""
        reply = self.receive()
        if reply is None:
            return None
        descriptors = reply.descriptors
        if reply.kind == wire.REPLY_CONNECTED and len(descriptors) == (reply.error == 0):
            if not descriptors:
                return InnerConnection(reply.index, -1, reply.error)
            if _is_tcp(descriptors[0]):
                return InnerConnection(reply.index, descriptors[0], 0)
        for descriptor in descriptors:
            os.close(descriptor)
        return InnerConnection(reply.index, -1, errno.EBADMSG)


def _is_tcp(descriptor: int) -> bool:
    try:
        end = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        return end.family in (socket.AF_INET, socket.AF_INET6) and end.proto == socket.IPPROTO_TCP
    finally:
        end.detach()
