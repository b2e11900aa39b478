"""Connections to servers, for programs: by the rules of this moment, within the budgets, through proxies.

The rules may change between any two steps, so they are asked before the name is resolved, before an address
is dialled and once the server is connected. A connection spends its budgets in the same order: the connection
itself, then its name, if a wildcard covers that.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence

from stockade.egress.active_rules import Destination, RulesInForce, denial_of
from stockade.egress.client_sockets import inside_ends
from stockade.egress.decoders.dns import NameBudget
from stockade.egress.dialer import (
    DialError,
    ResolverClient,
    choose_addresses,
    connect_datagrams,
    connect_first,
    is_address,
    reason_for,
)
from stockade.egress.network_budget import NetworkBudget
from stockade.egress.records import ConnectionRecord, RecordWriter
from stockade.egress.relay import reset
from stockade.egress.upstream import UpstreamProxies, UpstreamProxy, open_tunnel
from stockade.policy.net_rule_set import NetDecision


class OutgoingConnections:
    """Dials what the rules allow; raises DialError for everything else."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rules: RulesInForce,
        records: RecordWriter,
        resolver: ResolverClient | None,
        upstream: UpstreamProxies,
        names: NameBudget,
        limits: NetworkBudget,
        seconds: float,
    ) -> None:
        self._loop, self._rules, self._records = loop, rules, records
        #: None without rules; the proxies of the host.
        self._resolver, self._upstream = resolver, upstream
        self._names, self._limits = names, limits
        #: How long it may take to resolve and connect.
        self._seconds = seconds
        #: The connections that the user has allowed once.
        self.allowed_once: set[asyncio.Task[None]] = set()
        #: The connections whose requests are judged.
        self.judged: set[asyncio.Task[None]] = set()

    async def dial(self, destination: Destination, known: str = "") -> tuple[socket.socket, str]:
        """Connect to a server, for the connection that the current task serves; return also its address.

        `known` is the address of an earlier connection to the same server.
        """
        self._check_rules(destination)
        self._spend_connection(destination)
        addresses: Sequence[str] = (destination.address,)
        try:
            async with asyncio.timeout(self._seconds):
                if (proxy := self._proxy_for(destination)) is not None:
                    addresses = await self._addresses_of(proxy.host)
                    return await self._dial_through(proxy, addresses, destination)
                if destination.name:
                    addresses = await self._resolve(destination, known)
                return await connect_first(self._loop, addresses, destination.port)
        except OSError as error:
            raise DialError(reason_for(error), address=addresses[0]) from None

    async def dial_datagrams(self, destination: Destination) -> tuple[socket.socket, str]:
        """Return a socket for datagrams to a peer, and its address; none goes through a proxy of the host."""
        self._check_rules(destination, udp=True)
        self._spend_connection(destination)
        addresses: Sequence[str] = (destination.address,)
        try:
            async with asyncio.timeout(self._seconds):
                if destination.name:
                    addresses = await self._resolve(destination, udp=True)
                    self._check_rules(destination, udp=True)
                return connect_datagrams(addresses, destination.port)
        except OSError as error:
            raise DialError(reason_for(error), address=addresses[0]) from None

    def record(
        self, inside: socket.socket, dialled: tuple[socket.socket, str], destination: Destination, rule: int
    ) -> tuple[socket.socket, ConnectionRecord]:
        """Begin the record of a connection to a server, if the rules still allow it."""
        outside, address = dialled
        try:
            self._check_rules(destination)
        except DialError:
            reset(outside)
            raise
        record = self._records.connection(
            destination.name, address, destination.port, rule, inside_ends(inside)
        )
        return outside, record

    def _check_rules(self, destination: Destination, *, udp: bool = False) -> NetDecision:
        """Refuse what the rules do not allow any more: they may have changed since it was accepted."""
        rules = self._rules.active
        decision = rules.decide(destination, udp=udp)
        allowed_once = asyncio.current_task() in self.allowed_once and rules.is_open_question(
            destination.name, destination.port
        )
        if not decision.allowed and not allowed_once:
            raise DialError(denial_of(decision), denied=True, rule=rules.place(decision.rule))
        if decision.scheme and asyncio.current_task() not in self.judged:
            raise DialError("no rule", denied=True)
        return decision

    def _spend_connection(self, destination: Destination) -> None:
        budget = self._limits.of_host(destination.name or destination.address)
        if budget is None:
            return
        if clause := budget.exhausted():
            raise DialError(clause, denied=True)
        budget.spend("connections")

    def _spend_name(self, name: str, rule: int) -> None:
        """Count a name below a wildcard: each could carry a few bytes out."""
        rules = self._rules.active
        wildcard = rules.wildcard(rule)
        if wildcard and not self._names.spend(name, wildcard):
            raise DialError("too many names", denied=True, rule=rules.place(rule))

    def _proxy_for(self, destination: Destination) -> UpstreamProxy | None:
        name, address, port = destination
        decision = self._check_rules(destination)
        proxy = self._upstream.choose(name, address, port, opaque=decision.opaque)
        if proxy is not None and name:
            self._spend_name(name, decision.rule)
        return proxy

    async def _addresses_of(self, host: str) -> Sequence[str]:
        """Return the addresses of a proxy of the host, which no rule need name."""
        if is_address(host):
            return (host,)
        if self._resolver is None:
            raise DialError("resolver failed")
        return await self._resolver.addresses(host)

    async def _dial_through(
        self, proxy: UpstreamProxy, addresses: Sequence[str], destination: Destination
    ) -> tuple[socket.socket, str]:
        connection, address = await connect_first(self._loop, addresses, proxy.port)
        try:
            host = destination.name or destination.address
            await open_tunnel(self._loop, connection, proxy, host, destination.port)
        except BaseException:
            connection.close()
            raise
        return connection, address

    async def _resolve(
        self, destination: Destination, known: str = "", *, udp: bool = False
    ) -> Sequence[str]:
        """Return the addresses of a name that may be dialled, by the rules of this moment."""
        name = destination.name
        self._spend_name(name, self._check_rules(destination, udp=udp).rule)
        if self._resolver is None:
            raise DialError("resolver failed")
        found = [known] if known else await self._resolver.addresses(name)
        rules = self._rules.active
        choice = choose_addresses(found, destination.port, rules.set, udp=udp)
        if not choice.addresses:
            refusal = choice.refusal or DialError("resolver failed")
            refusal.rule = rules.place(refusal.rule)
            raise refusal
        return choice.addresses
