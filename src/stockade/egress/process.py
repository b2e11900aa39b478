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

Ports that the sandbox publishes work the other way: a client on the host connects to a listener of the host,
init connects inside and passes the socket out, and the bytes are relayed alike.

With another set of ports comes another egress process, because Landlock's rules cannot be widened. This one
then hands over its listeners and its names, and relays what is under way until it has ended.

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
from functools import partial
from typing import Any

from stockade.egress.active_rules import (
    ConnectionJudge,
    RulesInForce,
)
from stockade.egress.admission import Admission
from stockade.egress.bounds import bounds_of
from stockade.egress.connection_servers import ConnectionServers
from stockade.egress.connection_table import ConnectionTable
from stockade.egress.decoders.dns import (
    NameBudget,
)
from stockade.egress.dialer import (
    ResolverClient,
)
from stockade.egress.inner_connections import InnerConnections
from stockade.egress.listeners import Listeners
from stockade.egress.name_service import NameService, prepare_datagrams
from stockade.egress.names import WRITTEN_SIZE, SyntheticNames
from stockade.egress.network_budget import SPENT_SIZE, NetworkBudget
from stockade.egress.outgoing_connections import OutgoingConnections
from stockade.egress.publication import Publication
from stockade.egress.questions import Questions
from stockade.egress.records import RecordWriter
from stockade.egress.relay import PipePool
from stockade.egress.secrets import MOST_VALUES, SecretStore
from stockade.egress.upstream import UpstreamProxies
from stockade.errors import StockadeError
from stockade.policy.net_rules import DNS_PORT, PROXY_PORT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.egress.termination.connection import HttpTermination
    from stockade.egress.termination.messages import HttpExchange, RequestHead


#: A control message with all rules, and its descriptors: records, nudge, resolver, listeners.
_MESSAGE_SIZE = 1024 * 1024
_DESCRIPTORS = 253
_WRITE_SIZE = 1024 * 1024
#: The most certificates of roots.
_ROOTS_SIZE = 4 * 1024 * 1024
#: At the end: how long bytes may take to leave, how long then servers may take to end, and a look at both.
_DRAIN_SECONDS, _LAST_ANSWERS_SECONDS, _DRAIN_STEP = 2.0, 0.25, 0.01


class EgressLoop:
    """Decides, dials and relays for one sandbox."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        control: socket.socket,
        message: dict[str, Any],
        handed: list[int],
    ) -> None:
        self._loop, self._control = loop, control
        self._bounds = bounds_of(message)
        self._secrets = SecretStore()
        self._load_secrets(message)
        self._rules = RulesInForce(message)
        taken = iter(handed)
        records, self._nudge = next(taken), next(taken)
        self._records = RecordWriter(records, self._wake_supervisor)
        resolver = (
            ResolverClient(loop, socket.socket(fileno=next(taken))) if message.get("resolver", True) else None
        )
        self._names = SyntheticNames()
        self._budget = NameBudget(spent=_spent(message))
        self._limits = NetworkBudget(message.get("limits", {}))
        pool = PipePool()
        self._connections = ConnectionTable(loop, self._bounds)
        self._listeners = Listeners(loop, self._records, control)
        tcp = [(port, socket.socket(fileno=next(taken))) for port, _ in message["tcp"]]
        udp = [(family, socket.socket(fileno=next(taken))) for family in message["udp"]]
        published = [(port, socket.socket(fileno=next(taken))) for port in message.get("publish", ())]
        inside = InnerConnections(loop, socket.socket(fileno=next(taken))) if published else None
        has_proxy = message.get("proxy") is True
        upstream = UpstreamProxies(message.get("upstream", {}))
        #: Asks the user about connections that no rule covers; None if the policy or nobody can be asked.
        self._questions = Questions(loop, socket.socket(fileno=next(taken))) if message.get("ask") else None
        ports = {port for port, _ in message["tcp"]} - {DNS_PORT, PROXY_PORT if has_proxy else 0}
        judge = ConnectionJudge(self._rules, self._names, ports, asks=self._questions is not None)
        outgoing = OutgoingConnections(
            loop,
            self._rules,
            self._records,
            resolver,
            upstream,
            self._budget,
            self._limits,
            self._bounds.dial,
        )
        self._name_service = NameService(
            loop, self._rules, judge, self._names, self._records,
            ipv6=message.get("ipv6") is not False, seconds=self._bounds.query,
        )  # fmt: skip
        self.termination: HttpTermination | None = None
        if "http" in message:
            roots = next(taken) if message["http"] else -1
            self.termination = self._make_termination(roots, message["http"])
        if "names" in message:
            names = next(taken)
            self._names.read(os.pread(names, min(message["names"], WRITTEN_SIZE), 0))
            self._limits.take_over(os.pread(names, min(message["spent"], SPENT_SIZE), WRITTEN_SIZE))
            os.close(names)
        servers = ConnectionServers(
            loop, self._bounds, self._connections, outgoing, self._limits, pool, self.termination
        )
        admission = Admission(
            loop, self._records, self._rules, judge, self._connections, outgoing, servers,
            self._name_service, self._questions, proxy=has_proxy, seconds=self._bounds.hello,
        )  # fmt: skip
        for port, listener in tcp:
            self._listeners.listen(listener, port, admission.begin)
        for family, listener in udp:
            prepare_datagrams(listener, family)
            self._listeners.watch(listener, partial(self._name_service.answer_datagrams, listener))
        if inside is not None:
            publication = Publication(loop, self._records, self._connections, pool, inside, self._bounds.dial)
            for port, listener in published:
                self._listeners.listen(listener, port, partial(publication.begin, port=port))
        control.setblocking(False)
        loop.add_reader(control, self._read_control)
        self._connections.sweep()

    def _make_termination(self, roots: int, size: int) -> HttpTermination:
        """Make what ends TLS: its authority, and the roots of servers if they are not the system's."""
        # The template of an egress process that ends TLS has loaded it.
        from stockade.egress.termination.connection import HttpTermination

        trusted = b""
        if roots >= 0:
            trusted = os.pread(roots, min(size, _ROOTS_SIZE), 0)
            os.close(roots)
        made = HttpTermination(self._loop, self._records, lambda: self._rules.active, trusted)
        if self._secrets:
            made.exchange = self._exchange
        return made

    def _exchange(self, head: RequestHead) -> HttpExchange:
        """Return what puts values into a request that the rules have allowed, and out of its response."""
        from stockade.egress.termination.secret_exchange import SecretExchange

        return SecretExchange(self._secrets, head, partial(self._records.secret, head.host, head.port))

    # The supervisor

    def _load_secrets(self, message: dict[str, Any]) -> None:
        """Take the secrets that a message describes; their values are the next packet."""
        if described := message.get("secrets"):
            scrap = bytearray(MOST_VALUES)
            taken: list[int] = []

            def fill(room: memoryview) -> int:
                taken.append(self._control.recv_into(room))
                return taken[0]

            self._control.setblocking(True)
            try:
                self._secrets.load(described, fill)
            finally:
                # Values that found no memory must not be taken for the next message.
                if not taken:
                    self._control.recv_into(scrap)
                    scrap[:] = bytes(MOST_VALUES)
                self._control.setblocking(False)

    def _read_control(self) -> None:
        try:
            text, handed, _, _ = socket.recv_fds(self._control, _MESSAGE_SIZE, 1)
        except BlockingIOError:
            return
        except OSError:
            text, handed = b"", []
        if not text:
            self._loop.remove_reader(self._control)
            now = self._loop.time()
            # Two turns later, so that everything that programs have sent until now has been seen.
            self._loop.call_soon(
                self._loop.call_soon, self._drain, now + _DRAIN_SECONDS, now + _LAST_ANSWERS_SECONDS
            )
            return
        try:
            message = json.loads(text)
            if message.get("handover"):
                self._hand_over(handed[0])
                return
            if "rules" in message:
                self._rules.replace(message)
            self._load_secrets(message)
            answer: dict[str, object] = {"ok": True}
        except (ValueError, KeyError, TypeError, IndexError, OSError, StockadeError) as error:
            answer = {"error": str(error)[:200]}
        finally:
            for descriptor in handed:
                os.close(descriptor)
        # Two turns later, so that what happened before the message is in the records when its answer comes.
        self._loop.call_soon(self._loop.call_soon, self._reply, json.dumps(answer).encode())

    def _reply(self, answer: bytes) -> None:
        with contextlib.suppress(OSError):
            self._control.send(answer)

    def _hand_over(self, names: int) -> None:
        """Give the listeners and the names to the process that takes over, and relay only what is under way.

        The names go to a file in memory: there can be more of them than a message has room for.
        """
        written = self._names.written()
        _write_all(names, written, 0)
        spent = self._limits.hand_over(busy=bool(self._connections))
        _write_all(names, spent, WRITTEN_SIZE)
        answer = {"names": len(written), "budget": self._budget.spent, "spent": len(spent)}
        socket.send_fds(self._control, [json.dumps(answer).encode()], self._listeners.descriptors())
        self._listeners.close()
        # Their next questions are for the other process, which alone knows all names from now on.
        self._name_service.close()
        self._connections.end_when_empty()

    def _drain(self, late: float, last: float) -> None:
        """Pass on what programs have sent before their end, then stop; `last` is for servers to end too."""
        now = self._loop.time()
        relays = self._connections.unfinished()
        for relay in relays:
            if relay is not None and relay.outgoing.is_idle():
                relay.abort(reason="ended")
        held = 0 if self._questions is None else self._questions.held
        dialled = relays.count(None) > self._connections.silent + held
        if dialled or any(one is not None and not one.outgoing.ended for one in relays):
            last = now + _LAST_ANSWERS_SECONDS
        elif not any(one is not None for one in relays):
            last = now
        if now < min(late, last):
            self._loop.call_later(_DRAIN_STEP, self._drain, late, last)
        else:
            self._loop.stop()

    def close(self) -> None:
        """End all relays, so that no record stays open, and wipe what is secret."""
        self._secrets.clear()
        self._connections.close()

    def _wake_supervisor(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._nudge, 1)


def main(control: int) -> None:
    """Serve one sandbox until the supervisor closes the control socket."""
    connection = socket.socket(fileno=control)
    connection.setblocking(True)
    # Before the message, because the supervisor has other things to do until it sends that.
    loop = asyncio.SelectorEventLoop()
    text, handed, flags, _ = socket.recv_fds(connection, _MESSAGE_SIZE, _DESCRIPTORS)
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


def _spent(message: dict[str, Any]) -> tuple[int, int]:
    """Return what another egress process of this sandbox has spent of the budget for names."""
    names, long = message.get("budget", (0, 0))
    return max(0, int(names)), max(0, int(long))


def _write_all(descriptor: int, data: bytes, offset: int) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(descriptor, data[at : at + _WRITE_SIZE], offset + at)
