"""What becomes of a connection from inside: refused, answered, asked about, or served.

A program connects straight to an address, or asks the proxy inside for a place. Both ways lead to the same
decision. A connection that no rule covers waits for the user's answer, if the policy asks.
"""

from __future__ import annotations

import asyncio
import socket

from stockade.egress.active_rules import (
    HTTP_PORT,
    TLS_PORT,
    ConnectionJudge,
    Destination,
    RulesInForce,
    denial_of,
)
from stockade.egress.client_checks import RefusalError
from stockade.egress.client_sockets import destination_of, say_and_close
from stockade.egress.connection_servers import ConnectionServer, ConnectionServers
from stockade.egress.connection_table import ConnectionTable
from stockade.egress.decoders.proxy_requests import ProxyRequestError
from stockade.egress.dialer import DialError, reason_for
from stockade.egress.name_service import NameService
from stockade.egress.outgoing_connections import OutgoingConnections
from stockade.egress.proxy_service import ProxyRequest, read_request
from stockade.egress.questions import BY_RULE, ONCE, Questions
from stockade.egress.records import RecordWriter
from stockade.egress.relay import reset
from stockade.policy.net_rule_set import NetDecision
from stockade.policy.net_rules import DNS_PORT, PROXY_ADDRESSES, PROXY_PORT


class Admission:
    """Decides about each connection of one sandbox, and has it served."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        records: RecordWriter,
        rules: RulesInForce,
        judge: ConnectionJudge,
        connections: ConnectionTable,
        outgoing: OutgoingConnections,
        servers: ConnectionServers,
        names: NameService,
        questions: Questions | None,
        *,
        proxy: bool,
        seconds: float,
    ) -> None:
        self._loop, self._records = loop, records
        self._rules, self._judge = rules, judge
        self._connections, self._outgoing = connections, outgoing
        self._servers, self._names = servers, names
        #: Asks the user about connections that no rule covers; None if the policy or nobody can be asked.
        self._questions = questions
        #: Whether there is a proxy inside, and how long its clients may take to say what they want.
        self._has_proxy, self._seconds = proxy, seconds

    def begin(self, connection: socket.socket) -> None:
        """Decide about a connection that was just accepted inside."""
        connection.setblocking(False)
        address, port = destination_of(connection)
        if self._has_proxy and port == PROXY_PORT and address in PROXY_ADDRESSES:
            self._begin_proxied(connection, address)
            return
        destination, decision = self._judge.judge("", address, port)
        name = destination.name
        if not decision.allowed and port == DNS_PORT:
            self._names.begin(connection)
            return
        if not decision.allowed and name and self._judge.can_ask(name, port):
            self._begin_question(connection, destination)
            return
        rule = self._rules.active.place(decision.rule)
        if not decision.allowed:
            self._refuse(connection, destination, denial_of(decision), rule)
            return
        if not self._servers.can_serve(decision):
            self._refuse(connection, destination, "failed", rule)
            return
        looks = bool(name) and not decision.opaque
        silent = looks and (decision.scheme == "https" or port in (TLS_PORT, HTTP_PORT))
        if self._connections.is_full(silent=silent):
            self._refuse(connection, destination, "limit")
            return
        if silent:
            self._connections.expect_words(connection)
        serve = self._servers.server_for(decision, port, looks)
        self._connections.start(self._serve(connection, destination, rule, serve))

    def _begin_proxied(self, connection: socket.socket, address: str) -> None:
        if self._connections.is_full(silent=True):
            self._refuse(connection, Destination("", address, PROXY_PORT), "limit")
            return
        self._connections.expect_words(connection)
        self._connections.start(self._serve_proxied(connection, address))

    async def _serve_proxied(self, connection: socket.socket, address: str) -> None:
        """Read what a client of the proxy asks for, decide about that, and serve it like any connection."""
        try:
            async with asyncio.timeout(self._seconds):
                asked = await read_request(self._loop, connection)
        except (ProxyRequestError, OSError) as error:
            self._records.refuse("", address, PROXY_PORT, "no proxy request")
            self._connections.release(connection)
            if isinstance(error, ProxyRequestError) and error.reply:
                await say_and_close(self._loop, connection, error.reply)
            reset(connection)
            return
        self._connections.release(connection)
        try:
            await self._serve_target(connection, asked)
        finally:
            reset(connection)

    async def _serve_target(self, connection: socket.socket, asked: ProxyRequest) -> None:
        destination, decision = self._judge.judge(*asked.target)
        name, _, port = destination
        if not decision.allowed and name and self._judge.can_ask(name, port):
            await self._ask_and_serve(connection, destination, asked)
        elif not decision.allowed:
            rule = self._rules.active.place(decision.rule)
            self._records.refuse(*destination, denial_of(decision), rule=rule)
            await say_and_close(self._loop, connection, asked.refused)
        else:
            await self._accept_target(connection, destination, decision, asked.accepted)

    async def _accept_target(
        self, connection: socket.socket, destination: Destination, decision: NetDecision, words: bytes
    ) -> None:
        rule = self._rules.active.place(decision.rule)
        if not self._servers.can_serve(decision):
            self._refuse(connection, destination, "failed", rule)
            return
        if words:
            connection.send(words)
        looks, port = bool(destination.name) and not decision.opaque, destination.port
        if looks and (decision.scheme == "https" or port in (TLS_PORT, HTTP_PORT)):
            self._connections.expect_words(connection)
        serve = self._servers.server_for(decision, port, looks)
        await self._serve(connection, destination, rule, serve)

    def _begin_question(self, connection: socket.socket, destination: Destination) -> None:
        if self._connections.is_full():
            self._refuse(connection, destination, "limit")
            return
        self._connections.start(self._ask_and_serve(connection, destination))

    async def _ask_and_serve(
        self, connection: socket.socket, destination: Destination, proxied: ProxyRequest | None = None
    ) -> None:
        """Hold a connection that no rule covers until the user has answered."""
        assert self._questions is not None
        name, _, port = destination
        try:
            answer = await self._questions.ask(name, port, connection)
        except BaseException:
            reset(connection)
            raise
        # The rules may have changed meanwhile, and deny rules win over the user's answer.
        rules = self._rules.active
        decision = rules.decide(destination)
        open_question = rules.is_open_question(name, port)
        refused = answer if open_question and answer != BY_RULE else denial_of(decision)
        if not decision.allowed and not (open_question and answer == ONCE):
            self._records.refuse(*destination, refused, rule=rules.place(decision.rule))
            if proxied is not None:
                await say_and_close(self._loop, connection, proxied.refused)
            reset(connection)
            return
        task = asyncio.current_task()
        assert task is not None
        if answer == ONCE:
            self._outgoing.allowed_once.add(task)
        try:
            accepted = b"" if proxied is None else proxied.accepted
            await self._accept_target(connection, destination, decision, accepted)
        finally:
            self._outgoing.allowed_once.discard(task)

    def _refuse(
        self, connection: socket.socket, destination: Destination, reason: str, rule: int = -1
    ) -> None:
        self._records.refuse(*destination, reason, rule=rule)
        reset(connection)

    async def _serve(
        self, connection: socket.socket, destination: Destination, rule: int, serve: ConnectionServer
    ) -> None:
        """Serve a connection, and record why if it never came about."""
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await serve(connection, destination, rule)
        except RefusalError as error:
            self._records.refuse(*destination, error.reason, rule=rule)
            if error.last_words:
                await say_and_close(self._loop, connection, error.last_words)
        except DialError as error:
            self._records.refuse(
                destination.name, error.address or destination.address, destination.port, error.reason,
                rule=error.rule if error.denied else rule,
                verdict="denied" if error.denied else "failed",
            )  # fmt: skip
        except Exception as error:
            reason = reason_for(error) if isinstance(error, OSError) else "failed"
            self._records.refuse(*destination, reason, rule=rule, verdict="failed")
        finally:
            self._connections.release(connection)
            reset(connection)
