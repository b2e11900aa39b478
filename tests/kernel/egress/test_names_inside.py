"""Names as programs behind rules see them, and where a connection to such a name leads."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from support.means import need
from support.network import Internet

RULES = ["good.example", "*.good.example:80"]
BEGIN = """
import json, socket, sys

def look(name, family=0, flags=0):
    try:
        found = socket.getaddrinfo(name, 80, family, socket.SOCK_STREAM, 0, flags)
    except socket.gaierror as error:
        return error.errno == socket.EAI_NONAME and "does not exist"
    return sorted({each[4][0] for each in found})

def fetch(name):
    try:
        with socket.create_connection((name, 80), 20) as connection:
            lines = ["GET / HTTP/1.1", f"Host: {name.encode('idna').decode()}", "Connection: close", "", ""]
            connection.sendall("\\r\\n".join(lines).encode())
            answer = b"".join(iter(lambda: connection.recv(9999), b""))
        return json.loads(answer.partition(b"\\r\\n\\r\\n")[2])["address"]
    except OSError as error:
        return type(error).__name__
"""


def inside(internet: Internet, code: str, rules: list[str] = RULES) -> Any:
    result = internet.run([sys.executable, "-c", BEGIN + code], rules)
    assert result["exit_code"] == 0, (result["reason"], result["stderr"])
    return json.loads(result["stdout"])


def test_every_spelling_of_a_name_has_the_same_address(internet: Internet) -> None:
    code = """
names = ["b\\u00fccher.good.example", "xn--bcher-kva.good.example", "XN--Bcher-kva.GOOD.example",
         "xn--bcher-kva.good.example."]
print(json.dumps([look(name) for name in names * 2]))
"""
    found = inside(internet, code)
    assert found[0] and found == [found[0]] * 8
    assert internet.asked() == set(), "nothing is looked up before a connection is made"


def test_each_name_has_an_address_of_its_own_in_both_families(internet: Internet) -> None:
    code = """
print(json.dumps([look("api.good.example", socket.AF_INET), look("api.good.example", socket.AF_INET6),
                  look("www.good.example", socket.AF_INET), look("a.b.good.example", socket.AF_INET),
                  look("api.good.example", 0, socket.AI_ADDRCONFIG)]))
"""
    four, six, other, deep, configured = inside(internet, code)
    assert len({*four, *other, *deep}) == 3 and all(each.startswith("198.18.") for each in four + other)
    if internet.ipv6:
        assert six[0].startswith("fd00:5afe::") and configured == sorted(four + six)
    else:
        assert configured == four


def test_names_outside_the_rules_do_not_exist(internet: Internet) -> None:
    names = ["evil.example", "good.example.evil.example", "notgood.example", "api", "stockade.invalid"]
    found = inside(internet, f"print(json.dumps([look(name) for name in {names}]))")
    assert found == ["does not exist"] * len(names)
    assert internet.asked() == set()


def test_the_machine_itself_has_its_names(internet: Internet) -> None:
    code = "print(json.dumps([look('localhost'), look(socket.gethostname())]))"
    for found in inside(internet, code):
        assert "127.0.0.1" in found


def test_an_address_leads_back_to_its_name(internet: Internet) -> None:
    code = """
found = [socket.getnameinfo((address, 80), 0)[0] for address in look("api.good.example")]
print(json.dumps([*found, socket.getnameinfo(("8.8.8.8", 80), 0)[0]]))
"""
    *own, foreign = inside(internet, code)
    assert own and set(own) == {"api.good.example"} and foreign == "8.8.8.8"
    assert internet.asked() == set()


def test_a_connection_leads_where_the_name_leads_outside(internet: Internet) -> None:
    wanted = {
        "www.good.example": "11.0.0.11",
        "four.good.example": "11.0.0.10",
        "bücher.good.example": "11.0.0.12",
        "deep.down.wild.good.example": "11.0.0.13",
        "in-hosts.good.example": "11.0.0.14",
        "broken-four.good.example": "11.0.0.10",
        "broken-six.good.example": "11.0.0.10",
        "missing.good.example": "ConnectionResetError",
        "servfail.good.example": "ConnectionResetError",
        "nowhere.good.example": "ConnectionResetError",
    }
    if internet.ipv6:
        wanted |= {"six.good.example": "2a10:600d::10", "alias.good.example": "2a10:600d::10"}
    names = list(wanted)
    code = f"print(json.dumps(dict(zip({names}, map(fetch, {names})))))"
    result = internet.run([sys.executable, "-c", BEGIN + code], RULES)
    assert json.loads(result["stdout"]) == wanted
    reasons = {each["name"]: each["reason"] for each in result["network"] if each["verdict"] == "failed"}
    assert reasons == {
        "missing.good.example": "name not found",
        "servfail.good.example": "resolver failed",
        "nowhere.good.example": "unreachable",
    }


def test_a_server_that_takes_long_to_find_keeps_no_other_waiting(internet: Internet) -> None:
    code = """
import threading, time
begun, ended = time.monotonic(), {}
def visit(name):
    fetch(name)
    ended[name] = time.monotonic() - begun
threads = [threading.Thread(target=visit, args=(name,)) for name in sys.argv[1:]]
for thread in threads: thread.start(); time.sleep(0.1)
for thread in threads: thread.join()
print(json.dumps(ended))
"""
    names = ["slow.good.example", "www.good.example"]
    result = internet.run([sys.executable, "-c", BEGIN + code, *names], RULES)
    ended = json.loads(result["stdout"])
    assert ended["www.good.example"] < ended["slow.good.example"]


@pytest.mark.parametrize("change", ["hosts", "resolv.conf"])
def test_a_change_of_the_machines_files_counts_for_the_next_connection(
    internet: Internet, change: str
) -> None:
    need(internet.outside(["test", "-w", f"/etc/{change}"]).returncode == 0, f"/etc/{change} is read-only")
    text = {
        "hosts": "127.0.0.1 localhost\n11.0.0.77 moving.good.example\n",
        "resolv.conf": "nameserver 8.8.8.8\noptions timeout:2 attempts:1\n",
    }[change]
    internet.zone(**{"moving.good.example": {"A": [["11.0.0.76"], ["11.0.0.77"]], "ttl": 0}})
    code = f"""
import stockade, sys
program = [sys.executable, "-c", {BEGIN + "print(fetch('moving.good.example'))"!r}]
with stockade.Sandbox(stockade.Policy(net=["moving.good.example:80"])) as box:
    print(box.run(program).text.strip())
    with open("/etc/{change}", "w") as file:
        file.write({text!r})
    print(box.run(program).text.strip())
"""
    done = internet.python(code)
    assert done.stdout.split() == ["11.0.0.76", "11.0.0.77"], done.stderr
    servers = [event["address"] for event in internet.events("dns")]
    assert ("8.8.8.8" in servers) == (change == "resolv.conf")
