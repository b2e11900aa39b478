"""The supervisor's request for the network of a sandbox that may reach some names and addresses.

A child of the resident gate enters the sandbox's network namespace, routes every address to its
loopback device and opens the listeners on which all connections then arrive (gate/src/network.c).
"""

from __future__ import annotations

import _socket as socket
import errno
import os
import select
import time

import msgspec

from stockade.errors import PolicyError, SetupError
from stockade.gate import wire
from stockade.linux.descriptors import CREDENTIALS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.gate.client import Resident

#: Resolvers ask this one, over UDP and TCP.
DNS_PORT = 53
#: A request takes milliseconds; one that takes this long hangs.
NETWORK_SECONDS = 10.0
#: What sending to a resident that has ended gives.
GONE = (errno.EPIPE, errno.ECONNRESET, errno.EBADF, errno.ENOTCONN)
#: The resident's families, in the order of its reply.
FAMILIES = (4, 6)


class NetworkListeners(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptors of the sockets on which a sandbox's connections, datagrams and DNS questions arrive."""

    #: Port, family (4 or 6) and descriptor of each TCP listener, by family and port.
    tcp: list[tuple[int, int, int]]
    #: The same of each UDP socket.
    udp: list[tuple[int, int, int]]
    #: Whether the sandbox has IPv6; otherwise no IPv6 address is routed.
    ipv6: bool
    #: The network namespace of the first listener, as the kernel told the resident's child.
    namespace: int
    #: A netlink socket that answers questions about the sockets of that namespace: see `linux/sock_diag.py`.
    questions: int

    @property
    def sockets(self) -> tuple[int, ...]:
        """What the egress process gets: the TCP listeners, then the UDP sockets."""
        return tuple(descriptor for _, _, descriptor in (*self.tcp, *self.udp))

    @property
    def descriptors(self) -> tuple[int, ...]:
        """All of them: the sockets, the namespace, the socket for questions."""
        return (*self.sockets, self.namespace, self.questions)

    def close(self) -> None:
        """Close every descriptor. From then on connections of the sandbox are refused."""
        for descriptor in self.descriptors:
            os.close(descriptor)


class NetworkRequest(wire.Channel):
    """A request that is under way: its `fileno` becomes readable when `receive_listeners` will not block."""

    _room = socket.CMSG_SPACE((1 + 2 * wire.MAX_PORTS + 1) * 4) + socket.CMSG_SPACE(CREDENTIALS.size)

    def __init__(
        self,
        resident: socket.socket,
        namespace: int,
        ports: tuple[int, ...],
        datagrams: tuple[int, ...] = (),
        *,
        more: bool = False,
        loopback: bool = False,
    ) -> None:
        #: Whether nothing is routed that was not routed before.
        self.is_routed = more or loopback
        self.loopback = loopback
        own = () if self.is_routed else (DNS_PORT,)
        self.tcp, self.udp = (tuple(sorted({*some, *own})) for some in (ports, datagrams))
        every = (*self.tcp, *self.udp)
        if not 1 <= len(every) <= wire.MAX_PORTS or not 1 <= min(every) <= max(every) <= 65535:
            raise ValueError(f"at most {wire.MAX_PORTS - 2} ports from 1 to 65535: {ports} {datagrams}")
        padding = [0] * (wire.MAX_PORTS - len(every))
        flags = wire.NETWORK_LOOPBACK if loopback else wire.NETWORK_MORE if more else 0
        message = wire.RESIDENT_REQUEST.pack(
            wire.RESIDENT_NETWORK, len(every), *every, *padding, len(self.udp), flags
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = {wire.NETWORK_SOCKET: theirs.fileno(), wire.NETWORK_NAMESPACE: namespace}
        try:
            super().__init__(ours)
            passed = tuple(order[place] for place in range(wire.NETWORK_DESCRIPTORS))
            wire.send_with_descriptors(resident, message, passed)
        except BaseException as error:
            ours.close()
            if isinstance(error, OSError) and error.errno in GONE:
                # Another one would have no right over the namespaces that this one has made.
                raise _refused("the resident gate has ended") from error
            raise
        finally:
            theirs.close()

    def receive_listeners(self) -> NetworkListeners:
        """Wait for the reply and return its listeners, or raise SetupError; the request is over then."""
        try:
            reply = self.receive()
        finally:
            self.close()
        if reply is None:
            raise _refused("the resident gate did not answer")
        count = len(self.tcp) + len(self.udp)
        if reply.kind == wire.REPLY_NETWORK and reply.status in (1, 2) and reply.index == count:
            families = FAMILIES[: reply.status]
            if len(reply.descriptors) == 2 + len(families) * count:
                return self._listeners(families, reply.descriptors)
        for descriptor in reply.descriptors:
            os.close(descriptor)
        if reply.kind != wire.REPLY_FAILED:
            raise _refused("the resident gate's answer is not one")
        if self.is_routed and reply.error == errno.EADDRINUSE:
            so = "nothing else can listen there" if self.loopback else "no rule can let it out"
            raise PolicyError(
                f"port {reply.index} is taken by a program in the sandbox, so {so}",
                hint="end that program, or let it use another port",
            )
        raise _refused(f"{reply.text}: {os.strerror(reply.error)}", reply.error)

    def _listeners(self, families: tuple[int, ...], descriptors: tuple[int, ...]) -> NetworkListeners:
        namespace, *rest, questions = descriptors
        tcp, udp = ([(port, family) for family in families for port in some] for some in (self.tcp, self.udp))
        return NetworkListeners(
            tcp=[(*wanted, found) for wanted, found in zip(tcp, rest, strict=False)],
            udp=[(*wanted, found) for wanted, found in zip(udp, rest[len(tcp) :], strict=True)],
            ipv6=len(families) == 2,
            namespace=namespace,
            questions=questions,
        )

    def wait(self, seconds: float = NETWORK_SECONDS) -> NetworkListeners:
        """Wait for the listeners; for callers that have no event loop."""
        poll = select.poll()
        poll.register(self.fileno(), select.POLLIN)
        until = time.monotonic() + seconds
        while not poll.poll(max(0.0, until - time.monotonic()) * 1000):
            if time.monotonic() >= until:
                self.close()
                raise _refused(f"the resident gate did not answer within {seconds:g} s")
        return self.receive_listeners()


def open_listener(resident: Resident, namespace: int, port: int) -> int:
    """Return a TCP listener on a port of 127.0.0.1 in the network namespace of a living sandbox.

    `resident` is the sandbox's resident gate, and `namespace` a descriptor of its network namespace
    (`LaunchedSandbox.connection.resident` and `network_fd`). The listener does not block. Programs of every
    sandbox in that namespace can connect, whether or not there are rules for the network.
    """
    opened = resident.open_network(namespace, (port,), loopback=True).wait()
    (_, _, listener), *rest = opened.tcp
    try:
        if rest or opened.ipv6 or os.fstat(opened.namespace).st_ino != os.fstat(namespace).st_ino:
            raise _refused("the listener is not in the sandbox's network namespace")
        return os.dup(listener)
    finally:
        opened.close()


def _refused(why: str, number: int = 0) -> SetupError:
    hint = "`stockade doctor` tries out what the gate needs"
    if number == errno.EMFILE:
        hint = "raise the limit of open files: `ulimit -n`"
    return SetupError(
        f"the network of the sandbox could not be set up: {why}", stage="network", errno=number, hint=hint
    )
