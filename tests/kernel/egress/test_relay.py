"""An egress process relays what the rules allow, between a namespace inside and one outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.authority import Authority
from support.egress_rig import SECOND_SERVER, SERVER, SERVER6, EgressRig, private_memory

CONNECT = """
import socket, sys, ssl, time, struct
def connect(host, port, timeout=10):
    return socket.create_connection((host, port), timeout)
def outcome(act):
    try:
        return act()
    except OSError as error:
        return type(error).__name__
"""


def echo(connection: socket.socket) -> None:
    while data := connection.recv(65536):
        connection.sendall(data)


def http(connection: socket.socket) -> None:
    """Answer each request with its target and Host."""
    received = b""
    while data := connection.recv(65536):
        received += data
        while b"\r\n\r\n" in received:
            head, _, received = received.partition(b"\r\n\r\n")
            lines = head.split(b"\r\n")
            host = next((line[6:] for line in lines if line.lower().startswith(b"host: ")), b"")
            body = lines[0].split()[1] + b" " + host + b"\n"
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))


def test_a_name_on_a_port_without_tls_reaches_its_server(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["echo.example:7000"], [7000]) as rig:
        rig.hosts["echo.example"] = [SERVER]
        rig.serve(echo, 7000)
        said = rig.python(
            CONNECT + "one = connect('echo.example', 7000)\n"
            "one.sendall(b'hello'); print(one.recv(99).decode(), one.getpeername()[0])\n"
        )
        assert said in ("hello fd00:5afe::3", "hello 198.18.0.3")
        (record,) = rig.ended_records()
        assert (record.name, record.address, record.port) == ("echo.example", SERVER, 7000)
        assert (record.verdict, record.rule, record.sent, record.received) == ("allowed", 0, 5, 5)
        assert rig.asked == ["echo.example"]
        assert os.eventfd_read(rig.nudge) >= 2


def test_curl_over_tls_with_the_servers_own_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = authority.server("api.example")

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            http(secured)

    with EgressRig(tmp_path, ["api.example"], [80, 443]) as rig:
        rig.hosts["api.example"] = [SERVER]
        rig.serve(serve, 443)
        for family in ("-4", "-6"):
            done = rig.inside.run(
                "curl", "-sS", family, "--cacert", str(authority.certificate), "https://api.example/x"
            )
            assert (done.returncode, done.stdout) == (0, "/x api.example\n"), done.stderr
        assert [one.verdict for one in rig.ended_records(2)] == ["allowed", "allowed"]


def test_another_name_in_the_hello_or_none_gets_an_alert_and_nothing_is_dialled(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["api.example"], [80, 443]) as rig:
        rig.hosts["api.example"] = [SERVER]
        rig.serve(echo, 443)
        said = rig.python(
            CONNECT + "context = ssl._create_unverified_context()\n"
            "for name in ('evil.example', None):\n"
            "    try: context.wrap_socket(connect('api.example', 443), server_hostname=name)\n"
            "    except ssl.SSLError as error: print(error.reason)\n"
            "one = connect('api.example', 443); one.sendall(b'SSH-2.0-x\\r\\n')\n"
            "print(outcome(lambda: one.recv(9)))\n"
        )
        alert = "TLSV1_UNRECOGNIZED_NAME"
        assert said.split() == [alert, alert, "ConnectionResetError"]
        assert [one.reason for one in rig.ended_records(3)] == ["SNI differs", "no SNI", "not TLS"]
        assert {one.verdict for one in rig.records()} == {"denied"}
        assert rig.asked == []


def test_plain_http_passes_while_every_request_names_the_host(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["web.example"], [80, 443]) as rig:
        rig.hosts["web.example"] = [SERVER]
        rig.serve(http, 80)
        done = rig.inside.run("curl", "-sS", "http://web.example/a", "http://web.example/b")
        assert done.stdout == "/a web.example\n/b web.example\n", done.stderr
        said = rig.python(
            CONNECT + "one = connect('web.example', 80)\n"
            "one.sendall(b'GET /1 HTTP/1.1\\r\\nHost: web.example\\r\\n\\r\\n'); print(one.recv(999)[:15])\n"
            "one.sendall(b'GET /2 HTTP/1.1\\r\\nHost: evil.example\\r\\n\\r\\n'); print(one.recv(999)[:12])\n"
            "print(one.recv(9) if False else outcome(lambda: [one.recv(999) for _ in range(3)][-1]))\n"
        )
        assert said.splitlines() == ["b'HTTP/1.1 200 OK'", "b'HTTP/1.1 421'", "b''"]
        done = rig.inside.run(
            "curl", "-sS", "-w", "%{http_code}", "-H", "Host: evil.example", "http://web.example/"
        )
        assert done.stdout.endswith("421")
        found = rig.ended_records(3)
        assert [(one.verdict, one.reason) for one in found] == [
            ("allowed", ""), ("denied", "Host differs"), ("denied", "Host differs"),
        ]  # fmt: skip


def test_a_websocket_begins_as_http_and_goes_on_as_it_likes(tmp_path: Path) -> None:
    def websocket(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
        echo(connection)

    with EgressRig(tmp_path, ["web.example"], [80, 443]) as rig:
        rig.hosts["web.example"] = [SERVER]
        rig.serve(websocket, 80)
        said = rig.python(
            CONNECT + "one = connect('web.example', 80)\n"
            "one.sendall(b'GET / HTTP/1.1\\r\\nHost: web.example\\r\\nConnection: Upgrade\\r\\n'\n"
            "  b'Upgrade: websocket\\r\\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\\r\\n'\n"
            "  b'Sec-WebSocket-Version: 13\\r\\n\\r\\n'); print(one.recv(999)[:12])\n"
            "for number in range(3): one.sendall(b'\\x81\\0frame'); print(one.recv(99))\n"
        )
        assert said.splitlines() == ["b'HTTP/1.1 101'", *["b'\\x81\\x00frame'"] * 3]


def test_a_server_that_speaks_first_is_heard_before_the_client_says_anything(tmp_path: Path) -> None:
    def greet(connection: socket.socket) -> None:
        connection.sendall(b"220 mail\r\n")
        echo(connection)

    with EgressRig(tmp_path, ["mail.example:25"], [25]) as rig:
        rig.hosts["mail.example"] = [SERVER]
        rig.serve(greet, 25)
        said = rig.python(
            CONNECT + "one = connect('mail.example', 25)\n"
            "print(one.recv(99)); one.sendall(b'EHLO x'); print(one.recv(99))\n"
        )
        assert said.splitlines() == ["b'220 mail\\r\\n'", "b'EHLO x'"]


def test_tls_on_another_port_must_name_the_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = authority.server("db.example", "evil.example")

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            echo(secured)  # type: ignore[arg-type]

    with EgressRig(tmp_path, ["db.example:8443", "tcp://opaque.example:8443"], [8443]) as rig:
        rig.hosts["db.example"] = rig.hosts["opaque.example"] = [SERVER]
        rig.serve(serve, 8443)
        said = rig.python(
            CONNECT + "context = ssl.create_default_context(cafile=sys.argv[1])\n"
            "def talk(host, name):\n"
            "    one = context.wrap_socket(connect(host, 8443), server_hostname=name)\n"
            "    one.sendall(b'x'); return one.recv(9)\n"
            "for host, name in (('db.example', 'db.example'), ('db.example', 'evil.example'),\n"
            "                   ('opaque.example', 'evil.example')):\n"
            "    try: print(talk(host, name))\n"
            "    except ssl.SSLError as error: print(error.reason)\n",
            str(authority.certificate),
        )
        assert said.splitlines() == ["b'x'", "TLSV1_UNRECOGNIZED_NAME", "b'x'"]
        # The connections end in an order of their own.
        assert sorted(one.reason for one in rig.ended_records(3)) == ["", "", "SNI differs"]
        assert rig.totals()[:2] == (2, 1)


def test_addresses_without_a_rule_are_reset_at_once(tmp_path: Path) -> None:
    with EgressRig(
        tmp_path, ["api.example:7000", "93.184.216.34:7001", "!93.184.216.35"], [7000, 7001]
    ) as rig:
        rig.serve(echo, 7000)
        rig.serve(echo, 7001)
        said = rig.python(
            CONNECT + "def talk(host, port):\n"
            "    one = connect(host, port); one.sendall(b'x'); return one.recv(9)\n"
            "for host, port in ((sys.argv[1], 7001), (sys.argv[1], 7000), ('127.0.0.1', 7000),\n"
            "    ('::1', 7000), ('198.18.0.9', 7000), ('198.18.0.2', 7001), ('93.184.216.35', 7001),\n"
            "    ('8.8.8.8', 7002)):\n"
            "    began = time.monotonic(); print(outcome(lambda: talk(host, port)))\n"
            "    assert time.monotonic() - began < 0.5\n",
            SERVER,
        )
        gone = "ConnectionResetError"
        assert said.splitlines() == ["b'x'", *[gone] * 6, "ConnectionRefusedError"]
        found = {(one.address, one.port): (one.verdict, one.reason, one.rule) for one in rig.ended_records(7)}
        assert found == {
            (SERVER, 7001): ("allowed", "", 1),
            (SERVER, 7000): ("denied", "no rule", -1),
            ("127.0.0.1", 7000): ("denied", "no rule", -1),
            ("::1", 7000): ("denied", "no rule", -1),
            ("198.18.0.9", 7000): ("denied", "no rule", -1),
            ("198.18.0.2", 7001): ("denied", "no rule", -1),
            ("93.184.216.35", 7001): ("denied", "deny rule", 2),
        }


def test_the_hosts_loopback_needs_a_rule_that_names_it(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["127.0.0.1:7000"], [7000]) as rig:
        rig.serve(echo, 7000, "127.0.0.1")
        said = rig.python(
            CONNECT + "one = connect('127.0.0.1', 7000); one.sendall(b'host'); print(one.recv(9))\n"
        )
        assert said == "b'host'"


def test_a_name_that_resolves_to_a_private_address_is_refused(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["*.example:7000", "10.20.30.40:7001"], [7000, 7001]) as rig:
        rig.hosts["a.example"] = ["10.20.30.40", "127.0.0.1"]
        rig.serve(echo, 7000, "10.20.30.40")
        said = rig.python(CONNECT + "print(outcome(lambda: connect('a.example', 7000).recv(9)))")
        assert said == "ConnectionResetError"
        (record,) = rig.ended_records()
        assert (record.verdict, record.reason, record.address) == ("denied", "private address", "10.20.30.40")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ([SERVER], "connection refused"),
        (["8.8.8.8"], "unreachable"),
        ("not found", "name not found"),
        ("try again", "resolver failed"),
    ],
)
def test_what_cannot_be_dialled_is_reset_and_says_why(
    tmp_path: Path, answer: list[str] | str, reason: str
) -> None:
    with EgressRig(tmp_path, ["a.example:7000"], [7000]) as rig:
        rig.hosts["a.example"] = answer
        said = rig.python(CONNECT + "print(outcome(lambda: connect('a.example', 7000).recv(9)))")
        assert said == "ConnectionResetError"
        (record,) = rig.ended_records()
        assert (record.verdict, record.reason) == ("failed", reason)


def test_without_a_resolver_names_fail_and_addresses_go_on(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["a.example:7000", f"{SERVER}:7000"], [7000]) as rig:
        rig.end_resolver()
        rig.serve(echo, 7000)
        said = rig.python(
            CONNECT + "print(outcome(lambda: connect('a.example', 7000).recv(9)))\n"
            "one = connect(sys.argv[1], 7000); one.sendall(b'x'); print(one.recv(9))\n",
            SERVER,
        )
        assert said.splitlines() == ["ConnectionResetError", "b'x'"]
        assert rig.ended_records(2)[0].reason == "resolver failed"


def test_the_other_family_is_tried_when_the_first_does_not_answer(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["a.example:7000"], [7000]) as rig:
        rig.hosts["a.example"] = [SERVER6, SECOND_SERVER, SERVER]
        rig.serve(echo, 7000)
        said = rig.python(
            CONNECT + "one = connect('a.example', 7000); one.sendall(b'x'); print(one.recv(9))\n"
        )
        assert said == "b'x'"
        assert rig.ended_records()[0].address == SERVER


def test_a_half_closed_connection_goes_on_in_the_other_direction(tmp_path: Path) -> None:
    def sort(connection: socket.socket) -> None:
        received = b""
        while data := connection.recv(65536):
            received += data
        connection.sendall(bytes(sorted(received)))

    with EgressRig(tmp_path, ["a.example:7000", f"{SERVER}:7000"], [7000]) as rig:
        rig.hosts["a.example"] = [SERVER]
        rig.serve(sort, 7000)
        said = rig.python(
            CONNECT + "for host in ('a.example', sys.argv[1]):\n"
            "    one = connect(host, 7000); one.sendall(b'dcba'); one.shutdown(socket.SHUT_WR)\n"
            "    print(one.recv(9), one.recv(9))\n",
            SERVER,
        )
        assert said.splitlines() == ["b'abcd' b''"] * 2


def test_a_reset_is_passed_on_in_both_directions(tmp_path: Path) -> None:
    seen: list[str] = []

    def watch(connection: socket.socket) -> None:
        if connection.recv(9) == b"reset me":
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return
        try:
            connection.recv(9)
            seen.append("end")
        except ConnectionResetError:
            seen.append("reset")

    with EgressRig(tmp_path, [f"{SERVER}:7000"], [7000]) as rig:
        rig.serve(watch, 7000)
        said = rig.python(
            CONNECT + "one = connect(sys.argv[1], 7000); one.sendall(b'reset me')\n"
            "print(outcome(lambda: one.recv(9)))\n"
            "one = connect(sys.argv[1], 7000); one.sendall(b'x'); time.sleep(0.2)\n"
            "one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); one.close()\n",
            SERVER,
        )
        assert said == "ConnectionResetError"
        assert [one.reason for one in rig.ended_records(2)] == ["reset", "reset"]
        deadline = time.monotonic() + 5
        while not seen and time.monotonic() < deadline:
            time.sleep(0.01)
        assert seen == ["reset"]


def test_a_client_that_sends_nothing_is_ended_and_one_that_is_idle_too(tmp_path: Path) -> None:
    rules = ["a.example:443,7000", "a.example:80"]
    with EgressRig(tmp_path, rules, [80, 443, 7000], hello=0.5, idle=1) as rig:
        rig.hosts["a.example"] = [SERVER]
        rig.serve(echo, 7000)
        said = rig.python(
            CONNECT + "all = [connect('a.example', port) for port in (443, 80, 7000, 7000)]\n"
            "all[3].sendall(b'\\x16\\x03')\n"
            "began = time.monotonic()\n"
            "for one in all: print(outcome(lambda: one.recv(9)))\n"
            "assert time.monotonic() - began < 5\n"
        )
        assert said.splitlines() == ["ConnectionResetError"] * 4
        assert sorted(one.reason for one in rig.ended_records(4)) == ["idle", *["timed out"] * 3]


def test_new_rules_hold_for_new_connections_at_once(tmp_path: Path) -> None:
    rules = ["a.example:7000", "b.example:7000", "!a.example"]
    with EgressRig(tmp_path, rules[:1], [7000]) as rig:
        rig.hosts["a.example"] = rig.hosts["b.example"] = [SERVER]
        rig.serve(echo, 7000)
        talk = (
            CONNECT + "def talk(host):\n"
            "    one = connect(host, 7000); one.sendall(b'x'); return one.recv(9)\n"
            "print([outcome(lambda: talk(host)) for host in ('a.example', 'b.example')])\n"
        )
        assert rig.python(talk) == "[b'x', 'gaierror']"
        assert rig.set_rules(rules, [1, 2]) == {"ok": True}
        assert rig.python(talk) == "['gaierror', b'x']"
        assert rig.ended_records(2)[1].rule == 1
        assert "error" in rig.set_rules(["no rule at all:x"], [0])
        assert rig.python(talk) == "['gaierror', b'x']"


def test_the_copy_holds_little_memory_of_its_own(tmp_path: Path) -> None:
    with EgressRig(tmp_path, [f"{SERVER}:7000"], [7000]) as rig:
        rig.serve(echo, 7000)
        rig.python(CONNECT + "one = connect(sys.argv[1], 7000); one.sendall(b'x'); one.recv(9)", SERVER)
        assert private_memory(rig.pid) < 4 * 1024 * 1024


def test_the_end_of_the_control_socket_ends_it_and_leaves_no_record_open(tmp_path: Path) -> None:
    with EgressRig(tmp_path, [f"{SERVER}:7000"], [7000]) as rig:
        rig.serve(echo, 7000)
        client = subprocess.Popen(
            rig.inside.command(
                sys.executable, "-I", "-c",
                CONNECT + "one = connect(sys.argv[1], 7000); one.sendall(b'x'); one.recv(9)\n"
                "print('up', flush=True); print(outcome(lambda: one.recv(9)))\n",
                SERVER,
            ),
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == "up\n"
        assert rig.records()[0].open
        rig.control.shutdown(socket.SHUT_RDWR)
        assert client.communicate(timeout=10)[0] == "ConnectionResetError\n"
        rig.process.wait(10)
        assert [(one.open, one.reason) for one in rig.records()] == [(False, "ended")]


def test_a_rule_that_is_gone_when_the_hello_comes_allows_nothing(tmp_path: Path) -> None:
    rules = ["a.example:443", "!a.example"]
    with EgressRig(tmp_path, rules[:1], [443]) as rig:
        rig.hosts["a.example"] = [SERVER]
        rig.serve(echo, 443)
        client = subprocess.Popen(
            rig.inside.command(
                sys.executable, "-I", "-c",
                CONNECT + "one = connect('a.example', 443); print('up', flush=True); input()\n"
                "context = ssl._create_unverified_context()\n"
                "print(outcome(lambda: context.wrap_socket(one, server_hostname='a.example')))\n",
            ),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert client.stdout is not None
        assert client.stdout.readline() == "up\n"
        assert rig.set_rules(rules, [0, 1]) == {"ok": True}
        assert client.communicate("go\n", timeout=10)[0] == "ConnectionResetError\n"
        (record,) = rig.ended_records()
        assert (record.verdict, record.reason, record.rule) == ("denied", "deny rule", 1)
        assert rig.asked == []


def test_what_programs_sent_before_the_end_is_passed_on(tmp_path: Path) -> None:
    received: list[int] = []

    def read_slowly(connection: socket.socket) -> None:
        total = 0
        while data := connection.recv(65536):
            total += len(data)
            time.sleep(0.005)
        received.append(total)

    with EgressRig(tmp_path, ["a.example:7000"], [7000]) as rig:
        rig.hosts["a.example"] = [SERVER]
        rig.serve(read_slowly, 7000)
        rig.python(CONNECT + "one = connect('a.example', 7000); one.sendall(bytes(5_000_000))\n")
        rig.control.shutdown(socket.SHUT_WR)
        assert rig.process.wait(10) == 0
        assert not any(one.open for one in rig.records())
        assert rig.totals().bytes_sent == 5_000_000
        deadline = time.monotonic() + 10
        while not received and time.monotonic() < deadline:
            time.sleep(0.02)
        assert received == [5_000_000]


def test_without_connections_the_end_takes_no_time(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["a.example:443"], [443]) as rig:
        rig.python(CONNECT + "connect('a.example', 443)\n")
        began = time.monotonic()
        rig.control.shutdown(socket.SHUT_WR)
        rig.process.wait(10)
        assert time.monotonic() - began < 0.25
