"""Flows of datagrams: one socket each, bounded, ended when idle, and judged again when rules change."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stockade.egress.records import RawRecord
from support.egress_rig import SERVER, SERVER6, EgressRig

PORT = 5000
#: Sends what its arguments say from one socket each, waits for the answer, and goes on with the same sockets.
TALK = """
import socket, sys
def opened(host):
    family, _, _, _, place = socket.getaddrinfo(host, 5000, type=socket.SOCK_DGRAM)[0]
    one = socket.socket(family, socket.SOCK_DGRAM)
    # A connected socket takes answers from the address that it asked only.
    one.connect(place); one.settimeout(20)
    return one
def said(one, text=b'x', seconds=20):
    one.settimeout(seconds)
    try:
        one.send(text); return one.recv(65536) == text
    except TimeoutError:
        return None
"""


@contextmanager
def echo(rig: EgressRig, address: str = SERVER) -> Iterator[set[int]]:
    """Echo datagrams in the outer namespace; the ports from which they came."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    server = rig.outside.open(family, socket.SOCK_DGRAM, address, PORT)
    server.settimeout(0.1)
    ports: set[int] = set()
    ending = threading.Event()

    def serve() -> None:
        while not ending.is_set():
            try:
                data, client = server.recvfrom(65536)
            except TimeoutError:
                continue
            ports.add(client[1])
            server.sendto(data, client)

    worker = threading.Thread(target=serve)
    worker.start()
    try:
        yield ports
    finally:
        ending.set()
        worker.join()
        server.close()


def until(rig: EgressRig, enough: Callable[[list[RawRecord]], bool]) -> list[RawRecord]:
    late = time.monotonic() + 20
    while not enough(found := rig.records("udp")) and time.monotonic() < late:
        time.sleep(0.02)
    return found


def test_flows_are_bounded_and_the_one_that_was_silent_the_longest_ends(tmp_path: Path) -> None:
    rules = [f"udp://{SERVER}:{PORT}"]
    with EgressRig(tmp_path, rules, [], datagrams=[PORT], flows=8) as rig, echo(rig):
        before = len(os.listdir(f"/proc/{rig.pid}/fd"))
        said = rig.python(
            TALK + "many = [opened(sys.argv[1]) for _ in range(40)]\n"
            "print(all(map(said, many)), all(map(said, many)))\n",
            SERVER,
        )
        assert said == "True True"
        assert len(os.listdir(f"/proc/{rig.pid}/fd")) <= before + 8
        found = rig.records("udp")
        # Forty that began and, for the second round, forty more.
        assert len(found) == 80 and sum(one.open for one in found) <= 8
        assert rig.totals()[:2] == (80, 0) and rig.totals()[4:6] == (80, 80)


def test_an_idle_flow_ends_and_the_next_datagram_begins_another(tmp_path: Path) -> None:
    rules = ["udp://six.example:5000"]
    with (
        EgressRig(tmp_path, rules, [], datagrams=[PORT], flow_idle=0.3) as rig,
        echo(rig, SERVER6),
    ):
        rig.hosts["six.example"] = [SERVER6]
        said = rig.python(
            # On a busy machine an answer can be later than the end of its flow.
            TALK + "import time; one = opened('six.example')\n"
            "while not said(one, b'y' * 60000, 1): pass\n"
            "time.sleep(1)\n"
            "while not said(one, b'y' * 60000, 1): pass\n"
            "print('both')\n"
        )
        assert said == "both"
        found = until(rig, lambda found: not any(one.open for one in found))
        assert len(found) >= 2 and {(one.name, one.address, one.verdict) for one in found} == {
            ("six.example", SERVER6, "allowed")
        }
        assert found[0].sent >= 60000 and rig.asked == ["six.example"] * len(found)


def test_other_rules_end_the_flows_that_they_do_not_allow(tmp_path: Path) -> None:
    rules = [f"udp://{SERVER}:{PORT}", "udp://other.example:5000", f"!{SERVER}"]
    with EgressRig(tmp_path, rules, [], datagrams=[PORT], active=[0, 1]) as rig, echo(rig) as ports:
        script = (
            TALK + "one = opened(sys.argv[1]); print(said(one), flush=True); sys.stdin.readline()\n"
            "print(said(one), flush=True); sys.stdin.readline(); print(said(one, seconds=0.5))\n"
        )
        command = rig.inside.command(sys.executable, "-I", "-c", script, SERVER)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdin is not None and program.stdout is not None
            assert program.stdout.readline() == "True\n"
            rig.set_rules(rules, [0])
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "True\n" and len(ports) == 1  # the same flow goes on
            rig.set_rules(rules, [0, 2])
            program.stdin.write("\n")
            program.stdin.flush()
            assert program.stdout.readline() == "None\n"
        first, refused = until(rig, lambda found: len(found) == 2)
        assert (first.sent, first.open) == (2, False)
        assert (refused.verdict, refused.reason, refused.rule) == ("denied", "deny rule", 2)


def test_a_peer_that_is_not_there_is_recorded_as_a_failure(tmp_path: Path) -> None:
    rules = ["udp://closed.example:5000", "udp://unknown.example:5000"]
    with EgressRig(tmp_path, rules, [], datagrams=[PORT]) as rig:
        rig.hosts["closed.example"] = [SERVER]
        rig.python(
            TALK + "a, b = opened('closed.example'), opened('unknown.example')\n"
            "for _ in range(5): a.send(b'x'); b.send(b'x')\n"
            "import time; time.sleep(0.3); a.send(b'x')\n"
        )
        found = until(
            rig, lambda found: {one.reason for one in found} >= {"connection refused", "name not found"}
        )
        assert {(one.name, one.verdict) for one in found if one.reason} == {
            ("closed.example", "failed"), ("unknown.example", "failed"),
        }  # fmt: skip
        assert (
            rig.asked.count("unknown.example") == 1
        )  # a name that failed is not asked for with each datagram
