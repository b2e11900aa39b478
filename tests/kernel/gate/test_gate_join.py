"""Two sandboxes in one network namespace, and a listener of the supervisor in it."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
from collections.abc import Iterator

import pytest

from stockade import Policy, PolicyError, Sandbox, SetupError
from stockade.gate import client
from stockade.gate.network import open_listener
from stockade.runs import living_networks
from stockade.runs.launch import LaunchedSandbox
from support.mapped import mapped, own_rows

SERVE = """
import socket
end = socket.create_server(("127.0.0.1", 7000))
print("ready", flush=True)
while True:
    end.accept()[0].sendall(b"hello")
"""
ASK = """
import socket
try:
    print(socket.create_connection(("127.0.0.1", PORT), 5).recv(9).decode())
except OSError as error:
    print(error.strerror)
"""


def ask(box: Sandbox, port: int = 7000) -> str:
    """What a program hears from a port of its loopback address."""
    command = ["/usr/bin/python3", "-c", ASK.replace("PORT", str(port))]
    return box.run(command, timeout=30).check().text.strip()


def inner(box: Sandbox) -> LaunchedSandbox:
    assert box._box is not None
    return box._box


def network(box: Sandbox) -> int:
    """The inode of the network namespace, as a program inside sees it."""
    return int(box.run(["stat", "-L", "-c", "%i", "/proc/self/ns/net"]).check().text)


def opened(policy: Policy | None = None, joins: Sandbox | None = None) -> Sandbox:
    """A sandbox with ids of its own, in the network of another one, if that is given."""
    with mapped(own_rows(), network=-1 if joins is None else inner(joins).network_fd):
        box = Sandbox(policy or Policy())
        box.open()
    return box


@pytest.fixture
def first() -> Iterator[Sandbox]:
    box = opened()
    try:
        yield box
    finally:
        box.close()


@contextlib.contextmanager
def serving(box: Sandbox) -> Iterator[None]:
    with box.start(["/usr/bin/python3", "-c", SERVE]) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == b"ready\n"
        yield
        server.kill()


def test_one_reaches_the_servers_of_the_other(first: Sandbox) -> None:
    with opened_box(first) as second, opened_box() as stranger, serving(first):
        assert ask(second) == "hello"
        assert ask(stranger) == "Connection refused"
        assert network(first) == network(second) != network(stranger)


@contextlib.contextmanager
def opened_box(joins: Sandbox | None = None) -> Iterator[Sandbox]:
    box = opened(joins=joins)
    try:
        yield box
    finally:
        box.close()


def test_nothing_else_is_shared(first: Sandbox) -> None:
    with opened_box(first) as second:
        one, other = inner(first).evidence.namespaces, inner(second).evidence.namespaces
        assert [name for name in one if one[name] == other[name]] == ["net"]
        first.run(["touch", "/tmp/mine"]).check()
        assert first.run(["test", "-e", "/tmp/mine"]).ok
        assert not second.run(["test", "-e", "/tmp/mine"]).ok


def test_the_second_goes_on_when_the_first_has_ended() -> None:
    first = opened()
    second = opened(joins=first)
    try:
        first.close()
        with serving(second):
            assert ask(second) == "hello"
        # Nobody else gets the namespace meanwhile.
        for _ in range(3):
            with opened_box() as other:
                assert network(other) != network(second)
    finally:
        second.close()


def test_the_first_goes_on_when_the_second_has_ended(first: Sandbox) -> None:
    with opened_box(first):
        pass
    with serving(first), opened_box(first) as again:
        assert ask(first) == ask(again) == "hello"


def test_the_next_sandbox_gets_a_network_of_its_own(first: Sandbox) -> None:
    """Also one that would begin as the joined one did: nothing that was made ahead is in that network."""
    seen = {network(first)}
    for _ in range(4):
        with opened_box(first) as joined, opened_box() as own:
            assert network(joined) == network(first)
            assert network(own) not in seen


@pytest.mark.parametrize(
    "path", ["/proc/self/ns/net", "/proc/self/ns/user", "/proc/self/ns/mnt", "/dev/null"]
)
def test_the_hosts_network_and_what_is_no_network_are_refused(
    first: Sandbox, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = os.open(path, os.O_RDONLY)
    try:
        with mapped(own_rows(), network=other):
            with pytest.raises(SetupError, match="whose network it joins has ended"):
                Sandbox(Policy()).open()
            # The gate looks as well.
            known = os.fstat(other).st_ino, -1
            monkeypatch.setitem(living_networks._networks, known, inner(first).connection.resident)
            with pytest.raises(SetupError, match="network to join"):
                Sandbox(Policy()).open()
    finally:
        os.close(other)
    with opened_box(first) as second, opened_box() as stranger:
        assert network(second) == network(first) != network(stranger)


def test_the_network_of_a_sandbox_that_has_ended_cannot_be_joined() -> None:
    first = opened()
    kept = os.dup(inner(first).network_fd)
    try:
        first.close()
        with mapped(own_rows(), network=kept), pytest.raises(SetupError, match="has ended"):
            Sandbox(Policy()).open()
    finally:
        os.close(kept)


def test_it_is_joined_through_the_gate_that_made_it(first: Sandbox) -> None:
    """Another one of the same supervisor would have no right over it, for an ordinary user."""
    mine = inner(first).connection.resident
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_residents", {})
        try:
            with opened_box(first) as second, opened_box() as stranger:
                assert inner(second).connection.resident is mine
                assert inner(stranger).connection.resident is not mine
        finally:
            client.shutdown()


class TestAListener:
    def test_programs_inside_reach_it_and_nothing_outside_does(self, first: Sandbox) -> None:
        box = inner(first)
        descriptor = open_listener(box.connection.resident, box.network_fd, 44771)
        with socket.socket(fileno=descriptor) as listener:
            assert listener.getsockname() == ("127.0.0.1", 44771)
            assert not os.get_blocking(descriptor)
            listener.setblocking(True)
            with first.start(["/usr/bin/python3", "-c", ASK.replace("PORT", "44771")]) as asking:
                end, (address, _) = listener.accept()
                with end:
                    end.sendall(b"from out")
                asking.wait(timeout=30).check()
                assert asking.stdout is not None
                assert asking.stdout.read() == b"from out\n"
            assert address == "127.0.0.1"
            with socket.socket() as outside:
                assert outside.connect_ex(("127.0.0.1", 44771)) == errno.ECONNREFUSED

    def test_it_is_there_for_every_sandbox_of_the_network(self, first: Sandbox) -> None:
        box = inner(first)
        descriptor = open_listener(box.connection.resident, box.network_fd, 44771)
        with opened_box(first) as second, socket.socket(fileno=descriptor) as listener:
            listener.setblocking(True)
            with second.start(["/usr/bin/python3", "-c", ASK.replace("PORT", "44771")]) as asking:
                listener.accept()[0].close()
                asking.wait(timeout=30).check()

    def test_nothing_else_is_reachable_then(self, first: Sandbox) -> None:
        box = inner(first)
        os.close(open_listener(box.connection.resident, box.network_fd, 44771))
        script = "import socket; print(socket.socket().connect_ex(('203.0.113.1', 80)))"
        assert first.run(["/usr/bin/python3", "-c", script]).check().text == f"{errno.ENETUNREACH}\n"

    def test_a_port_that_a_program_has_is_refused(self, first: Sandbox) -> None:
        box = inner(first)
        with serving(first), pytest.raises(PolicyError, match="port 7000 is taken by a program"):
            open_listener(box.connection.resident, box.network_fd, 7000)

    def test_the_hosts_network_gets_none(self, first: Sandbox) -> None:
        host = os.open("/proc/self/ns/net", os.O_RDONLY)
        try:
            with pytest.raises(SetupError, match="namespace: Invalid argument"):
                open_listener(inner(first).connection.resident, host, 44771)
        finally:
            os.close(host)
