"""Programs inside never reach the server's own port, whatever the network rules say."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from support import leaks
from support.event_streams import command
from support.server import ServerUnderTest


@pytest.fixture(scope="module")
def neighbour() -> Iterator[int]:
    """Another server on this machine, which the configuration allows."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"neighbour\n")

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, neighbour: int) -> Iterator[ServerUnderTest]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = f'network = ["127.0.0.1:{port},{neighbour}"]'
    server = ServerUnderTest(tmp_path_factory.mktemp("server"), config)
    server.port = port
    server.start()
    assert server.process is not None
    with leaks.shared(server.process.pid):
        yield server
    server.close()


def test_a_rule_for_the_servers_machine_does_not_open_its_own_port(
    server: ServerUnderTest, neighbour: int
) -> None:
    connect = "exec 3<>/dev/tcp/127.0.0.1/{} && head -1 <&3"
    with server.sandbox() as box:
        assert command(box.execd, connect.format(neighbour)).texts() == ["neighbour\n"]
        # The control: the same connection works outside.
        with socket.create_connection(("127.0.0.1", server.port), timeout=5):
            pass
        attempt = "printf 'GET /ping HTTP/1.0\\r\\n\\r\\n' >&3 && cat <&3"
        for host in ("127.0.0.1", "127.0.0.2", "0.0.0.0", "::1"):
            found = command(box.execd, f"exec 3<>/dev/tcp/{host}/{server.port} && {attempt}", timeout=10_000)
            assert "HTTP/" not in "".join(found.texts()), host


def test_a_request_cannot_ask_for_the_servers_machine(server: ServerUnderTest) -> None:
    rule = {"action": "allow", "target": "127.0.0.1", "ports": [server.port]}
    answer = server.create(networkPolicy={"defaultAction": "deny", "egress": [rule]})
    assert answer.status_code == 400 and "server's own machine" in answer.json()["message"]
