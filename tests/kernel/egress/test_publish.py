"""Published ports: the host reaches a server inside, and nothing else changes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError
from stockade.host import bubblewrap
from stockade.runs.network import resolver_process
from stockade.sandbox import PublishedPort
from support import bubblewraps
from support.cli import STOCKADE
from support.means import applies, need

#: Answers with the client's address and what it has sent, and ends at the end of its standard input.
SERVER = """
import os, socket, sys, threading
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listener = socket.socket(family)
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind((sys.argv[1], int(sys.argv[2])))
listener.listen(100)
print("listening", flush=True)
def serve(end, peer):
    with end:
        data = b""
        while piece := end.recv(65536):
            data += piece
        end.sendall(f"{peer[0]} {len(data)} ".encode() + data[:20])
def accept():
    while True:
        threading.Thread(target=serve, args=listener.accept(), daemon=True).start()
threading.Thread(target=accept, daemon=True).start()
sys.stdin.read()
os._exit(0)
"""


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    resolver_process.shutdown()


def server(port: int = 8080, host: str = "0.0.0.0") -> list[str]:
    return ["python3", "-c", SERVER, host, str(port)]


@contextmanager
def serving(box: Sandbox, *words: str) -> Iterator[stockade.sandbox.Process]:
    with box.start(list(words) or server(), stdin=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"listening\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()
        process.wait(20)


def said(to: PublishedPort, data: bytes = b"hello") -> str:
    """What a server says to a client on the host."""
    with closing(socket.create_connection((to.host, to.host_port), 20)) as end:
        end.sendall(data)
        end.shutdown(socket.SHUT_WR)
        answer = b""
        while piece := end.recv(65536):
            answer += piece
        return answer.decode()


def test_the_host_reaches_a_server_inside() -> None:
    with Sandbox(publish=["0:8080"]) as box, serving(box):
        (port,) = box.net.published
        assert port.host == "127.0.0.1" and port.port == 8080 and port.host_port != 0
        assert said(port) == "127.0.0.1 5 hello"


def test_a_large_stream_and_many_clients() -> None:
    with Sandbox(publish=["0:8080"]) as box, serving(box):
        (port,) = box.net.published
        assert said(port, b"x" * 5_000_000).startswith("127.0.0.1 5000000 ")
        found: list[str] = []
        clients = [threading.Thread(target=lambda: found.append(said(port))) for _ in range(50)]
        for one in clients:
            one.start()
        for one in clients:
            one.join()
        assert found == ["127.0.0.1 5 hello"] * 50


def test_a_server_that_listens_on_ipv6_alone() -> None:
    with Sandbox(publish=["0:8080"]) as box, serving(box, *server(host="::1")):
        assert said(box.net.published[0]) == "::1 5 hello"


def test_on_ipv6_of_the_host() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        need(False, "IPv6 on the loopback device")
    with Sandbox(publish=["[::1]:0:8080"]) as box, serving(box):
        (port,) = box.net.published
        assert port.address == f"[::1]:{port.host_port}" and said(port) == "127.0.0.1 5 hello"


def test_without_a_server_the_connection_is_reset() -> None:
    with Sandbox(publish=["0:8080"]) as box:
        (port,) = box.net.published
        # The reset can arrive before the client has seen that it is connected.
        with (
            pytest.raises(ConnectionResetError),
            socket.create_connection((port.host, port.host_port), 20) as end,
        ):
            end.recv(1)
        result = box.run(["true"])
    assert result.network == [] or result.network[0].verdict == "failed"


def test_after_the_sandbox_has_ended_the_port_is_free() -> None:
    with Sandbox(publish=["0:8080"]) as box:
        (port,) = box.net.published
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((port.host, port.host_port), 20)
    with Sandbox(publish=[f"{port.host_port}:8080"]) as box, serving(box):
        assert said(box.net.published[0]) == "127.0.0.1 5 hello"


def test_if_the_egress_process_ends_connections_are_refused() -> None:
    with Sandbox(publish=["0:8080"]) as box, serving(box):
        assert box._box is not None and box._box.egress is not None
        process, (port,) = box._box.egress.process, box.net.published
        signal.pidfd_send_signal(process.pidfd, signal.SIGKILL)
        while process.alive:
            time.sleep(0.01)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((port.host, port.host_port), 20)
        result = box.run(["true"])
    assert any("the egress process ended" in one for one in result.warnings)


def test_a_one_shot_run_records_who_connected() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    found: list[str] = []

    def ask() -> None:
        until = time.monotonic() + 20
        while not found and time.monotonic() < until:
            try:
                found.append(said(PublishedPort("127.0.0.1", port, 8080)))
            except OSError:
                time.sleep(0.02)

    client = threading.Thread(target=ask)
    client.start()
    code = SERVER.replace("sys.stdin.read()", "import time; time.sleep(1.5)")
    result = stockade.run(["python3", "-c", code, "0.0.0.0", "8080"], publish=[f"{port}:8080"])
    client.join()
    assert found == ["127.0.0.1 5 hello"] and result.published == (f"127.0.0.1:{port}:8080",)
    (one,) = [one for one in result.network if one.verdict == "allowed"]
    assert (one.kind, one.address, one.port, one.sent, one.received) == ("publish", "127.0.0.1", 8080, 17, 5)
    assert one.target == "port 8080 from 127.0.0.1" and result.denials == ()
    assert (result.usage.bytes_sent, result.usage.bytes_received) == (17, 5)
    assert result.receipt is not None
    network = result.receipt.predicate.network
    assert network is not None and network.mode == "none" and network.counts is not None
    assert network.published == result.published and network.counts.published == 1
    assert network.egress is not None and network.egress.ports in ((), None)
    stockade.verify(result.receipt, stockade.receipt.public_key(), require=["network.none"], result=result)


def test_a_program_still_reaches_nothing() -> None:
    with Sandbox(publish=["0:8080"]) as box:
        (port,) = box.net.published
        tried = (
            "import socket, errno, sys\n"
            "for address in (('127.0.0.1', int(sys.argv[1])), ('93.184.216.34', 443), ('198.18.0.1', 53)):\n"
            "    try: socket.create_connection(address, 3)\n"
            "    except OSError as error: print(errno.errorcode[error.errno])\n"
        )
        result = box.run(["python3", "-c", tried, str(port.host_port)])
    assert result.text.split() == ["ECONNREFUSED", "ENETUNREACH", "ENETUNREACH"]


def test_an_async_sandbox_and_run() -> None:
    async def main() -> tuple[str, tuple[str, ...]]:
        async with stockade.AsyncSandbox(publish=["0:8080"]) as box:
            process = await box.start(server(), stdin=subprocess.PIPE)
            assert process.stdout is not None and process.stdin is not None
            await process.stdout.readline()
            answer = await asyncio.to_thread(said, box.net.published[0])
            process.stdin.close()
            await process.wait()
            await process.close()
        return answer, (await stockade.run_async(["true"], publish=["0:80"])).published

    answer, published = asyncio.run(main())
    assert answer == "127.0.0.1 5 hello" and re.fullmatch(r"127\.0\.0\.1:\d+:80", published[0])


@pytest.mark.parametrize("version", [bubblewraps.OLD, bubblewraps.NEW])
def test_bubblewrap(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(bubblewrap.NAMED, bubblewraps.program(version))
    policy = Policy(backend="bwrap", accept=["ipc", "deny"], toolchain=False)
    with Sandbox(policy, publish=["0:8080"]) as box, serving(box):
        assert said(box.net.published[0]) == "127.0.0.1 5 hello"


def test_beside_rules_and_after_a_new_port() -> None:
    with Sandbox(Policy(net=["api.good.example"]), publish=["0:8080"]) as box, serving(box):
        (port,) = box.net.published
        assert said(port) == "127.0.0.1 5 hello"
        box.net.allow("api.good.example:8443")
        assert said(port) == "127.0.0.1 5 hello"
        with pytest.raises(PolicyError, match="port 8080 is published"):
            box.net.allow("api.good.example:8080")
        result = box.run(["true"])
        assert result.published == (str(port),)


@pytest.mark.parametrize(
    ("policy", "publish", "words"),
    [
        ({}, ["http"], "'http' is not a port"),
        ({}, ["8080:"], "a port is missing"),
        ({}, ["8080:0"], "port 0 inside is no port"),
        ({}, ["1:2:3:4"], "needs brackets"),
        ({}, ["localhost:8080:80"], "is not an address of this host"),
        ({}, ["8080:70000"], "'70000' is not a port"),
        ({}, ["8080:80", "127.0.0.1:8080:81"], "127.0.0.1:8080 is named twice"),
        ({}, "8080:80", "is not a list"),
        ({}, [8080], "is not text"),
        ({}, [f"0:{n}" for n in range(1, 66)], "at most 64"),
        ({"net": "open"}, ["8080"], 'with net = "open" a program listens on this host itself'),
        ({"net": ["api.example.com"]}, ["8080:443"], "a rule of net lets port 443 out"),
        ({"net": ["api.example.com"]}, ["8053:53"], "Stockade answers port 53 inside itself"),
    ],
)
def test_what_cannot_be_published(policy: dict[str, object], publish: list[str], words: str) -> None:
    with pytest.raises(PolicyError) as raised:
        stockade.run(["true"], policy, publish=publish)
    assert words in raised.value.message and raised.value.hint


def test_landlock_alone_has_no_network_to_reach() -> None:
    policy = Policy(backend="landlock", accept=_weaker("landlock"))
    with pytest.raises(PolicyError, match="has no network of its own"):
        stockade.run(["true"], policy, publish=["0:80"])


def _weaker(backend: str) -> list[str]:
    """Everything that a policy for this backend has to accept."""
    try:
        stockade.run(["true"], Policy(backend=backend))
    except stockade.StockadeError as error:
        return re.findall(r'"([a-z.]+)"', error.hint)
    return []


def test_a_port_in_use_is_an_error_before_anything_runs() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(SetupError) as raised:
            stockade.run(["true"], publish=[f"{port}:80"])
    assert raised.value.message == f"cannot publish 127.0.0.1:{port}: the port is in use"
    assert raised.value.hint == "publish another port, or 0 for any free one: 0:80"


def test_an_address_that_is_not_this_hosts() -> None:
    with pytest.raises(SetupError, match="this host has no such address"):
        stockade.run(["true"], publish=["203.0.113.9:0:80"])


def test_an_ordinary_user_cannot_publish_a_privileged_port() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    applies(os.geteuid() != 0 and first > 1, "root may listen on every port")
    with pytest.raises(SetupError, match=f"an ordinary user cannot listen on ports below {first}"):
        stockade.run(["true"], publish=[f"{first - 1}:80"])


def test_the_command_line(tmp_path: Path) -> None:
    code = SERVER.replace("sys.stdin.read()", "import time; time.sleep(60)")
    words = ["run", "--discard", "--publish", "0:8080", "--", "python3", "-c", code, "0.0.0.0", "8080"]
    with subprocess.Popen(
        [STOCKADE, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = next(line for line in process.stderr if "workspace" not in line)
            found = re.fullmatch(r"stockade: 127\.0\.0\.1:(\d+) leads to port 8080 inside\n", line)
            assert found is not None, line
            assert process.stdout.readline() == "listening\n"
            port = int(found[1])
            assert said(PublishedPort("127.0.0.1", port, 8080)) == "127.0.0.1 5 hello"
            shown = subprocess.run([STOCKADE, "ps"], capture_output=True, text=True, check=True).stdout
            assert f"127.0.0.1:{port}:8080" in shown and "PUBLISHED" in shown
            listed = subprocess.run([STOCKADE, "ps", "--json"], capture_output=True, text=True, check=True)
            assert json.loads(listed.stdout)[0]["published"] == [f"127.0.0.1:{port}:8080"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)


def test_a_policy_cannot_publish(tmp_path: Path) -> None:
    (tmp_path / "stockade.toml").write_text('publish = ["8080:80"]\n')
    words = [STOCKADE, "run", "--", "true"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 125 and "a policy cannot publish ports" in done.stderr
