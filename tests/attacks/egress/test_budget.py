"""Limits on what a sandbox may use of the network: no program gets past them, and results name them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from attacks.egress.reach import Reach
from support.internet_layout import ECHO

PYTHON = "/usr/bin/python3"
#: Sends bytes to the echo server in pieces, over several connections, and says how many came back.
SENDER = """
import json, socket, sys
name, port, size, connections = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
back = opened = 0
for _ in range(connections):
    try:
        with socket.create_connection((name, port), timeout=20) as one:
            opened += 1
            sent = 0
            one.settimeout(20)
            while sent < size:
                piece = b"x" * min(4096, size - sent)
                one.sendall(piece)
                sent += len(piece)
                left = len(piece)
                while left:
                    data = one.recv(left)
                    if not data:
                        raise ConnectionResetError
                    left -= len(data)
                    back += len(data)
    except OSError:
        pass
print(json.dumps({"back": back, "opened": opened}))
"""
#: Sends requests over one connection, one after another or all at once, and says what came back.
REQUESTS = """
import json, socket, sys
name, count, at_once = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "at once"
request = f"GET /n HTTP/1.1\\r\\nHost: {name}\\r\\n\\r\\n".encode()
answers = b""
with socket.create_connection((name, 80), timeout=20) as one:
    one.settimeout(5)
    try:
        if at_once:
            one.sendall(request * count)
        else:
            for number in range(count):
                one.sendall(request)
                answers += one.recv(65536)
        while data := one.recv(65536):
            answers += data
    except OSError:
        pass
print(json.dumps({"ok": answers.count(b"HTTP/1.1 200"), "refused": answers.count(b"HTTP/1.1 403")}))
"""
ECHO_RULE = f"tcp://echo.good.example:{ECHO}"


def run(reach: Reach, code: str, *words: object, net: Sequence[str], **limits: object) -> tuple[Any, Any]:
    reach.internet.clear()
    result = reach.supervisor.run(
        [PYTHON, "-c", code, *map(str, words)], list(net), limits={"wall": 60, **limits}
    )
    assert result["ended"][:2] == ["exited", 0], (result["ended"], result["stderr"])
    return json.loads(result["stdout"]), result


def denied_by(result: dict[str, Any]) -> set[str]:
    """The clauses that refused something."""
    return {one["clause"] for one in result["denials"]}


def test_no_byte_beyond_the_limit_leaves_over_one_connection_or_several(reach: Reach) -> None:
    without, free = run(reach, SENDER, "echo.good.example", ECHO, 100_000, 3, net=[ECHO_RULE])
    assert without == {"back": 300_000, "opened": 3} and not free["denials"]
    found, result = run(reach, SENDER, "echo.good.example", ECHO, 100_000, 3, net=[ECHO_RULE], upload=150_000)
    assert found["back"] <= 150_000
    assert denied_by(result) == {"limits.upload"}
    assert {one["wall"] for one in result["denials"]} == {"limits.network"}
    assert 140_000 <= sum(one["sent"] for one in result["network"]) <= 150_000
    assert result["controls"]["limits.network"]["requested"] == 'limits.upload = "150000"'


def test_no_byte_beyond_the_limit_comes_in(reach: Reach) -> None:
    found, result = run(reach, SENDER, "echo.good.example", ECHO, 100_000, 3, net=[ECHO_RULE], download="64K")
    assert found["back"] <= 65_536
    assert denied_by(result) == {"limits.download"}
    assert sum(one["received"] for one in result["network"]) <= 65_536


def test_exactly_the_limit_is_not_too_much(reach: Reach) -> None:
    found, result = run(
        reach, SENDER, "echo.good.example", ECHO, 50_000, 1,
        net=[ECHO_RULE], upload=50_000, download=50_000, connections=1,
    )  # fmt: skip
    assert found == {"back": 50_000, "opened": 1} and not result["denials"]


def test_connections_beyond_the_limit_are_refused_before_anything_is_dialled(reach: Reach) -> None:
    found, result = run(reach, SENDER, "echo.good.example", ECHO, 10, 5, net=[ECHO_RULE], connections=2)
    assert found["back"] == 20
    assert denied_by(result) == {"limits.connections"}
    assert len(reach.internet.events("connection")) == 2


def test_failed_connections_count_too(reach: Reach) -> None:
    """Otherwise a program could look for open ports as often as it likes."""
    code = (
        "import json, socket\n"
        "for name in ['nowhere.good.example'] * 2 + ['echo.good.example']:\n"
        "    try:\n"
        f"        one = socket.create_connection((name, {ECHO}), timeout=3)\n"
        "        one.sendall(b'x'); back = one.recv(1)\n"
        "    except OSError:\n"
        "        back = b''\n"
        "print(json.dumps(back.decode()))\n"
    )
    net = [ECHO_RULE, f"tcp://nowhere.good.example:{ECHO}"]
    found, result = run(reach, code, net=net, connections=2)
    assert found == "" and "limits.connections" in denied_by(result)
    assert not reach.internet.events("connection")


def test_each_host_has_a_limit_of_its_own(reach: Reach) -> None:
    code = (
        "import json, socket\n"
        "back = {}\n"
        "for name in ['echo.good.example', 'db.good.example', 'echo.good.example']:\n"
        "    try:\n"
        f"        one = socket.create_connection((name, {ECHO}), timeout=10)\n"
        "        one.sendall(b'12345'); back.setdefault(name, []).append(len(one.recv(10)))\n"
        "    except OSError:\n"
        "        back.setdefault(name, []).append(0)\n"
        "print(json.dumps(back))\n"
    )
    net = [ECHO_RULE, f"tcp://db.good.example:{ECHO}"]
    for limits in ({"host_upload": 5}, {"host_download": 5}, {"host_connections": 1}):
        found, result = run(reach, code, net=net, **limits)
        assert found == {"echo.good.example": [5, 0], "db.good.example": [5]}
        assert denied_by(result) == {f"limits.{name}" for name in limits}
    net = ["api.good.example:80", "www.good.example:80"]
    found, result = run(reach, REQUESTS, "api.good.example", 2, "one by one", net=net, host_requests=1)
    assert found == {"ok": 1, "refused": 1} and denied_by(result) == {"limits.host_requests"}


@pytest.mark.parametrize("way", ["one by one", "at once"])
def test_requests_beyond_the_limit_never_arrive(reach: Reach, way: str) -> None:
    found, result = run(reach, REQUESTS, "api.good.example", 6, way, net=["api.good.example:80"], requests=3)
    assert found["ok"] <= 3
    assert len(reach.internet.events("request")) <= 3
    assert denied_by(result) == {"limits.requests"}


def test_a_change_of_ports_gives_no_fresh_budget(reach: Reach) -> None:
    """Another egress process takes over then; connections under way stay with the first."""
    found = reach.supervisor.do(
        f"SENDER, RULE, ECHO = {SENDER!r}, {ECHO_RULE!r}, {ECHO}\n"
        "import json\n"
        "policy = stockade.Policy(net=[RULE], limits={'upload': 30_000, 'connections': 5})\n"
        "with stockade.Sandbox(policy) as box:\n"
        "    def send(size):\n"
        f"        words = ['{PYTHON}', '-c', SENDER, 'echo.good.example', str(ECHO), str(size), '1']\n"
        "        return json.loads(box.run(words).text)['back']\n"
        "    first = send(20_000)\n"
        "    box.net.allow('tcp://echo.good.example:7008')\n"
        "    second, third = send(20_000), send(20_000)\n"
        "answer = [first, second, third]\n"
    )
    assert found[0] == 20_000 and sum(found) <= 30_000


def test_limits_that_nothing_could_count_are_refused(reach: Reach) -> None:
    found = reach.supervisor.do(
        "answer = []\n"
        "for net, limits in (('open', {'upload': 1}), (['api.good.example'], {'requests': 1}),\n"
        "                    (['tcp://a.example:80'], {'host_requests': 1})):\n"
        "    try:\n"
        "        stockade.run(['true'], stockade.Policy(net=net, limits=limits))\n"
        "    except stockade.PolicyError as error:\n"
        "        answer.append(error.message)\n"
        "policy = stockade.Policy(net=['api.good.example:80'], limits={'requests': 1})\n"
        "with stockade.Sandbox(policy) as box:\n"
        "    try:\n"
        "        box.net.allow('api.good.example:443')\n"
        "    except stockade.PolicyError as error:\n"
        "        answer.append(error.message)\n"
    )
    assert len(found) == 4
    assert "nothing counts" in found[0] and all("does not see the requests" in one for one in found[1:])


@pytest.mark.parametrize("version", ["--http1.1", "--http2"])
def test_requests_inside_tls_count_too(reach: Reach, version: str) -> None:
    net = ["GET https://h2.good.example/**"]
    urls = ["https://h2.good.example/a", "https://h2.good.example/b", "https://h2.good.example/c"]
    reach.internet.clear()
    result = reach.supervisor.run(
        [
            "curl",
            "-sS",
            version,
            "-w",
            "%{http_code} ",
            *(word for url in urls for word in ("-o", "/dev/null", url)),
        ],
        net,
        limits={"requests": 2},
    )
    assert result["stdout"].split() == ["200", "200", "403"], result
    assert len(reach.internet.events("request")) == 2
    assert denied_by(result) == {"limits.requests"}
    limited = reach.supervisor.run(["curl", "-sS", version, urls[0]], net, limits={"download": 20})
    assert limited["ended"][1] != 0 and denied_by(limited) == {"limits.download"}
