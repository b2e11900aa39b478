"""Datagrams of programs: each flow has a socket of its own, connected to the one peer that it hears from.

A flow is what one socket of a program sends to one destination: its address and port, and the address and
port that it asked for. The first datagram of a flow is judged and dialled like a connection, and counts as
one; it waits meanwhile, with a few that follow it. The kernel passes an answer to the flow's socket only if
it comes from the address and port that were dialled, and the program gets it from the address that it asked
for.

Programs decide how many flows there are, so they are bounded: a further one ends the one whose program was
silent the longest. A datagram that is not allowed is recorded and dropped: this process cannot send ICMP. One
that the network has no room for is dropped, as networks do.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from typing import NamedTuple

from stockade.egress.active_rules import ActiveRules, ConnectionJudge, Destination, RulesInForce, denial_of
from stockade.egress.bounds import EgressBounds
from stockade.egress.client_checks import HeldBytes
from stockade.egress.datagram_sockets import ANCILLARY_SIZE, Ancillary, asked_address, reply_source
from stockade.egress.dialer import DialError, choose_addresses, reason_for
from stockade.egress.listeners import BATCH
from stockade.egress.network_budget import HostBudget, NetworkBudget
from stockade.egress.outgoing_connections import OutgoingConnections
from stockade.egress.records import ConnectionRecord, RecordWriter

#: Larger than any datagram.
_SIZE = 65_536
#: How many datagrams of a flow wait until it is dialled, and how many bytes of all flows.
_WAITING, _HELD_SIZE = 16, 1024 * 1024
#: For how long a flow that could not be dialled takes datagrams and drops them, before it is dialled anew.
_RETRY_SECONDS = 2.0
#: How often flows that were silent for too long are looked for.
_SWEEP_SECONDS = 5.0


class FlowKey(NamedTuple):
    """What tells one flow from all others; the listener has the port that was asked for."""

    listener: int
    client: str
    client_port: int
    asked: str


class DatagramFlow:
    """One flow: from the first datagram, which waits until a peer is dialled, to the last."""

    __slots__ = (
        "active", "address", "budget", "client", "destination", "failed", "listener", "outside", "record",
        "rules", "source", "waiting",
    )  # fmt: skip

    def __init__(
        self, listener: socket.socket, client: tuple[object, ...], source: Ancillary, destination: Destination
    ) -> None:
        self.listener, self.client, self.source = listener, client, source
        self.destination = destination
        self.waiting: list[bytes] = []
        self.failed = False
        self.active = 0.0
        #: Once it is dialled: the socket, the peer's address, the record, and the rules that allowed it.
        self.outside: socket.socket | None = None
        self.address = ""
        self.record: ConnectionRecord | None = None
        self.budget: HostBudget | None = None
        self.rules: ActiveRules | None = None


class DatagramFlows:
    """The flows of one sandbox."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        bounds: EgressBounds,
        rules: RulesInForce,
        judge: ConnectionJudge,
        outgoing: OutgoingConnections,
        limits: NetworkBudget,
        records: RecordWriter,
    ) -> None:
        self._loop, self._bounds = loop, bounds
        self._rules, self._judge = rules, judge
        self._outgoing, self._limits, self._records = outgoing, limits, records
        #: The one whose program was silent the longest comes first.
        self._flows: dict[FlowKey, DatagramFlow] = {}
        self._dialling: set[asyncio.Task[None]] = set()
        self._held = HeldBytes(_HELD_SIZE)

    @property
    def dialling(self) -> bool:
        """Whether datagrams wait until a peer is dialled."""
        return bool(self._dialling)

    def receive(self, listener: socket.socket, port: int) -> None:
        """Pass on the next datagrams of programs that a listener of `prepare_datagrams` has."""
        for _ in range(BATCH):
            try:
                data, ancillary, _, client = listener.recvmsg(_SIZE, ANCILLARY_SIZE)
            except OSError:
                return
            address = asked_address(ancillary)
            if not address:
                continue
            key = FlowKey(listener.fileno(), client[0], client[1], address)
            flow = self._flows.pop(key, None)
            if flow is None or not self._is_allowed(key, flow):
                flow = self._begin(key, listener, client, reply_source(ancillary), port)
            if flow is not None:
                self._flows[key] = flow
                flow.active = self._loop.time()
                self._send(key, flow, data)

    def _begin(
        self, key: FlowKey, listener: socket.socket, client: tuple[object, ...], source: Ancillary, port: int
    ) -> DatagramFlow | None:
        """Judge the first datagram of a flow, and begin to dial if the rules allow it."""
        destination, decision = self._judge.judge("", key.asked, port, udp=True)
        rule = self._rules.active.place(decision.rule)
        if not decision.allowed:
            self._records.refuse(*destination, denial_of(decision), rule=rule, kind="udp")
            return None
        if len(self._dialling) >= self._bounds.flows // 4:
            self._records.refuse(*destination, "limit", kind="udp")
            return None
        if len(self._flows) >= self._bounds.flows:
            oldest = next(iter(self._flows))
            self._end(oldest, self._flows[oldest])
        flow = DatagramFlow(listener, client, source, destination)
        task = self._loop.create_task(self._dial(key, flow, rule))
        self._dialling.add(task)
        task.add_done_callback(self._dialling.discard)
        return flow

    async def _dial(self, key: FlowKey, flow: DatagramFlow, rule: int) -> None:
        """Connect a flow to its peer and send what waits, or record why there is none."""
        destination = flow.destination
        try:
            flow.outside, flow.address = await self._outgoing.dial_datagrams(destination)
        except DialError as error:
            self._records.refuse(
                destination.name, error.address or destination.address, destination.port, error.reason,
                rule=error.rule if error.denied else rule,
                verdict="denied" if error.denied else "failed", kind="udp",
            )  # fmt: skip
            flow.failed = True
            self._loop.call_later(_RETRY_SECONDS, self._forget_failed, key, flow)
        else:
            if self._flows.get(key) is not flow:  # ended meanwhile
                flow.outside.close()
                return
            flow.record = self._records.flow(destination.name, flow.address, destination.port, rule)
            flow.budget = self._limits.of_host(destination.name or destination.address)
            flow.rules = self._rules.active
            self._loop.add_reader(flow.outside.fileno(), self._read, key, flow)
        finally:
            waiting, flow.waiting = flow.waiting, []
            self._held.add(-sum(map(len, waiting)))
        for data in waiting:
            self._send(key, flow, data)

    def _forget_failed(self, key: FlowKey, flow: DatagramFlow) -> None:
        if self._flows.get(key) is flow:
            del self._flows[key]

    def _is_allowed(self, key: FlowKey, flow: DatagramFlow) -> bool:
        """Whether the rules still allow a flow, because they may have changed; it ends if they do not."""
        rules = self._rules.active
        if flow.rules is None or flow.rules is rules:
            return True
        flow.rules = rules
        allowed = rules.decide(flow.destination, udp=True).allowed
        if allowed and flow.destination.name:
            allowed = bool(
                choose_addresses((flow.address,), flow.destination.port, rules.set, udp=True).addresses
            )
        if not allowed:
            self._end(key, flow)
        return allowed

    def _send(self, key: FlowKey, flow: DatagramFlow, data: bytes) -> None:
        """Send a datagram of a program to its peer, or let it wait for one."""
        if flow.outside is None or flow.record is None:
            if flow.failed or len(flow.waiting) >= _WAITING:
                return
            if self._held.add(len(data)):
                flow.waiting.append(data)
            else:
                self._held.add(-len(data))
            return
        if flow.budget is not None and not flow.budget.spend("upload", len(data)):
            self._end(key, flow, "denied", flow.budget.refusal("upload"))
            return
        try:
            flow.outside.send(data)
        except BlockingIOError:
            return
        except OSError as error:
            self._end_after(key, flow, error)
            return
        flow.record.add(len(data), 0)

    def _read(self, key: FlowKey, flow: DatagramFlow) -> None:
        """Pass on the next answers of a peer."""
        for _ in range(BATCH):
            if flow.outside is None or flow.record is None or not self._is_allowed(key, flow):
                return
            try:
                data = flow.outside.recv(_SIZE)
            except BlockingIOError:
                return
            except OSError as error:
                self._end_after(key, flow, error)
                return
            if flow.budget is not None and not flow.budget.spend("download", len(data)):
                self._end(key, flow, "denied", flow.budget.refusal("download"))
                return
            # The program's socket may be gone, or have no room.
            with contextlib.suppress(OSError):
                flow.listener.sendmsg([data], flow.source, 0, flow.client)
            flow.record.add(0, len(data))
            flow.active = self._loop.time()

    def _end_after(self, key: FlowKey, flow: DatagramFlow, error: OSError) -> None:
        """End a flow whose peer cannot be reached; a datagram that is too large is only dropped."""
        if error.errno not in (errno.EMSGSIZE, errno.ENOBUFS):
            self._end(key, flow, "failed", reason_for(error))

    def _end(self, key: FlowKey, flow: DatagramFlow, verdict: str = "allowed", reason: str = "") -> None:
        """End a flow; the next datagram of its program begins another."""
        if self._flows.get(key) is flow:
            del self._flows[key]
        if flow.outside is not None and flow.record is not None:
            self._loop.remove_reader(flow.outside.fileno())
            flow.outside.close()
            flow.outside = None
            flow.record.close(verdict, reason)

    def sweep(self) -> None:
        """End the flows that were idle for too long, again and again."""
        limit = self._loop.time() - self._bounds.flow_idle
        for key, flow in list(self._flows.items()):
            if flow.active < limit:
                self._end(key, flow)
        self._loop.call_later(min(_SWEEP_SECONDS, max(self._bounds.flow_idle / 4, 0.05)), self.sweep)

    def close(self) -> None:
        """End all flows, so that no record stays open."""
        for task in self._dialling:
            task.cancel()
        for key, flow in list(self._flows.items()):
            self._end(key, flow)
