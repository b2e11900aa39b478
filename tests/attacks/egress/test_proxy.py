"""The proxy inside: it reaches what the rules allow, speaks of nothing else, and is nobody else's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attacks.egress.reach import Reach
from support.internet_layout import ECHO
from support.network import Internet

PYTHON = "/usr/bin/python3"
ECHO_RULE = f"tcp://echo.good.example:{ECHO}"
#: Sends each message to the proxy over a connection of its own, in hexadecimal; prints the answers.
SENDER = """
import json, socket, sys
found = []
for steps in json.loads(sys.argv[1]):
    answer = b""
    try:
        with socket.create_connection(("198.18.0.1", 3128), timeout=10) as one:
            one.settimeout(4)
            for step in steps:
                one.sendall(bytes.fromhex(step))
                answer += one.recv(4096)
            one.shutdown(socket.SHUT_WR)
            while more := one.recv(4096):
                answer += more
    except OSError as error:
        answer += b"|" + type(error).__name__.encode()
    found.append(answer.decode("latin-1"))
print(json.dumps(found))
"""
HELLO = b"\x05\x01\x00"


def connect(place: str, more: bytes = b"") -> bytes:
    return f"CONNECT {place} HTTP/1.1\r\nHost: {place}\r\n\r\n".encode() + more


def socks(host: bytes, port: int, command: int = 1) -> list[bytes]:
    name = bytes((5, command, 0, 3, len(host))) + host
    return [HELLO, name + port.to_bytes(2, "big")]


def send(reach: Reach, *talks: list[bytes], net: list[str], **policy: Any) -> tuple[list[str], Any]:
    reach.internet.clear()
    steps = json.dumps([[step.hex() for step in talk] for talk in talks])
    result = reach.supervisor.run([PYTHON, "-c", SENDER, steps], net, **{"proxy": True, **policy})
    assert result["ended"][:2] == ["exited", 0], (result["ended"], result["stderr"])
    return json.loads(result["stdout"]), result


def test_both_protocols_lead_to_what_the_rules_allow(reach: Reach) -> None:
    place = f"echo.good.example:{ECHO}"
    found, result = send(
        reach, [connect(place), b"ping"], [*socks(b"echo.good.example", ECHO), b"pong"],
        # What follows the request in the same packet belongs to the connection.
        [connect(place, b"early")],
        net=[ECHO_RULE],
    )  # fmt: skip
    assert found[0] == "HTTP/1.1 200 Connection established\r\n\r\nping"
    assert found[1].encode("latin-1") == b"\x05\x00" + b"\x05\x00\x00\x01" + bytes(6) + b"pong"
    assert found[2].endswith("\r\n\r\nearly")
    assert {one["target"] if "target" in one else one["name"] for one in result["network"]} == {
        "echo.good.example"
    }


REFUSED_PLACES = (
    "169.254.169.254:80", "127.0.0.1:80", "[::1]:80", "[::ffff:127.0.0.1]:80", "localhost:80", "0.0.0.0:80",
    "metadata.evil.example:80", "evil.example:80", "10.0.0.5:80", "198.18.0.1:3128", "198.18.0.1:53",
    "198.18.77.77:80", "api.good.example:22", "2130706433:80", "0x7f.1:80", "api.good.example.:80",
)  # fmt: skip


def test_no_way_leads_to_anything_else(reach: Reach) -> None:
    """Loopback and metadata addresses in any spelling, other names and ports, and the proxy itself."""
    talks = [[connect(place)] for place in REFUSED_PLACES]
    for place in REFUSED_PLACES:
        host, _, port = place.rpartition(":")
        talks.append(socks(host.strip("[]").encode(), int(port)))
    net = ["api.good.example", "metadata.evil.example", "tcp://db.good.example:22"]
    found, _ = send(reach, *talks, net=net)
    for place, answer in zip(REFUSED_PLACES * 2, found, strict=True):
        if place in ("metadata.evil.example:80", "api.good.example.:80"):
            continue  # allowed by its name; where it leads is found out later
        assert "200 Conn" not in answer and "\x05\x00\x05\x00" not in answer, place
    assert not reach.internet.events("connection")


def test_messages_that_are_no_request_for_a_connection_are_refused(reach: Reach) -> None:
    bad = [
        [b"GET http://api.good.example/ HTTP/1.1\r\nHost: api.good.example\r\n\r\n"],
        [b"CONNECT api.good.example:80 HTTP/1.1\r\nContent-Length: 5\r\n\r\nGET /"],
        [b"CONNECT api.good.example:80 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"],
        [b"CONNECT api.good.example:80@evil.example:80 HTTP/1.1\r\n\r\n"],
        [b"CONNECT api.good.example\x00.evil.example:80 HTTP/1.1\r\n\r\n"],
        [b"CONNECT api.good.example:80 HTTP/1.1\nHost: x\n\n"],
        [b"CONNECT  api.good.example:80 HTTP/1.1\r\n\r\n"],
        [b"CONNECT api.good.example:80 HTTP/1.1\r\n Folded: x\r\n\r\n"],
        [b"CONNECT api.good.example:0 HTTP/1.1\r\n\r\n"],
        [b"CONNECT api.good.example:99999 HTTP/1.1\r\n\r\n"],
        [b"X" * 9000],
        [b"\x04\x01\x00\x50\x0b\x00\x00\x0a\x00"],
        [b"\x05\x01\x02"],
        socks(b"api.good.example", 80, command=2),
        socks(b"api.good.example", 80, command=3),
        socks(b"api.good.example\x00.evil.example", 80),
        socks(b"", 80),
        socks("bücher.good.example".encode(), 80),
        [HELLO, b"\x05\x01\x00\x09" + bytes(10)],
        [HELLO, b"\x05\x01\x01\x01" + bytes(6)],
    ]
    found, result = send(reach, *bad, net=["api.good.example", "*.good.example"])
    for talk, answer in zip(bad, found, strict=True):
        assert "200 Conn" not in answer and "\x05\x00\x05\x00" not in answer, talk
    assert not reach.internet.events("connection") and not reach.internet.asked()
    assert {one["reason"] for one in result["network"]} == {"no proxy request"}


def test_what_follows_is_looked_at_as_without_the_proxy(reach: Reach) -> None:
    """A request for another host inside an allowed connection, and something that is not TLS on port 443."""
    smuggled = b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    found, result = send(
        reach, [connect("api.good.example:80", smuggled)], [connect("api.good.example:443", b"not TLS")],
        net=["api.good.example"],
    )  # fmt: skip
    assert "421 Misdirected" in found[0]
    assert {one["reason"] for one in result["network"]} >= {"Host differs", "not TLS"}
    assert not reach.internet.events("request")


def test_it_counts_for_the_limits(reach: Reach) -> None:
    place = f"echo.good.example:{ECHO}"
    found, result = send(
        reach, *[[connect(place), b"x"]] * 3, net=[ECHO_RULE], limits={"connections": 1}
    )  # fmt: skip
    assert sum(one.endswith("\r\n\r\nx") for one in found) == 1
    assert {one["clause"] for one in result["denials"]} == {"limits.connections"}


def test_it_is_there_only_if_the_policy_says_so_and_variables_name_it(reach: Reach) -> None:
    found, _ = send(reach, [b"x"], net=[ECHO_RULE], proxy=False)
    assert found == ["|ConnectionRefusedError"]
    names = ("HTTPS_PROXY", "https_proxy", "no_proxy")
    show = f"import os, json; print(json.dumps([os.environ.get(name) for name in {names}]))"
    with_it = reach.supervisor.run([PYTHON, "-c", show], [ECHO_RULE], proxy=True)
    address = "http://198.18.0.1:3128"
    assert json.loads(with_it["stdout"]) == [address, address, "localhost,127.0.0.1,::1"]
    without = reach.supervisor.run([PYTHON, "-c", show], [ECHO_RULE])
    assert json.loads(without["stdout"]) == [None] * 3


def test_no_process_of_the_host_can_use_it(reach: Reach) -> None:
    """It listens in the sandbox's network alone, also while the sandbox lives."""
    listening = reach.supervisor.do(
        f"import socket\npolicy = stockade.Policy(net=[{ECHO_RULE!r}], proxy=True)\n"
        "with stockade.Sandbox(policy) as box:\n"
        "    box.run(['true'])\n"
        "    answer = []\n"
        "    for host in ('127.0.0.1', '198.18.0.1', '11.0.0.1'):\n"
        "        try:\n"
        "            socket.create_connection((host, 3128), timeout=1).close()\n"
        "            answer.append(host)\n"
        "        except OSError:\n"
        "            pass\n"
    )
    assert listening == []


@pytest.mark.parametrize(
    "command", [["curl", "-sS", "--proxy", "http://198.18.0.1:3128"],
                ["curl", "-sS", "--proxy", "socks5h://198.18.0.1:3128"], ["curl", "-sS"]]
)  # fmt: skip
def test_curl_uses_it(internet: Internet, command: list[str]) -> None:
    result = internet.run([*command, "https://api.good.example/"], ["api.good.example"], "--proxy")
    assert result["exit_code"] == 0, result


def test_questions_are_asked_through_it_too(reach: Reach) -> None:
    talks = [[connect("api.good.example:80"), b"GET / HTTP/1.1\r\nHost: api.good.example\r\n\r\n"]] * 2
    talks += [socks(b"www.good.example", 80), [connect("api.good.example:2222")]]
    steps = json.dumps([[step.hex() for step in talk] for talk in talks])
    found, asked = reach.supervisor.do(
        "asked = []\n"
        "def on_ask(question):\n"
        "    asked.append([question.target, question.process])\n"
        "    return 'run' if question.name.startswith('api') else 'no'\n"
        f"WORDS = {[PYTHON, '-c', SENDER, steps]!r}\n"
        "policy = stockade.Policy(net=['ask'], proxy=True)\n"
        "result = stockade.run(WORDS, policy, on_ask=on_ask, timeout=60)\n"
        "answer = [result.text, asked]\n"
    )
    answers = json.loads(found)
    assert all("200 OK" in one for one in answers[:2])
    assert answers[2].encode("latin-1").endswith(b"\x05\x02\x00\x01" + bytes(6)) and "403" in answers[3]
    assert [target for target, _ in asked] == ["api.good.example:80", "www.good.example:80"]
    assert all(process and process.startswith("python3 (") for _, process in asked)
