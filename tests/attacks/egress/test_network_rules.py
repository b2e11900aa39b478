"""Programs that want to reach what no rule allows: each reaches it outside, and not inside."""

from __future__ import annotations

import json
from typing import Any

import pytest

from attacks.egress.reach import Reach
from support.means import need
from support.network import Internet

#: Prints "reached", or why not.
CONNECT = """
import socket, sys, errno
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), 5) as s:
        s.sendall(sys.argv[3].encode())
        s.settimeout(3)
        print("reached" if s.recv(100) else "closed")
except socket.gaierror:
    print("no such name")
except TimeoutError:
    print("timed out")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
GET = "GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"
#: Sends a datagram and waits for an answer.
DATAGRAM = """
import socket, sys
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(0.7)
try:
    s.sendto(bytes.fromhex(sys.argv[3]), (sys.argv[1], int(sys.argv[2])))
    print("reached" if s.recv(500) else "closed")
except OSError as error:
    print("no answer")
"""
#: A question for the address of api.good.example.
QUERY = "123401000001000000000000" + "0361706904676f6f64076578616d706c6500" + "00010001"


def connect(address: str, port: int, words: str = "x\n") -> list[str]:
    return ["python3", "-c", CONNECT, address, str(port), words]


def inside(reach: Reach, argv: list[str], net: list[str]) -> dict[str, Any]:
    reach.internet.clear()
    result = reach.supervisor.run(argv, net)
    assert result["ended"][:2] == ["exited", 0], result
    return result


def outside(reach: Reach, argv: list[str]) -> str:
    reach.internet.clear()
    return reach.internet.outside(argv).stdout.strip()


def test_a_name_outside_the_rules_does_not_exist_and_no_packet_leaves(reach: Reach) -> None:
    attack = connect("evil.example", 443, "x")
    control = ["python3", "-c", CONNECT, "evil.example", "80", GET.format("evil.example")]
    assert outside(reach, control) == "reached" and "evil.example" in reach.internet.asked()
    result = inside(reach, attack, ["api.good.example"])
    assert result["stdout"] == "no such name\n"
    assert reach.internet.asked() == set() and reach.internet.reached() == set()


@pytest.mark.parametrize("port", [8080, 7007])
def test_a_port_outside_the_rules_is_refused_at_once(reach: Reach, port: int) -> None:
    attack = connect("api.good.example", port, GET.format("api.good.example"))
    assert outside(reach, attack) == "reached"
    assert inside(reach, attack, ["api.good.example:443"])["stdout"] == "ECONNREFUSED\n"
    assert reach.internet.reached() == set()


@pytest.mark.parametrize("address", ["11.0.0.66", "2a10:600d::66"])
def test_an_address_that_no_rule_names_is_refused(reach: Reach, address: str) -> None:
    need(":" not in address or reach.internet.ipv6, "this kernel has no IPv6")
    attack = connect(address, 80, GET.format("evil.example"))
    assert outside(reach, attack) == "reached"
    result = inside(reach, attack, ["api.good.example"])
    assert result["stdout"] != "reached\n" and reach.internet.reached() == set()
    assert any(one["address"] == address and one["verdict"] == "denied" for one in result["network"]), result


@pytest.mark.parametrize("address", ["11.0.0.10", "8.8.8.8"])
def test_datagrams_have_nowhere_to_go(reach: Reach, address: str) -> None:
    attack = ["python3", "-c", DATAGRAM, "8.8.8.8", "53", QUERY]
    assert outside(reach, attack) == "reached"
    other = ["python3", "-c", DATAGRAM, address, "5353", QUERY]
    assert inside(reach, other, ["api.good.example"])["stdout"] == "no answer\n"
    assert reach.internet.events() == []


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_the_loopback_of_the_host_is_not_reached(reach: Reach, address: str) -> None:
    attack = connect(address, 80, GET.format("localhost"))
    assert outside(reach, attack) == "reached"
    result = inside(reach, attack, ["api.good.example"])
    assert result["stdout"] != "reached\n" and reach.internet.reached() == set()


def test_a_rule_that_names_the_address_allows_it(reach: Reach) -> None:
    host = "private.evil.example"
    result = inside(reach, connect(host, 80, GET.format(host)), [host, "10.0.0.5:80"])
    assert result["stdout"] == "reached\n" and reach.internet.reached() == {("10.0.0.5", 80)}


def test_a_deny_rule_wins(reach: Reach) -> None:
    host = "www.good.example"
    argv = connect(host, 80, GET.format(host))
    assert inside(reach, argv, ["*.good.example"])["stdout"] == "reached\n"
    result = inside(reach, argv, ["*.good.example", f"!{host}"])
    assert result["stdout"] == "no such name\n"
    assert result["denials"][0]["clause"] == f'net = "!{host}"' and result["denials"][0]["hint"] == ""


def test_what_rules_for_names_do_not_promise(reach: Reach) -> None:
    """NP-64 says so: these succeed, and a change of that is a change of the promise."""
    host = "evil.example"
    denied_name = connect("11.0.0.66", 80, GET.format(host))
    assert inside(reach, denied_name, ["0.0.0.0/0", f"!{host}"])["stdout"] == "reached\n"
    other_port = connect("api.good.example", 8080, GET.format(host))
    assert inside(reach, other_port, ["api.good.example:8080"])["stdout"] == "reached\n"
    assert {event["host"] for event in reach.internet.events("request")} == {host}


KILL_EGRESS = """
import json, os, signal, stockade, threading, time
policy = stockade.Policy(net=["api.good.example"], on_egress_end={end!r})
with stockade.Sandbox(policy) as box:
    pidfd = box._box.egress.process.pidfd
    killer = threading.Timer(0.5, lambda: signal.pidfd_send_signal(pidfd, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    if {how!r} == "shell":
        with box.shell() as shell:
            result = shell.run("sleep 4; echo went on")
    elif {how!r} == "process":
        result = box.start(["sh", "-c", "sleep 4; echo went on"]).wait()
    else:
        result = box.run(["sh", "-c", "sleep 4; echo went on"])
    print(json.dumps([result.outcome, time.monotonic() - began < 3.5, "egress" in result.reason,
        len(result.warnings)]))
"""


@pytest.mark.parametrize("how", ["run", "shell", "process"])
def test_a_run_ends_with_its_egress_process_if_the_policy_says_so(internet: Internet, how: str) -> None:
    done = internet.python(KILL_EGRESS.format(end="end", how=how))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["cancelled", True, True, 1]


def test_otherwise_it_goes_on_and_the_result_has_a_warning(internet: Internet) -> None:
    done = internet.python(KILL_EGRESS.format(end="continue", how="run"))
    assert json.loads(done.stdout) == ["exited", False, False, 1], done.stderr
