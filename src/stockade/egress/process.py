"""The egress process: what a copy of the warm template runs for one sandbox.

It has a control socket to the supervisor and, from the first message there, its records, the resolver's
socket and the listeners that the resident opened in the sandbox's network namespace. Every address leads to
these listeners inside, so a connection's own address is the destination that the program asked for. A
synthetic address means a name (see `names`), any other means itself.

    destination          looked at before a byte leaves             then
    name, port 443       TLS hello: SNI is the name                 dialled, relayed
    name, port 80        HTTP: the Host of every request            dialled after the first, relayed
    name, other ports    nothing; a TLS hello must name the name    dialled at once, relayed
    name, HTTP rules     TLS ends here: every request (termination) dialled, encoded anew
    address, tcp://      nothing                                    dialled at once, relayed
    port 53              DNS, unless a rule allows the destination  answered here
    datagrams, udp://    nothing                                    a socket for each flow, relayed

Ports that the sandbox publishes work the other way: a client on the host connects to a listener of the host,
init connects inside and passes the socket out, and the bytes are relayed alike.

With another set of ports comes another egress process, because Landlock's rules cannot be widened. This one
then hands over its listeners and its names, and relays what is under way until it has ended.

Each part is a module: `active_rules` decides, `listeners` accept, `name_service` answers names, `admission`
says what becomes of a connection, `connection_servers` serve it by its kind, `outgoing_connections` dial,
`connection_table` counts what is under way, `datagram_flows` relay datagrams, `publication` serves published
ports, `control` carries out the supervisor's orders, and `handover` is what the next process takes over. They
are made and tied together here.

Everything that comes from inside is hostile. An error ends the connection that it belongs to and nothing
else. The process opens no file, starts no thread and imports nothing once `main` runs: it has no files. It
prints nothing; what it did is in the records. The end of the control socket ends it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

from stockade.egress.active_rules import ConnectionJudge, RulesInForce
from stockade.egress.admission import Admission
from stockade.egress.bounds import bounds_of
from stockade.egress.connection_servers import ConnectionServers
from stockade.egress.connection_table import ConnectionTable
from stockade.egress.control import MESSAGE_SIZE, SupervisorOrders, load_secrets
from stockade.egress.datagram_flows import DatagramFlows
from stockade.egress.datagram_sockets import prepare_datagrams
from stockade.egress.dialer import ResolverClient
from stockade.egress.handover import Inheritance
from stockade.egress.inner_connections import InnerConnections
from stockade.egress.listeners import Listeners
from stockade.egress.name_service import NameService
from stockade.egress.outgoing_connections import OutgoingConnections
from stockade.egress.publication import Publication
from stockade.egress.questions import Questions
from stockade.egress.records import RecordWriter
from stockade.egress.relay import PipePool
from stockade.egress.secrets import SecretStore
from stockade.egress.upstream import UpstreamProxies
from stockade.errors import StockadeError
from stockade.policy.net_rules import DNS_PORT, PROXY_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.egress.termination.http_termination import HttpTermination
    from stockade.egress.termination.messages import HttpExchange, RequestHead

#: The descriptors of the first message: records, nudge, resolver, listeners and the like.
_DESCRIPTORS = 253
#: The most certificates of roots.
_ROOTS_SIZE = 4 * 1024 * 1024


class EgressLoop:
    """The parts of the egress process of one sandbox, made and tied together by the first message."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        control: socket.socket,
        message: dict[str, Any],
        handed: list[int],
    ) -> None:
        bounds = bounds_of(message)
        self._secrets = SecretStore()
        load_secrets(self._secrets, control, message)
        rules = RulesInForce(message)
        # The descriptors come in this order.
        taken = iter(handed)
        records = RecordWriter(next(taken), partial(_wake, next(taken)))
        resolver = ResolverClient(loop, _take_socket(taken)) if message.get("resolver", True) else None
        tcp = [(port, _take_socket(taken)) for port, _ in message["tcp"]]
        udp = [(port, family, _take_socket(taken)) for port, family in message["udp"]]
        published = [(port, _take_socket(taken)) for port in message.get("publish", ())]
        inside = InnerConnections(loop, _take_socket(taken)) if published else None
        questions = Questions(loop, _take_socket(taken)) if message.get("ask") else None
        roots = next(taken) if message.get("http") else -1
        inheritance = Inheritance(message)
        if "names" in message:
            inheritance.read(next(taken), message)

        has_proxy = message.get("proxy") is True
        ports = {port for port, _ in tcp} - {DNS_PORT, PROXY_PORT if has_proxy else 0}
        limits, pool = inheritance.limits, PipePool()
        judge = ConnectionJudge(rules, inheritance.names, ports, asks=questions is not None)
        self.termination: HttpTermination | None = None
        if "http" in message:
            trusted = _read_roots(roots, message["http"]) if roots >= 0 else b""
            self.termination = _make_termination(loop, records, rules, self._secrets, trusted)
        self._connections = ConnectionTable(loop, bounds)
        listeners = Listeners(loop, records, control)
        names = NameService(
            loop, rules, judge, inheritance.names, records,
            ipv6=message.get("ipv6") is not False, seconds=bounds.query,
        )  # fmt: skip
        outgoing = OutgoingConnections(
            loop, rules, records, resolver, UpstreamProxies(message.get("upstream", {})),
            inheritance.name_budget, limits, bounds.dial,
        )  # fmt: skip
        servers = ConnectionServers(loop, bounds, self._connections, outgoing, limits, pool, self.termination)
        admission = Admission(
            loop, records, rules, judge, self._connections, outgoing, servers, names, questions,
            proxy=has_proxy, seconds=bounds.hello,
        )  # fmt: skip

        for port, listener in tcp:
            listeners.listen(listener, port, admission.begin)
        self._flows = DatagramFlows(loop, bounds, rules, judge, outgoing, limits, records)
        for port, family, listener in udp:
            prepare_datagrams(listener, family)
            is_names = port == DNS_PORT
            read = names.answer_datagrams if is_names else partial(self._flows.receive, port=port)
            listeners.watch(listener, partial(read, listener))
        if inside is not None:
            publication = Publication(loop, records, self._connections, pool, inside, bounds.dial)
            for port, listener in published:
                listeners.listen(listener, port, partial(publication.begin, port=port))
        orders = SupervisorOrders(
            loop, control, rules, self._secrets, inheritance, listeners, names, self._connections,
            self._flows, questions,
        )  # fmt: skip
        control.setblocking(False)
        loop.add_reader(control, orders.read)
        self._connections.sweep()
        self._flows.sweep()

    def close(self) -> None:
        """End all relays, so that no record stays open, and wipe what is secret."""
        self._secrets.clear()
        self._connections.close()
        self._flows.close()


def main(control: int) -> None:
    """Serve one sandbox until the supervisor closes the control socket."""
    connection = socket.socket(fileno=control)
    connection.setblocking(True)
    # Before the message, because the supervisor has other things to do until it sends that.
    loop = asyncio.SelectorEventLoop()
    text, handed, flags, _ = socket.recv_fds(connection, MESSAGE_SIZE, _DESCRIPTORS)
    if not text or flags & (socket.MSG_CTRUNC | socket.MSG_TRUNC):
        return
    message = json.loads(text)
    # Relays are cycles of objects; the template, which copies share, has nothing to collect.
    gc.enable()
    # What goes wrong is an end of one connection, which its record tells.
    loop.set_exception_handler(_ignore)
    try:
        process = EgressLoop(loop, connection, message, handed)
    except StockadeError as error:
        # Memory could not be locked: the supervisor says why nothing starts.
        connection.setblocking(True)
        connection.send(json.dumps({"error": error.message[:200]}).encode())
        return
    connection.setblocking(True)
    ready: dict[str, object] = {"ready": True}
    if process.termination is not None:
        ready["authority"] = process.termination.authority.pem
    connection.send(json.dumps(ready).encode())
    connection.setblocking(False)
    loop.run_forever()
    process.close()


def _ignore(_loop: asyncio.AbstractEventLoop, _context: dict[str, Any]) -> None:
    pass


def _take_socket(taken: Iterator[int]) -> socket.socket:
    return socket.socket(fileno=next(taken))


def _wake(nudge: int) -> None:
    """Tell the supervisor that there are new records."""
    with contextlib.suppress(OSError):
        os.eventfd_write(nudge, 1)


def _read_roots(descriptor: int, size: int) -> bytes:
    try:
        return os.pread(descriptor, min(size, _ROOTS_SIZE), 0)
    finally:
        os.close(descriptor)


def _make_termination(
    loop: asyncio.AbstractEventLoop,
    records: RecordWriter,
    rules: RulesInForce,
    secrets: SecretStore,
    roots: bytes,
) -> HttpTermination:
    """Make what ends TLS: its authority, and the roots of servers if they are not the system's."""
    # The template of an egress process that ends TLS has loaded it.
    from stockade.egress.termination.http_termination import HttpTermination

    made = HttpTermination(loop, records, lambda: rules.active, roots)
    if secrets:
        made.exchange = partial(_exchange, secrets, records)
    return made


def _exchange(secrets: SecretStore, records: RecordWriter, head: RequestHead) -> HttpExchange:
    """Return what puts values into a request that the rules have allowed, and out of its response."""
    from stockade.egress.termination.secret_exchange import SecretExchange

    return SecretExchange(secrets, head, partial(records.secret, head.host, head.port))
