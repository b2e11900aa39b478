"""The supervisor's orders to an egress process: other rules, other secrets, hand over, end.

They come over the control socket, one in each packet; the values of secrets are a packet of their own. An
answer leaves two turns of the loop later, when everything that happened before the order is in the records.
The end of the socket is the order to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from typing import Any

from stockade.egress.active_rules import RulesInForce
from stockade.egress.connection_table import ConnectionTable
from stockade.egress.datagram_flows import DatagramFlows
from stockade.egress.handover import Inheritance
from stockade.egress.listeners import Listeners
from stockade.egress.name_service import NameService
from stockade.egress.questions import Questions
from stockade.egress.secrets import MOST_VALUES, SecretStore
from stockade.errors import StockadeError

#: A message with all rules.
MESSAGE_SIZE = 1024 * 1024
#: At the end: how long bytes may take to leave, how long then servers may take to end, and a look at both.
_DRAIN_SECONDS, _LAST_ANSWERS_SECONDS, _DRAIN_STEP = 2.0, 0.25, 0.01


def load_secrets(secrets: SecretStore, control: socket.socket, message: dict[str, Any]) -> None:
    """Take the secrets that a message describes; their values are the next packet."""
    if described := message.get("secrets"):
        scrap = bytearray(MOST_VALUES)
        taken: list[int] = []

        def fill(room: memoryview) -> int:
            taken.append(control.recv_into(room))
            return taken[0]

        control.setblocking(True)
        try:
            secrets.load(described, fill)
        finally:
            # Values that found no memory must not be taken for the next message.
            if not taken:
                control.recv_into(scrap)
                scrap[:] = bytes(MOST_VALUES)
            control.setblocking(False)


class SupervisorOrders:
    """Reads the supervisor's orders and carries them out, on the parts that it is given."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        control: socket.socket,
        rules: RulesInForce,
        secrets: SecretStore,
        inheritance: Inheritance,
        listeners: Listeners,
        names: NameService,
        connections: ConnectionTable,
        flows: DatagramFlows,
        questions: Questions | None,
    ) -> None:
        self._loop, self._control = loop, control
        self._rules, self._secrets, self._inheritance = rules, secrets, inheritance
        self._listeners, self._names, self._connections = listeners, names, connections
        self._flows, self._questions = flows, questions

    def read(self) -> None:
        """Carry out the next order, because the control socket is readable."""
        try:
            text, handed, _, _ = socket.recv_fds(self._control, MESSAGE_SIZE, 1)
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
            load_secrets(self._secrets, self._control, message)
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

    def _hand_over(self, written: int) -> None:
        """Give listeners and names to the process that takes over, and relay only what is under way."""
        # They need the listeners, and begin anew in the other process with the next datagram of a program.
        self._flows.close()
        answer = self._inheritance.write(written, busy=len(self._connections) > 0)
        socket.send_fds(self._control, [json.dumps(answer).encode()], self._listeners.descriptors())
        self._listeners.close()
        # Their next questions are for the other process, which alone knows all names from now on.
        self._names.close()
        self._connections.end_when_empty()

    def _drain(self, late: float, last: float) -> None:
        """Pass on what programs have sent before their end, then stop; `last` is for servers to end too."""
        now = self._loop.time()
        relays = self._connections.unfinished()
        for relay in relays:
            if relay is not None and relay.outgoing.is_idle():
                relay.abort(reason="ended")
        held = 0 if self._questions is None else self._questions.held
        dialled = relays.count(None) > self._connections.silent + held or self._flows.dialling
        if dialled or any(one is not None and not one.outgoing.ended for one in relays):
            last = now + _LAST_ANSWERS_SECONDS
        elif not any(one is not None for one in relays):
            last = now
        if now < min(late, last):
            self._loop.call_later(_DRAIN_STEP, self._drain, late, last)
        else:
            self._loop.stop()
