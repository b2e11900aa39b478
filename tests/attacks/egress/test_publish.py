"""Published ports let the host in, and neither the program nor the process that relays out."""

from __future__ import annotations

import errno
import json
import socket
import subprocess
from collections.abc import Iterator

import pytest

from stockade import Policy, Sandbox
from stockade.host import host
from stockade.runs.network import resolver_process
from support.egress import ANSWERING, CONFINED, ask, running
from support.means import need

#: What a hostile server tries with the connection that it gets.
SERVER = """
import array, json, os, socket, sys
listener = socket.create_server(("0.0.0.0", 8080))
print("listening", flush=True)
end, peer = listener.accept()
found = {"peer": peer[0], "options": []}
for level, option, value in (
    (socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0"), (socket.SOL_SOCKET, 36, 1), (socket.SOL_IP, 19, 1),
):
    try:
        end.setsockopt(level, option, value)
        found["options"].append(option)
    except OSError:
        pass
try:
    end.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))])
except OSError:
    pass
for name, address in (("host", (sys.argv[1], int(sys.argv[2]))), ("back", peer)):
    try:
        socket.create_connection(address, 3).close()
        found[name] = "reached"
    except OSError as error:
        found[name] = str(error.errno)
print(json.dumps(found), flush=True)
end.close()
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    resolver_process.shutdown()


def test_a_hostile_server_does_not_reach_the_host_by_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mine:
        address = mine.getsockname()
        assert socket.create_connection(address, 5).close() is None, "outside it can be reached"
        words = ["python3", "-c", SERVER, address[0], str(address[1])]
        with (
            Sandbox(Policy(), publish=["0:8080"]) as box,
            box.start(words, stdin=subprocess.PIPE) as program,
        ):
            assert program.stdout is not None and program.stdin is not None
            assert program.stdout.readline() == b"listening\n"
            (port,) = box.net.published
            with socket.create_connection((port.host, port.host_port), 20) as client:
                found = json.loads(program.stdout.readline())
                data, handed, _, _ = socket.recv_fds(client, 10, 10)
            assert handed == [] and data in (b"x", b"")
            program.stdin.close()
            program.wait(20)
    assert found["peer"] == "127.0.0.1" and found["options"] == []
    assert found["host"] == str(errno.ECONNREFUSED), "the sandbox's own loopback"
    assert found["back"] == str(errno.ECONNREFUSED)


DIAL = (
    CONFINED
    + """
import socket
def answer(message):
    end = socket.socket()
    end.settimeout(3)
    return {"error": end.connect_ex(("127.0.0.1", message["port"]))}
"""
    + ANSWERING
)


def test_an_egress_process_without_rules_can_dial_no_port() -> None:
    need(host().landlock >= 4, "Landlock's rules for ports")
    with socket.create_server(("127.0.0.1", 0)) as mine:
        port = mine.getsockname()[1]
        with running(DIAL, ports=(port,)) as process:
            assert ask(process, {"port": port}) == {"error": 0}, "with a rule it can"
        with running(DIAL, ports=()) as process:
            assert ask(process, {"port": port}) == {"error": errno.EACCES}
