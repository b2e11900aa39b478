"""Connections into a sandbox: whoever holds a publisher's socket gets those, and nothing else."""

from __future__ import annotations

import errno
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.gate import client, wire
from support import bubblewraps, gatebuild
from support.means import clauses_for
from support.publisher import Publisher

SERVER = """
import socket, sys
family, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
listener = socket.socket(family)
listener.bind((address, port))
listener.listen()
print("listening", flush=True)
while True:
    end, peer = listener.accept()
    end.sendall(peer[0].encode())
    end.close()
"""
FOUR = [str(socket.AF_INET.value), "127.0.0.1", "8080"]
SIX = [str(socket.AF_INET6.value), "::1", "8080"]


def pair() -> tuple[Publisher, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(20)
    return Publisher(ours), theirs


def served(box: Sandbox) -> Publisher:
    assert box._box is not None
    publisher, theirs = pair()
    box._box.connection.serve_publisher(theirs.fileno())
    theirs.close()
    return publisher


def read(descriptor: int) -> str:
    with socket.socket(fileno=descriptor) as end:
        assert not os.get_blocking(descriptor)
        end.settimeout(20)
        return end.recv(100).decode()


def answer(publisher: Publisher, port: int = 8080, family: int = 0, number: int = 0) -> tuple[int, int]:
    publisher.ask(port, family=family, number=number)
    found = publisher.receive_connection()
    assert found is not None and found.number == number
    return found.descriptor, found.error


@pytest.fixture(params=["native", "bwrap-old", "bwrap-new"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Policy:
    if request.param == "native":
        return Policy(toolchain=False)
    version = bubblewraps.OLD if request.param == "bwrap-old" else bubblewraps.NEW
    bubblewraps.use(bubblewraps.program(version), monkeypatch)
    return Policy(toolchain=False, **clauses_for("bwrap"))


@pytest.fixture
def box(policy: Policy) -> Iterator[Sandbox]:
    with Sandbox(policy) as found:
        yield found


@pytest.fixture
def native() -> Iterator[Sandbox]:
    with Sandbox() as found:
        yield found


@pytest.mark.parametrize(("server", "family"), [(FOUR, 4), (SIX, 6)], ids=["IPv4", "IPv6"])
def test_a_living_sandbox(box: Sandbox, server: list[str], family: int) -> None:
    publisher = served(box)
    assert answer(publisher) == (-1, errno.ECONNREFUSED)
    with box.start(["/usr/bin/python3", "-c", SERVER, *server]) as process:
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"
        for asked in (0, family):
            descriptor, error = answer(publisher, family=asked, number=7)
            assert error == 0
            assert read(descriptor) == server[1]
        assert answer(publisher, family=10 - family) == (-1, errno.ECONNREFUSED)
        process.kill(0)
    publisher.close()


def test_a_sandbox_that_ends_with_its_program(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Init attends to the program itself, and is handed the socket while the program runs."""
    connections: list[client.Connection] = []
    begin = client.launch

    def remembered(*given: object, **options: object) -> client.Connection:
        connections.append(begin(*given, **options))  # type: ignore[arg-type]
        return connections[-1]

    monkeypatch.setattr(client, "launch", remembered)
    ready = threading.Event()
    done: list[stockade.Result] = []

    def run() -> None:
        server = SERVER.replace("while True:", "for _ in range(2):")
        done.append(
            stockade.run(
                ["/usr/bin/python3", "-c", server, *FOUR], policy, on_stdout=lambda _: ready.set(), timeout=60
            )
        )

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    for _ in range(2):  # a second one replaces the first
        publisher, theirs = pair()
        connections[-1].serve_publisher(theirs.fileno())
        theirs.close()
        descriptor, error = answer(publisher)
        assert error == 0 and read(descriptor) == "127.0.0.1"
        publisher.close()
    thread.join(60)
    assert done and done[0].ok


def test_beside_a_program_that_is_process_2(native: Sandbox) -> None:
    with native.shell(first=True) as shell:
        publisher = served(native)
        assert answer(publisher) == (-1, errno.ECONNREFUSED)
        assert shell.run("echo $$").text == "2\n"
        publisher.close()


def test_in_the_hosts_network_nothing_is_served() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    with Sandbox(Policy(net="open")) as box, listener:
        publisher = served(box)
        publisher.ask(listener.getsockname()[1])
        assert publisher.receive_connection() is None
        assert box.run(["true"]).ok
        publisher.close()


def test_another_publisher_takes_the_place_of_the_last(native: Sandbox) -> None:
    first = served(native)
    second = served(native)
    assert answer(second) == (-1, errno.ECONNREFUSED)
    assert first.receive_connection() is None
    first.close()
    second.close()


@pytest.mark.parametrize(
    "data",
    [
        wire.REQUEST.pack(wire.REQUEST_CONNECT, 0, 0, 0, 0),
        wire.REQUEST.pack(wire.REQUEST_CONNECT, 0, 65536, 0, 0),
        wire.REQUEST.pack(wire.REQUEST_CONNECT, 3, 8080, 0, 0),
        wire.REQUEST.pack(wire.REQUEST_CONNECT, 0, 8080, 0, 1),
        *(wire.REQUEST.pack(kind, 0, 9, 0, 0) for kind in range(wire.REQUEST_CONNECT)),
        wire.REQUEST.pack(0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF),
    ],
)
def test_nothing_else_can_be_asked_for(native: Sandbox, data: bytes) -> None:
    publisher = served(native)
    publisher._send(data)
    found = publisher.receive_connection()
    assert found is not None and (found.descriptor, found.error) == (-1, errno.EBADMSG)
    assert answer(publisher) == (-1, errno.ECONNREFUSED)
    assert native.run(["true"]).ok
    publisher.close()


def test_what_is_no_request_ends_the_service_alone(native: Sandbox) -> None:
    spare = os.open("/dev/null", os.O_RDONLY)
    good = wire.REQUEST.pack(wire.REQUEST_CONNECT, 0, 8080, 0, 0)
    try:
        for data, descriptors in ((b"x", ()), (good + b"x", ()), (good, (spare,)), (good, (spare,) * 200)):
            publisher = served(native)
            publisher._send(data, descriptors)
            assert publisher.receive_connection() is None
            publisher.close()
            assert native.run(["true"], timeout=60).ok
    finally:
        os.close(spare)


def test_whoever_does_not_take_the_answers_gets_no_more(native: Sandbox) -> None:
    """Init goes on with everything else, and holds no connection that nobody takes."""
    publisher = served(native)
    publisher._socket.setblocking(False)
    sent = 0
    with pytest.raises(BlockingIOError):
        for sent in range(100_000):
            publisher._socket.send(wire.REQUEST.pack(wire.REQUEST_CONNECT, 0, 8080, sent, 0))
    started = time.process_time()
    assert native.run(["true"], timeout=60).ok
    assert native.run(["ls", "/proc/1/fd"], timeout=60).outcome == "exited"
    waiting = 0
    while select.select([publisher], [], [], 0.5)[0] and waiting < sent:
        found = publisher.receive_connection()
        assert found is not None and found.number == waiting
        waiting += 1
    assert waiting == sent
    assert time.process_time() - started < 60
    publisher.close()


def test_a_program_finds_no_trace_of_it(native: Sandbox) -> None:
    publisher = served(native)
    descriptors = native.run(["sh", "-c", "ls /proc/self/fd"]).text.split()
    assert descriptors == ["0", "1", "2", "3"]
    assert answer(publisher) == (-1, errno.ECONNREFUSED)
    publisher.close()


def test_it_is_over_with_the_sandbox() -> None:
    with Sandbox() as box:
        publisher = served(box)
        with box.start(["sleep", "60"]):
            assert answer(publisher) == (-1, errno.ECONNREFUSED)
    assert publisher.receive_connection() is None
    publisher.close()


def test_under_the_sanitizers(sanitized_gate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client.shutdown()
    monkeypatch.setattr("stockade.gate.executable", lambda: str(sanitized_gate))
    try:
        with Sandbox() as box:
            publisher = served(box)
            assert answer(publisher) == (-1, errno.ECONNREFUSED)
            assert answer(publisher, family=6) == (-1, errno.ECONNREFUSED)
            publisher._send(b"x")
            assert publisher.receive_connection() is None
            publisher.close()
    finally:
        client.shutdown()
    assert gatebuild.reports(sanitized_gate) == []
