"""Programs that want to reach what no rule allows: each reaches it outside, and not inside."""

from __future__ import annotations

import json
from typing import Any

import pytest

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
s.settimeout(2)
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


def inside(internet: Internet, argv: list[str], net: list[str]) -> dict[str, Any]:
    result = internet.run(argv, net)
    assert result["outcome"] == "exited" and result["exit_code"] == 0, result
    return result


def outside(internet: Internet, argv: list[str]) -> str:
    return internet.outside(argv).stdout.strip()


def test_a_name_outside_the_rules_does_not_exist_and_no_packet_leaves(internet: Internet) -> None:
    attack = connect("evil.example", 443, "x")
    control = ["python3", "-c", CONNECT, "evil.example", "80", GET.format("evil.example")]
    assert outside(internet, control) == "reached" and "evil.example" in internet.asked()
    internet.clear()
    result = inside(internet, attack, ["api.good.example"])
    assert result["stdout"] == "no such name\n"
    assert internet.asked() == set() and internet.reached() == set()


@pytest.mark.parametrize("port", [8080, 7007])
def test_a_port_outside_the_rules_is_refused_at_once(internet: Internet, port: int) -> None:
    attack = connect("api.good.example", port, GET.format("api.good.example"))
    assert outside(internet, attack) == "reached"
    internet.clear()
    assert inside(internet, attack, ["api.good.example:443"])["stdout"] == "ECONNREFUSED\n"
    assert internet.reached() == set()


@pytest.mark.parametrize("address", ["11.0.0.66", "2a10:600d::66"])
def test_an_address_that_no_rule_names_is_refused(internet: Internet, address: str) -> None:
    if ":" in address and not internet.ipv6:
        pytest.skip("this kernel has no IPv6")
    attack = connect(address, 80, GET.format("evil.example"))
    assert outside(internet, attack) == "reached"
    internet.clear()
    result = inside(internet, attack, ["api.good.example"])
    assert result["stdout"] != "reached\n" and internet.reached() == set()
    assert any(one["address"] == address and one["verdict"] == "denied" for one in result["network"]), result


@pytest.mark.parametrize("address", ["11.0.0.10", "8.8.8.8"])
def test_datagrams_have_nowhere_to_go(internet: Internet, address: str) -> None:
    attack = ["python3", "-c", DATAGRAM, "8.8.8.8", "53", QUERY]
    assert outside(internet, attack) == "reached"
    internet.clear()
    other = ["python3", "-c", DATAGRAM, address, "5353", QUERY]
    assert inside(internet, other, ["api.good.example"])["stdout"] == "no answer\n"
    assert internet.events() == []


def test_a_name_server_of_its_own_is_not_asked(internet: Internet) -> None:
    attack = ["python3", "-c", DATAGRAM, "8.8.8.8", "53", QUERY]
    assert outside(internet, attack) == "reached" and internet.asked() == {"api.good.example"}
    internet.clear()
    # It gets an answer, and that is ours.
    assert inside(internet, attack, ["api.good.example"])["stdout"] == "reached\n"
    assert internet.asked() == set()


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost"])
def test_the_loopback_of_the_host_is_not_reached(internet: Internet, address: str) -> None:
    attack = connect(address, 80, GET.format("localhost"))
    assert outside(internet, attack) == "reached"
    internet.clear()
    result = inside(internet, attack, ["api.good.example"])
    assert result["stdout"] != "reached\n" and internet.reached() == set()


@pytest.mark.parametrize(
    "name",
    ["local", "local-six", "mapped", "metadata", "private", "private-six", "zero", "nat64", "sixtofour"],
)
def test_an_allowed_name_that_leads_to_an_address_of_the_inner_network_is_refused(
    internet: Internet, name: str
) -> None:
    host = f"{name}.evil.example"
    result = inside(internet, connect(host, 80, GET.format(host)), [host])
    assert result["stdout"] != "reached\n" and internet.reached() == set()
    assert any(one["name"] == host and one["verdict"] == "denied" for one in result["network"]), result


@pytest.mark.parametrize("name", ["local", "metadata", "private"])
def test_those_addresses_are_reached_outside(internet: Internet, name: str) -> None:
    host = f"{name}.evil.example"
    assert outside(internet, connect(host, 80, GET.format(host))) == "reached"


def test_the_metadata_address_is_refused(internet: Internet) -> None:
    attack = connect("169.254.169.254", 80, GET.format("169.254.169.254"))
    assert outside(internet, attack) == "reached"
    internet.clear()
    result = inside(internet, attack, ["*.example", "0.0.0.0/0"])
    assert result["stdout"] != "reached\n" and internet.reached() == set()


def test_a_name_that_changes_its_address_gains_nothing(internet: Internet) -> None:
    host = "rebind.evil.example"
    attack = [
        "sh",
        "-c",
        'for i in 1 2 3 4; do python3 -c "$0" "$@"; done',
        CONNECT,
        host,
        "80",
        GET.format(host),
    ]
    assert (
        set(outside(internet, attack).split("\n")) == {"reached"} and ("127.0.0.1", 80) in internet.reached()
    )
    internet.reset()
    inside(internet, attack, [host])
    assert internet.reached() <= {("11.0.0.66", 80)}


def test_a_rule_that_names_the_address_allows_it(internet: Internet) -> None:
    host = "private.evil.example"
    result = inside(internet, connect(host, 80, GET.format(host)), [host, "10.0.0.5:80"])
    assert result["stdout"] == "reached\n" and internet.reached() == {("10.0.0.5", 80)}


def test_a_deny_rule_wins(internet: Internet) -> None:
    host = "www.good.example"
    argv = connect(host, 80, GET.format(host))
    assert inside(internet, argv, ["*.good.example"])["stdout"] == "reached\n"
    result = inside(internet, argv, ["*.good.example", f"!{host}"])
    assert result["stdout"] == "no such name\n"
    assert result["denials"][0]["clause"] == f'net = "!{host}"' and result["denials"][0]["hint"] == ""


def test_another_host_behind_an_allowed_name_is_refused(internet: Internet) -> None:
    """Plain HTTP: the Host must be the name that was looked up."""
    attack = connect("api.good.example", 80, GET.format("evil.example"))
    assert outside(internet, attack) == "reached"
    internet.clear()
    result = inside(internet, attack, ["api.good.example"])
    assert internet.events("request") == []
    assert any(one["reason"] == "Host differs" for one in result["network"]), result


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
