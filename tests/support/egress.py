"""Egress processes that run other code than their own."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from stockade.runs.io.eventloop import Events, drive
from stockade.runs.network import egress_process
from stockade.runs.network.egress_process import EgressProcess

#: The first lines of every egress process.
CONFINED = """\
import sys
from stockade.egress import confined
confined.confine(3, sys.argv[1])
"""
#: Then it answers each message with what its code makes of it: `answer` is a function of the message.
ANSWERING = """
import json, os, socket
supervisor = socket.socket(fileno=3)
while data := supervisor.recv(65536):
    supervisor.send(json.dumps(answer(json.loads(data))).encode())
"""


def launched(code: str, ports: tuple[int, ...] = (443,), *, udp: bool = False) -> EgressProcess:
    """A copy of the template that runs the code."""
    with Events() as events:
        home = os.environ["STOCKADE_HOME"]
        return drive(egress_process.launch_in_copy(ports, events, code, home=home, udp=udp), events)


@contextlib.contextmanager
def running(code: str, ports: tuple[int, ...] = (443,), *, udp: bool = False) -> Iterator[EgressProcess]:
    """The same, as long as the block lasts."""
    process = launched(code, ports, udp=udp)
    try:
        yield process
    finally:
        with Events() as events:
            drive(process.closed(events), events)


def ask(process: EgressProcess, message: dict[str, Any]) -> dict[str, Any]:
    """Its answer to a message."""
    with Events() as events:
        return drive(process.ask(message, (), events), events)
