"""The small internet that the tests of the network use: everything in it can be reached without Stockade."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path

from support import internet_layout
from support.means import need_program
from support.network import Internet, small_internet

READ_GREETING = (
    "import socket; s = socket.create_connection(('greeter.good.example', 2500)); print(s.recv(99).decode())"
)


def fetched(internet: Internet, url: str, *options: str) -> dict[str, object]:
    need_program("curl")
    done = internet.outside(["curl", "-sS", *options, url])
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_a_web_server_is_reached_by_name_and_what_arrived_is_known(internet: Internet) -> None:
    found = fetched(internet, "https://www.good.example/path")
    assert (found["address"], found["port"], found["tls"]) == ("11.0.0.11", 443, True)
    assert internet.asked() == {"www.good.example"} and internet.reached() == {("11.0.0.11", 443)}
    (request,) = internet.events("request")
    assert (request["sni"], request["host"]) == ("www.good.example", "www.good.example")


def test_each_test_begins_anew(internet: Internet) -> None:
    assert internet.events() == []
    internet.zone(**{"www.good.example": {"A": ["11.0.0.99"]}})
    assert fetched(internet, "http://www.good.example/")["address"] == "11.0.0.99"
    internet.reset()
    assert fetched(internet, "http://www.good.example/")["address"] == "11.0.0.11"


def test_http_2_and_ipv6_are_spoken(internet: Internet) -> None:
    found = fetched(internet, "https://h2.good.example/", "--http2")
    assert found["version"] == "2"
    if internet.ipv6:
        found = fetched(internet, "https://six.good.example/")
        assert found["address"] == "2a10:600d::10"


def test_the_addresses_that_no_sandbox_may_reach_are_there(internet: Internet) -> None:
    for name, address in {
        "metadata.evil.example": "169.254.169.254",
        "local.evil.example": "127.0.0.1",
        "private.evil.example": "10.0.0.5",
    }.items():
        done = internet.outside(["curl", "-sS", f"http://{name}/"])
        assert done.returncode == 0 and (address, 80) in internet.reached(), done.stderr
    assert "credentials" in internet.outside(["curl", "-sS", "http://169.254.169.254/"]).stdout


def test_a_name_can_lead_elsewhere_the_second_time(internet: Internet) -> None:
    assert fetched(internet, "http://rebind.evil.example/")["address"] == "11.0.0.66"
    assert fetched(internet, "http://rebind.evil.example/")["address"] == "127.0.0.1"


def test_a_server_may_speak_first(internet: Internet) -> None:
    done = internet.python(READ_GREETING)
    assert done.stdout.strip() == internet_layout.GREETING.decode().strip(), done.stderr


def test_stockade_runs_in_it_with_the_network_of_the_machine(internet: Internet) -> None:
    result = internet.run(["curl", "-sS", "https://www.good.example/"], "open")
    assert json.loads(result["stdout"])["address"] == "11.0.0.11", result
    result = internet.run(["curl", "-sS", "https://www.good.example/"])
    assert result["exit_code"] == 6, "no network: the name is not found"


def test_the_library_runs_in_it(internet: Internet) -> None:
    code = (
        "import stockade\n"
        "policy = stockade.Policy(net='open')\n"
        "print(stockade.run(['curl', '-sS', 'http://www.good.example/'], policy).text)"
    )
    done = internet.python(code)
    assert json.loads(done.stdout)["address"] == "11.0.0.11", done.stderr


def test_programs_in_it_have_the_callers_identity_and_no_more(internet: Internet) -> None:
    assert internet.outside(["id", "-u"]).stdout.strip() == str(os.geteuid())
    if os.geteuid():
        lines = internet.outside(["cat", "/proc/self/status"]).stdout.splitlines()
        assert "CapEff:\t0000000000000000" in lines and "CapAmb:\t0000000000000000" in lines


def test_it_starts_quickly_and_leaves_nothing(tmp_path: Path) -> None:
    begun = time.monotonic()
    with small_internet(tmp_path):
        assert time.monotonic() - begun < 1.5
    assert subprocess.run(["ip", "addr"], capture_output=True, check=True).stdout.count(b"11.0.0.1/") == 0


def test_names_outside_the_zone_do_not_exist(internet: Internet) -> None:
    assert internet.outside(["getent", "ahosts", "evil.example"]).returncode == 0
    assert internet.outside(["getent", "ahosts", "other.example"]).returncode == 2
    assert internet.asked() == {"evil.example", "other.example"}
