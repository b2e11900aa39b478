"""Evidence of a sandbox's network with rules: the routes, addresses and listeners as the kernel shows them.

A child of the resident gate has set them up and looked at them once. Before the first program starts,
the supervisor compares by itself whatever it can: each descriptor by its socket's options, and routes and
addresses by the tables in /proc of the sandbox's first process. Only the network namespace of a socket is
something that the kernel does not tell an ordinary user; there the child passes it, and the supervisor
compares the sockets' cookies.
"""

from __future__ import annotations

import _socket as socket
import errno
import fcntl
import os

import msgspec

from stockade.errors import SetupError
from stockade.gate.network import DNS_PORT, NetworkListeners

#: The kernel's numbers, which Python does not name. A cookie is unique to a network namespace (Linux 5.14).
SO_NETNS_COOKIE, SIOCGSKNS = 71, 0x894C
NETLINK_SOCK_DIAG = 4
IP_PKTINFO, IPV6_FREEBIND = 8, 78
RTF_LOCAL = 0x80000000
#: The last bytes of a line in ipv6_route for the entry that refuses whatever has no route.
NO_ROUTE = "ffffffff"

#: Destinations and kinds of the IPv4 routes that must be there, and of one that older kernels add.
IPV4_ROUTES = {
    ("0.0.0.0", "/0 host LOCAL"),
    ("127.0.0.0", "/8 host LOCAL"),
    ("127.0.0.1", "/32 host LOCAL"),
    ("127.255.255.255", "/32 link BROADCAST"),
    ("198.18.0.2", "/32 host LOCAL"),
}
IPV4_OPTIONAL = {("127.0.0.0", "/32 link BROADCAST")}
#: IPv6 addresses as the kernel writes them, with the length of the prefix.
ANY, LOOPBACK, OWN = f"{0:032x}/00", f"{1:032x}/80", "fd005afe000000000000000000000002/80"


class NetworkEvidence(msgspec.Struct, frozen=True, kw_only=True):
    """What the supervisor observed of a sandbox's network before its first program."""

    #: The inode number of the network namespace.
    namespace: int
    #: What every destination of each family is routed to: "local 0.0.0.0/0", "local ::/0".
    routes: tuple[str, ...]
    addresses: tuple[str, ...]
    #: Each socket: "tcp4/443", "udp6/53".
    listeners: tuple[str, ...]


def observe_network(
    listeners: NetworkListeners,
    ports: tuple[int, ...],
    pid: int,
    namespace: int,
    datagrams: tuple[int, ...] = (),
) -> NetworkEvidence:
    """Compare a sandbox's listeners, routes and addresses with what its rules need, or raise SetupError.

    `ports` are those of TCP, and `datagrams` those of UDP. `pid` is the sandbox's first process, `namespace`
    the inode number of the network namespace that the sandbox was born in.
    """
    families = (4, 6) if listeners.ipv6 else (4,)
    for found, some in ((listeners.tcp, ports), (listeners.udp, datagrams)):
        wanted = [(port, family) for family in families for port in sorted({*some, DNS_PORT})]
        if [entry[:2] for entry in found] != wanted:
            raise _missing("there is not one listener for each port and family")
    cookies = set()
    for port, family, descriptor in listeners.tcp:
        cookies.add(_check_socket(descriptor, f"tcp{family}/{port}", family, port, listens=True))
    for port, family, descriptor in listeners.udp:
        cookies.add(_check_socket(descriptor, f"udp{family}/{port}", family, port, listens=False))
    cookies.add(_check_questions(listeners.questions))
    _check_namespace(listeners, cookies, namespace)
    _check_ipv4(_read(f"/proc/{pid}/net/fib_trie"))
    _check_ipv6(
        _read(f"/proc/{pid}/net/ipv6_route", optional=True),
        _read(f"/proc/{pid}/net/if_inet6", optional=True),
        listeners.ipv6,
    )
    return NetworkEvidence(
        namespace=namespace,
        routes=("local 0.0.0.0/0", "local ::/0")[: len(families)],
        addresses=("198.18.0.2/32", "fd00:5afe::2/128")[: len(families)],
        listeners=(
            *(f"tcp{family}/{port}" for port, family, _ in listeners.tcp),
            *(f"udp{family}/{port}" for port, family, _ in listeners.udp),
        ),
    )


def _check_socket(descriptor: int, name: str, family: int, port: int, *, listens: bool) -> int:
    """Check one socket's address and options, and return the cookie of its network namespace."""
    if os.get_blocking(descriptor):
        raise _missing(f"{name} blocks")
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise _missing(f"{name} is not a socket: {error.strerror}") from None
    try:
        wanted_family = socket.AF_INET if family == 4 else socket.AF_INET6
        wanted_type = socket.SOCK_STREAM if listens else socket.SOCK_DGRAM
        wanted_protocol = socket.IPPROTO_TCP if listens else socket.IPPROTO_UDP
        if (found.family, found.type, found.proto) != (wanted_family, wanted_type, wanted_protocol):
            raise _missing(f"{name} is a socket of another kind")
        if found.getsockname()[:2] != ("0.0.0.0" if family == 4 else "::", port):
            raise _missing(f"{name} is bound to {found.getsockname()[:2]}")
        for level, option, value, what in _options(family, listens):
            if found.getsockopt(level, option) != value:
                raise _missing(f"{name}: {what} is not {value}")
        return _cookie(found)
    finally:
        found.detach()


def _check_questions(descriptor: int) -> int:
    """Check the socket for questions about sockets, and return the cookie of its network namespace."""
    if os.get_blocking(descriptor):
        raise _missing("the socket for questions blocks")
    try:
        found = socket.socket(fileno=descriptor)
    except OSError as error:
        raise _missing(f"the socket for questions is not a socket: {error.strerror}") from None
    try:
        if (found.family, found.proto) != (socket.AF_NETLINK, NETLINK_SOCK_DIAG):
            raise _missing("the socket for questions is of another kind")
        return _cookie(found)
    finally:
        found.detach()


def _options(family: int, listens: bool) -> list[tuple[int, int, int, str]]:
    wanted = [
        (socket.SOL_SOCKET, socket.SO_ACCEPTCONN, int(listens), "SO_ACCEPTCONN"),
        (socket.SOL_SOCKET, socket.SO_REUSEADDR, 0, "SO_REUSEADDR"),
        (socket.SOL_SOCKET, socket.SO_REUSEPORT, 0, "SO_REUSEPORT"),
    ]
    if family == 6:
        wanted.append((socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1, "IPV6_V6ONLY"))
    if not listens and family == 4:
        wanted.append((socket.IPPROTO_IP, IP_PKTINFO, 1, "IP_PKTINFO"))
    if not listens and family == 6:
        wanted.append((socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1, "IPV6_RECVPKTINFO"))
        wanted.append((socket.IPPROTO_IPV6, IPV6_FREEBIND, 1, "IPV6_FREEBIND"))
    return wanted


def _cookie(found: socket.socket) -> int:
    try:
        return int.from_bytes(found.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8), "little")
    except OSError as error:
        what = f"the kernel does not tell a socket's network namespace: {error.strerror}"
        raise _missing(what, hint="rules for the network need Linux 5.14 or newer") from None


def _check_namespace(listeners: NetworkListeners, cookies: set[int], namespace: int) -> None:
    """Check that every socket is in the sandbox's network namespace."""
    own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        host = _cookie(own)
    finally:
        own.close()
    if len(cookies) != 1 or host in cookies:
        raise _missing("the listeners are not in one network namespace of their own")
    passed = os.fstat(listeners.namespace)
    if (passed.st_dev, passed.st_ino) != (os.stat("/proc/self/ns/net").st_dev, namespace):
        raise _missing("the listeners are not in the sandbox's network namespace")
    try:
        asked = fcntl.ioctl(listeners.tcp[0][2], SIOCGSKNS)
    except PermissionError:
        return  # not for an ordinary user, who has the answer that the resident's child got
    try:
        if os.fstat(asked).st_ino != namespace:
            raise _missing("the listeners are not in the sandbox's network namespace")
    finally:
        os.close(asked)


def _check_ipv4(table: str) -> None:
    found: set[tuple[str, str]] = set()
    address = ""
    for line in table.splitlines():
        words = line.split()
        if words[:1] == ["|--"] and len(words) == 2:
            address = words[1]
        elif words and words[0][0] == "/":
            found.add((address, " ".join(words)))
    if found - IPV4_OPTIONAL != IPV4_ROUTES:
        raise _different("IPv4 routes", found - IPV4_OPTIONAL ^ IPV4_ROUTES)


def _check_ipv6(routes: str, addresses: str, wanted: bool) -> None:
    found = set()
    for line in routes.splitlines():
        words = line.split()
        if len(words) != 10 or words[9] != "lo":
            raise _different("IPv6 routes", {("", line.strip())})
        if words[5] != NO_ROUTE:
            found.add((f"{words[0]}/{words[1]}", "local" if int(words[8], 16) & RTF_LOCAL else ""))
    # Those of the addresses themselves come from a task of the kernel's own, now or a moment later.
    found -= {(address, kind) for address in (LOOPBACK, OWN) for kind in ("local", "")}
    expected = {(ANY, "local")} if wanted else set()
    if found != expected:
        raise _different("IPv6 routes", found ^ expected)
    lines = [line.split() for line in addresses.splitlines()]
    held = {(f"{words[0]}/{words[2]}", words[-1]) for words in lines} - {(LOOPBACK, "lo")}
    owned = {(OWN, "lo")} if wanted else set()
    if held != owned:
        raise _different("IPv6 addresses", held ^ owned)


def _different(what: str, entries: set[tuple[str, str]]) -> SetupError:
    listed = ", ".join(" ".join(entry) for entry in sorted(entries))
    return _missing(f"the sandbox's {what} are not as they must be: {listed[:200]}")


def _read(path: str, *, optional: bool = False) -> str:
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError as error:
        if optional and error.errno == errno.ENOENT:
            return ""
        raise _missing(f"{path} cannot be read: {error.strerror}") from None


#: What a difference means that the machine alone cannot explain.
BUG = "this is a bug in Stockade or in this kernel; please report it with `stockade doctor --json`"


def _missing(what: str, hint: str = BUG) -> SetupError:
    return SetupError(f"the network is not set up as it must be: {what}", stage="evidence", hint=hint)
