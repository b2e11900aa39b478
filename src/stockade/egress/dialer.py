"""Connections to the outside: a name is resolved, each address is checked, the address checked is dialled.

The egress process cannot resolve names itself: it has no files. It asks the resolver, a process with the
host's view, over a SOCK_SEQPACKET socket. The resolver decides nothing; each address that it answers is
checked here against the rules, so that a name cannot lead into the host's own networks.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from stockade.egress.records import REASONS
from stockade.policy.net_addresses import forbidden_address
from stockade.policy.net_rule_set import NetDecision

#: The delay between two attempts to connect, as RFC 8305 recommends it.
ATTEMPT_DELAY = 0.25
#: How long the resolver may take; C libraries give up after 5 s for each of up to 3 servers, twice.
RESOLVER_TIMEOUT = 30.0
#: Requests under way at once, as the resolver's protocol has it; more wait.
REQUESTS = 8
#: The most addresses of a name that are looked at.
ADDRESSES = 32
_ANSWER_SIZE = 65_536
_ID = struct.Struct(">I")

_REASONS_BY_ERRNO = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "reset",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "unreachable",
    errno.EADDRNOTAVAIL: "unreachable",
    errno.ENETDOWN: "unreachable",
    errno.EAFNOSUPPORT: "unreachable",
    errno.ETIMEDOUT: "timed out",
    # Landlock: the port is not one that the egress may dial.
    errno.EACCES: "port not open",
    errno.EMFILE: "limit",
    errno.ENFILE: "limit",
    errno.ENOBUFS: "limit",
    errno.ENOMEM: "limit",
}
_REASONS_BY_ANSWER = {"not found": "name not found"}


class DialError(Exception):
    """Nothing was dialled, or no address answered; `reason` is one of `records.REASONS`."""

    def __init__(self, reason: str, *, denied: bool = False, rule: int = -1, address: str = "") -> None:
        super().__init__(reason)
        self.reason, self.denied, self.rule, self.address = reason, denied, rule, address


class AddressRules(Protocol):
    """What the dialer asks of the rules."""

    def for_address(self, ip: str, port: int, *, udp: bool = False) -> NetDecision:
        """Decide about an address by the rules for addresses."""

    def denies_address(self, ip: str, port: int) -> int:
        """Return the index of the rule that denies an address, or -1."""


class AddressChoice(NamedTuple):
    """The addresses of a name that may be dialled, and why the first of the others may not."""

    addresses: tuple[str, ...]
    refusal: DialError | None


def choose_addresses(
    found: Iterable[str], port: int, rules: AddressRules, *, udp: bool = False
) -> AddressChoice:
    """Check each address that a name resolved to; an address rule is what allows a private one."""
    allowed: list[str] = []
    refusal: DialError | None = None
    for address in found:
        if not is_address(address):
            continue
        denied = rules.denies_address(address, port)
        reason = "deny rule" if denied >= 0 else _forbidden(address, port, rules, udp)
        if not reason:
            allowed.append(address)
        elif refusal is None:
            refusal = DialError(reason, denied=True, rule=denied, address=address)
    return AddressChoice(tuple(dict.fromkeys(allowed)), refusal)


def is_address(address: str) -> bool:
    """Whether a text is an address, in the one spelling that everything here compares by."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.inet_ntop(family, socket.inet_pton(family, address)) == address
    except (OSError, ValueError):
        return False


def _forbidden(address: str, port: int, rules: AddressRules, udp: bool) -> str:
    why = forbidden_address(address)
    if not why or rules.for_address(address, port, udp=udp).allowed:
        return ""
    words = f"{why.split()[0]} address"
    return words if words in REASONS else "special address"


def interleave(addresses: Sequence[str]) -> list[str]:
    """Order addresses so that the families alternate, beginning with the first one's."""
    first = [one for one in addresses if (":" in one) == (":" in addresses[0])]
    second = [one for one in addresses if (":" in one) != (":" in addresses[0])]
    ordered = []
    while first or second:
        ordered += [first.pop(0)] if first else []
        ordered += [second.pop(0)] if second else []
    return ordered


def reason_for(error: OSError) -> str:
    """Return the words of a record for an error of the network."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return _REASONS_BY_ERRNO.get(error.errno or 0, "failed")


class ResolverClient:
    """Asks the resolver for the addresses of names; equal requests under way are one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
        self._loop, self._connection = loop, connection
        self._connection.setblocking(False)
        self._next = 0
        #: What was asked and not answered yet: by name, and by the number of the request.
        self._by_name: dict[str, asyncio.Future[list[str]]] = {}
        self._names: dict[int, tuple[str, asyncio.TimerHandle]] = {}
        self._waiting: deque[str] = deque()
        self._open = True
        loop.add_reader(connection, self._read)

    async def addresses(self, name: str) -> list[str]:
        """Return the addresses of a name, in the order of the host's resolver; raise DialError if none."""
        future = self._by_name.get(name)
        if future is None:
            if not self._open:
                raise DialError("resolver failed")
            future = self._by_name[name] = self._loop.create_future()
            # The failure of a request that nobody waits for any more is not an error of the program.
            future.add_done_callback(_retrieve)
            self._waiting.append(name)
            self._send()
        return await asyncio.shield(future)

    def _send(self) -> None:
        while self._waiting and len(self._names) < REQUESTS:
            name = self._waiting.popleft()
            self._next = (self._next + 1) % 2**32
            timer = self._loop.call_later(RESOLVER_TIMEOUT, self._expire, self._next)
            self._names[self._next] = name, timer
            try:
                self._connection.send(_ID.pack(self._next) + name.encode("ascii"))
            except (OSError, UnicodeError):
                self._fail(self._next, "resolver failed")

    def _read(self) -> None:
        try:
            answer = self._connection.recv(_ANSWER_SIZE)
        except BlockingIOError:
            return
        except OSError:
            answer = b""
        if not answer:
            self._end()
            return
        if len(answer) < _ID.size:
            return
        (number,) = _ID.unpack_from(answer)
        try:
            found, reason = _parse_answer(answer[_ID.size :])
        except (ValueError, RecursionError):
            found, reason = [], "resolver failed"
        if found:
            future = self._take(number)
            if future is not None:
                future.set_result(found)
        else:
            self._fail(number, reason)
        self._send()

    def _end(self) -> None:
        self._open = False
        self._loop.remove_reader(self._connection)
        self._waiting.clear()
        for future in list(self._by_name.values()):
            future.set_exception(DialError("resolver failed"))
        self._by_name.clear()
        self._names.clear()

    def _expire(self, number: int) -> None:
        self._fail(number, "timed out")
        self._send()

    def _take(self, number: int) -> asyncio.Future[list[str]] | None:
        name, timer = self._names.pop(number, ("", None))
        if timer is not None:
            timer.cancel()
        return self._by_name.pop(name, None)

    def _fail(self, number: int, reason: str) -> None:
        future = self._take(number)
        if future is not None:
            future.set_exception(DialError(reason))


def _retrieve(future: asyncio.Future[list[str]]) -> None:
    future.exception()


def _parse_answer(text: bytes) -> tuple[list[str], str]:
    answer = json.loads(text)
    found = answer.get("addresses") if isinstance(answer, dict) else None
    if isinstance(found, list) and found:
        return [one for one in found[:ADDRESSES] if isinstance(one, str)], ""
    error = answer.get("error") if isinstance(answer, dict) else None
    return [], _REASONS_BY_ANSWER.get(error if isinstance(error, str) else "", "resolver failed")


async def connect_first(
    loop: asyncio.AbstractEventLoop, addresses: Sequence[str], port: int
) -> tuple[socket.socket, str]:
    """Connect to the first address that answers (RFC 8305); return the socket and the address."""
    ordered = interleave(addresses)
    if len(ordered) == 1:
        return await _connect(loop, ordered[0], port), ordered[0]
    attempts: dict[asyncio.Task[socket.socket], str] = {}
    last: OSError = OSError(errno.EHOSTUNREACH, "")
    try:
        while ordered or attempts:
            if ordered:
                address = ordered.pop(0)
                attempts[loop.create_task(_connect(loop, address, port))] = address
            # A failure starts the next attempt at once.
            done, _ = await asyncio.wait(
                attempts, timeout=ATTEMPT_DELAY if ordered else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = attempts.pop(task)
                error = task.exception()
                if error is None:
                    # A second one that connected in the same moment is closed below.
                    for other in done:
                        if other in attempts and other.exception() is None:
                            other.result().close()
                    return task.result(), address
                if not isinstance(error, OSError):
                    raise error
                last = error
        raise last
    finally:
        for task in attempts:
            task.cancel()


async def _connect(loop: asyncio.AbstractEventLoop, address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        error = connection.connect_ex((address, port))
        if error == errno.EINPROGRESS:
            await wait_writable(loop, connection)
            error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, "")
    except BaseException:
        connection.close()
        raise
    return connection


def connect_datagrams(addresses: Sequence[str], port: int) -> tuple[socket.socket, str]:
    """Return a socket for datagrams to the first address that this machine has a way to, and the address."""
    last: OSError = OSError(errno.EHOSTUNREACH, "")
    for address in addresses:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            connection.connect((address, port))
            return connection, address
        except OSError as error:
            connection.close()
            last = error
    raise last


async def wait_writable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    """Wait until a socket can be written to, or has an error to fetch."""
    # By number: for a socket that it does not know yet, the selector formats an error with the socket's repr.
    future, number = loop.create_future(), connection.fileno()
    loop.add_writer(number, wake, future)
    try:
        await future
    finally:
        loop.remove_writer(number)


async def wait_readable(loop: asyncio.AbstractEventLoop, connection: socket.socket) -> None:
    """Wait until a socket has bytes, its end, or an error to fetch."""
    future, number = loop.create_future(), connection.fileno()
    loop.add_reader(number, wake, future)
    try:
        await future
    finally:
        loop.remove_reader(number)


def wake(future: asyncio.Future[None]) -> None:
    """Let what waits for a future go on."""
    if not future.done():
        future.set_result(None)
