"""Ports of the host that lead to a server in a sandbox: `--publish 8080:80`.

The supervisor listens on the host before anything is launched, so that a port that is in use is an error
before anything runs. The egress process accepts and relays; the supervisor keeps no copy of a listener, so
once the egress process has ended, the kernel refuses connections.

A policy cannot publish: it says what a program may reach, and this lets others in. So it is an option of the
call alone, and no project's file can ask for it.
"""

from __future__ import annotations

import _socket as socket
import errno
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from stockade.errors import PolicyError, SetupError
from stockade.gate import wire
from stockade.policy.net_rules import DNS_PORT, parse_rule, ports_of
from stockade.runs.network.network_evidence import SO_NETNS_COOKIE

#: The most ports of one sandbox, and how many connections may wait.
MOST_PORTS, BACKLOG = 64, 1024
LOOPBACK = "127.0.0.1"
#: Below it only root may listen.
PRIVILEGED = "/proc/sys/net/ipv4/ip_unprivileged_port_start"
EXAMPLE = (
    'write "8080:80" for port 80 inside on port 8080 of this host, or "0.0.0.0:8080:80" for all addresses'
)


class PublishedPort(NamedTuple):
    """A port inside, and the address and port of the host that lead there."""

    host: str
    host_port: int
    port: int

    @property
    def address(self) -> str:
        """The host's side, as a URL has it: 127.0.0.1:8080 or [::1]:8080."""
        return f"[{self.host}]:{self.host_port}" if ":" in self.host else f"{self.host}:{self.host_port}"

    def __str__(self) -> str:
        return f"{self.address}:{self.port}"


def parse_published(text: object) -> PublishedPort:
    """Parse `[HOST:]PORT:PORT`, or `PORT` for the same port on both sides.

    >>> str(parse_published("8080")), str(parse_published("[::1]:0:80"))
    ('127.0.0.1:8080:8080', '[::1]:0:80')
    """
    if not isinstance(text, str):
        raise PolicyError(f"publish = {text!r:.200}: is not text", hint=EXAMPLE)
    host, ports = _split_host(text)
    words = ports.split(":")
    if len(words) > 2 or (len(words) == 1 and host):
        raise _unfit(text, "is not [HOST:]PORT:PORT")
    host_port = _port(words[0], text)
    port = _port(words[-1], text)
    if not port:
        raise _unfit(text, "port 0 inside is no port")
    return PublishedPort(_address(host, text) if host else LOOPBACK, host_port, port)


def _split_host(text: str) -> tuple[str, str]:
    if text.startswith("["):
        host, closed, rest = text[1:].partition("]")
        if not closed or not rest.startswith(":") or ":" not in host:
            raise _unfit(text, "is not [HOST]:PORT:PORT")
        return host, rest[1:]
    if text.count(":") > 2:
        raise _unfit(text, "an IPv6 address needs brackets", "write [::1]:8080:80")
    host, colon, rest = text.partition(":")
    return (host, rest) if colon and ":" in rest else ("", text)


def _port(word: str, text: str) -> int:
    if word.isascii() and word.isdigit() and len(word) <= 5 and int(word) <= 65535:
        return int(word)
    raise _unfit(text, f"{word!r} is not a port" if word else "a port is missing")


def _address(host: str, text: str) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.inet_ntop(family, socket.inet_pton(family, host))
    except (OSError, ValueError):
        hint = f"write {LOOPBACK} or [::1]" if host.lower() == "localhost" else ""
        raise _unfit(text, f"{host!r} is not an address of this host", hint) from None


def _unfit(text: str, why: str, hint: str = "") -> PolicyError:
    return PolicyError(f"publish = {text!r:.200}: {why}", hint=hint or EXAMPLE)


def parse_all(texts: object, net: Sequence[str]) -> tuple[PublishedPort, ...]:
    """Validate what a call wants to publish, for a sandbox with this `net`, and return it."""
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise PolicyError(f"publish = {texts!r:.200}: is not a list", hint='write publish=["8080:80"]')
    found = tuple(map(parse_published, texts))
    if len(found) > MOST_PORTS:
        raise PolicyError(f"publish: a sandbox publishes at most {MOST_PORTS} ports", hint="publish fewer")
    for number, one in enumerate(found):
        if one.host_port and one.address in {other.address for other in found[:number]}:
            raise PolicyError(f"publish: {one.address} is named twice", hint="publish it on another port")
    if found and net == "open":
        raise PolicyError(
            'publish: with net = "open" a program listens on this host itself',
            hint="leave out publish, or leave out the host's network",
        )
    taken = {DNS_PORT, *ports_of([parse_rule(rule) for rule in net])} if net else set()
    for one in found:
        if one.port in taken:
            raise taken_by_rules(one.port)
    return found


def taken_by_rules(port: int) -> PolicyError:
    """Return the error for a port inside that the egress listens on, so that no server can."""
    if port == DNS_PORT:
        what = f"publish: with network rules, Stockade answers port {DNS_PORT} inside itself"
    else:
        what = f"publish: a rule of net lets port {port} out, so no server inside can listen on it"
    return PolicyError(what, hint="let the server inside use another port, such as 8080")


def refuse_without_namespace(kind: str, backend: str) -> None:
    """Refuse to publish where the sandbox has no network of its own."""
    if kind == wire.KIND_PLAIN:
        raise PolicyError(
            f"publish: the backend {backend} has no network of its own that could be reached",
            hint="leave out publish, or the backend: `stockade doctor` shows what the others need",
        )


class PublishedListeners:
    """The host's side: what is published, and the sockets until the egress process has them."""

    def __init__(self, wanted: Sequence[PublishedPort]) -> None:
        self._sockets: list[socket.socket] = []
        self.ports: tuple[PublishedPort, ...] = ()
        try:
            for one in wanted:
                listener = _listen(one)
                self._sockets.append(listener)
                self.ports += (one._replace(host_port=listener.getsockname()[1]),)
        except BaseException:
            self.close()
            raise

    @classmethod
    def again(cls, ports: tuple[PublishedPort, ...], descriptors: Sequence[int]) -> PublishedListeners:
        """Return copies of listeners that an egress process has handed back."""
        found = cls(())
        found.ports = ports
        found._sockets = [socket.socket(fileno=os.dup(descriptor)) for descriptor in descriptors]
        return found

    @property
    def descriptors(self) -> tuple[int, ...]:
        """One for each port, in the same order; none once they are closed."""
        return tuple(listener.fileno() for listener in self._sockets)

    def close(self) -> None:
        """Close the supervisor's copies."""
        while self._sockets:
            self._sockets.pop().close()


def _listen(one: PublishedPort) -> socket.socket:
    family = socket.AF_INET6 if ":" in one.host else socket.AF_INET
    try:
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise _cannot_listen(one, error) from None
    try:
        # Connections of an earlier server that have ended do not keep the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((one.host, one.host_port))
        listener.listen(BACKLOG)
        return listener
    except OSError as error:
        listener.close()
        raise _cannot_listen(one, error) from None


def _cannot_listen(one: PublishedPort, error: OSError) -> SetupError:
    why, hint = error.strerror or "failed", ""
    if error.errno == errno.EADDRINUSE:
        why, hint = "the port is in use", f"publish another port, or 0 for any free one: 0:{one.port}"
    elif error.errno == errno.EACCES:
        first = _first_unprivileged()
        why = f"an ordinary user cannot listen on ports below {first}"
        hint = f"publish a higher port: {max(8000, first) + one.port % 1000}:{one.port}"
    elif error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        why, hint = "this host has no such address", f"leave out the address, which means {LOOPBACK}"
    return SetupError(
        f"cannot publish {one.address}: {why}", stage="publish", errno=error.errno or 0, hint=hint
    )


def _first_unprivileged() -> int:
    try:
        with open(PRIVILEGED, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 1024


def check_listener(descriptor: int, one: PublishedPort) -> bool:
    """Whether a descriptor that an egress process has handed back is the listener of a published port."""
    try:
        found = socket.socket(fileno=descriptor)
    except OSError:
        return False
    try:
        own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            network = own.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8)
        finally:
            own.close()
        return (
            (found.type, found.proto) == (socket.SOCK_STREAM, socket.IPPROTO_TCP)
            and found.getsockname()[:2] == (one.host, one.host_port)
            and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
            and found.getsockopt(socket.SOL_SOCKET, SO_NETNS_COOKIE, 8) == network
            and not os.get_blocking(descriptor)
        )
    except OSError:
        return False
    finally:
        found.detach()
