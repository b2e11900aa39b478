"""Every trick of sockets: none reaches what the rules do not name, changes the routes or takes a listener."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from attacks.arena import inside, outside
from attacks.egress.reach import Reach

EVIL = "11.0.0.66"
#: What this kernel, or this user, may not be able to do outside either.
NOT_EVERYWHERE = {"SCTP", "DCCP", "multipath", "marked", "transparent", "in repair", "UDP-Lite",
                  "an echo request", "from a privileged port", "from another address", "with a source route",
                  "a datagram to another port"}  # fmt: skip


def test_outside_most_tricks_reach_it(reach: Reach) -> None:
    found = reach.outside("socket_games", EVIL)
    assert {name for name, said in found.items() if said != "reached"} <= NOT_EVERYWHERE, found


def test_no_trick_reaches_an_address_that_no_rule_names(reach: Reach, backend: dict[str, Any]) -> None:
    rules = ["api.good.example", "echo.good.example:7007"]
    found = reach.inside("socket_games", EVIL, net=rules, **backend)
    assert "reached" not in found.verdict.values(), found.verdict
    assert reach.internet.events() == [], found.verdict
    assert found.verdict["a datagram"] == "answered locally"
    assert {found.verdict[name] for name in ("marked", "transparent")} == {"EPERM"}, found.verdict
    assert {found.verdict[name] for name in ("in repair", "with a source route")} == {"ENOPROTOOPT"}
    assert {found.verdict[name] for name in ("SCTP", "DCCP", "UDP-Lite")} == {"EPROTONOSUPPORT"}


def test_those_that_work_inside_lead_to_the_egress(reach: Reach) -> None:
    """Options that a program may set change nothing: with a rule for the address, the server is reached."""
    found = reach.inside("socket_games", EVIL, net=[f"{EVIL}:80"]).verdict
    assert {name for name, said in found.items() if said == "reached"} >= {
        "plain", "mapped", "bound to the device", "fast open", "connected again",
    }, found  # fmt: skip


def test_the_network_cannot_be_changed(reach: Reach, backend: dict[str, Any]) -> None:
    found = reach.inside("reroute", net=["api.good.example"], **backend)
    assert set(found.verdict.values()) <= {"EPERM", "EACCES", "EROFS", "ENOSPC"}, found.verdict
    owner = outside("reroute", namespaces="user net")
    assert {owner[name] for name in ("add a route", "add an address", "a network of its own")} == {"ok"}
    # Those routes and that address are only in a sandbox with rules; that they are missing is an answer too.
    assert "EPERM" not in owner.values(), owner


def test_the_routing_tables_are_of_its_own_namespace(reach: Reach) -> None:
    found = reach.inside("routes", net=["api.good.example"])
    assert found.verdict == {"names": ["lo"], "up": "EPERM", "add": "EPERM"}
    owner = outside("routes", namespaces="user net")
    assert owner["up"] == "ok" and owner["add"] != "EPERM"


TCP, UDP = int(socket.SOCK_STREAM), int(socket.SOCK_DGRAM)
V4, V6 = int(socket.AF_INET), int(socket.AF_INET6)
LISTENERS = [
    *([V4, TCP, address, port] for address in ("0.0.0.0", "127.0.0.1", "198.18.0.3", "11.0.0.10")
      for port in (443, 53)),
    *([V6, TCP, address, port] for address in ("::", "::1", "fd00:5afe::3", "::ffff:127.0.0.1")
      for port in (443, 53)),
    *([V4, UDP, address, 53] for address in ("0.0.0.0", "127.0.0.1", "198.18.0.1", "8.8.8.8")),
    *([V6, UDP, address, 53] for address in ("::", "::1", "fd00:5afe::1", "::ffff:127.0.0.1")),
]  # fmt: skip


def test_no_option_takes_an_address_of_the_listeners(reach: Reach, backend: dict[str, Any]) -> None:
    found = reach.inside("binds", LISTENERS, net=["api.good.example:443"], **backend)
    assert {name for name, ways in found.verdict.items() if ways} == set(), found.verdict
    everywhere = [one for one in LISTENERS if one[2] in ("0.0.0.0", "::")]
    control = outside("binds", json.dumps(everywhere), namespaces="user net")
    assert all(control.values()), control


def test_a_program_that_listens_elsewhere_hears_only_its_own_sandbox(reach: Reach) -> None:
    """It can stand where no rule leads, on any address: for processes of its own sandbox, and nobody else."""
    program = """
import socket, threading
name = socket.getaddrinfo("api.good.example", 8443, socket.AF_INET)[0][4][0]
listener = socket.create_server((name, 8443))
other = socket.create_server(("0.0.0.0", 9000))
threading.Thread(target=lambda: listener.accept()[0].send(b"not the real one"), daemon=True).start()
print(socket.create_connection(("api.good.example", 8443), 3).recv(99).decode())
"""
    result = reach.supervisor.run(["python3", "-c", program], ["api.good.example:443"])
    assert result["stdout"] == "not the real one\n", result["stderr"]
    assert reach.internet.events() == []
    # What the host sees of it: nothing listens there.
    ports = reach.supervisor.do("answer = [open(f'/proc/net/{name}').read() for name in ('tcp', 'tcp6')]")
    assert ":2328 " not in "".join(ports)


OUT_OF_BAND = """
import socket, sys
with socket.create_connection((sys.argv[1], 7008), 5) as end:
    end.sendall(b"ab")
    end.send(b"!", socket.MSG_OOB)
    end.sendall(b"cd")
    end.shutdown(socket.SHUT_WR)
    said = b""
    while data := end.recv(99):
        said += data
print(said.decode())
"""
#: Sends back everything, out-of-band bytes in their place.
IN_LINE_SERVER = """
import socket
with socket.create_server(("", 7008)) as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_OOBINLINE, 1)
    print("ready", flush=True)
    while True:
        end, _ = listener.accept()
        with end:
            while data := end.recv(99):
                end.sendall(data)
"""


@pytest.mark.parametrize("rule", ["echo.good.example:7008", "tcp://echo.good.example:7008"])
def test_out_of_band_bytes_are_not_passed_on(reach: Reach, rule: str) -> None:
    """So there are no bytes that are not looked at and reach the server."""
    command = ["python3", "-c", OUT_OF_BAND, "echo.good.example"]
    with reach.internet.server(["python3", "-c", IN_LINE_SERVER], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        assert reach.internet.outside(command).stdout == "ab!cd\n"
        result = reach.supervisor.run(command, [rule])
        server.stdout.close()
    assert result["stdout"] == "abcd\n", result


SELF = """
import socket
end = socket.socket()
end.bind(("198.18.0.9", 5000))
end.connect(("198.18.0.9", 5000))
end.sendall(b"x")
print(end.recv(1).decode())
one, two = socket.socket(), socket.socket()
one.bind(("198.18.0.9", 5001)); two.bind(("198.18.0.9", 5002))
print(one.connect_ex(("198.18.0.9", 5002)), two.connect_ex(("198.18.0.9", 5001)))
"""


def test_a_socket_that_connects_to_itself_reaches_itself(reach: Reach) -> None:
    result = reach.supervisor.run(["python3", "-c", SELF], ["api.good.example"])
    assert result["stdout"].splitlines()[0] == "x", result
    assert reach.internet.events() == [] and result["network"] == []


@pytest.mark.parametrize("net", [["api.good.example"], []], ids=["rules", "none"])
def test_an_abstract_socket_and_a_socket_file_of_the_host_cannot_be_reached(net: Any, granted: Path) -> None:
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(socket.AF_UNIX) as file:
        abstract.bind(f"\0attack-{os.getpid()}")
        file.bind(str(granted / "docker.sock"))
        for end in (abstract, file):
            end.listen()
        for address in (f"@attack-{os.getpid()}", str(granted / "docker.sock")):
            found = inside("unix_sockets", "stream", address, net=net, read=[str(granted)])
            assert found["connect"] != "ok" and found["smuggle"] != "ok", found
            assert outside("unix_sockets", "stream", address) == {"connect": "ok", "smuggle": "ok"}
