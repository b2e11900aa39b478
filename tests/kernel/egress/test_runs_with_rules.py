"""A run with network rules: what it reaches, and what its result, receipt, log and terminal say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stockade.host import bubblewrap
from support import bubblewraps
from support.network import Internet

FETCH = "import sys, urllib.request as u; print(u.urlopen(sys.argv[1], timeout=10).status)"
#: What each test of the library begins with. Tests print what they found, as JSON.
BEGIN = f"""
import json, stockade
FETCH = {FETCH!r}
POLICY = stockade.Policy(net=["api.good.example", "www.good.example:80"])
def fetch(url):
    return ["python3", "-c", FETCH, url]
def said(result):
    reached = [(one.target, one.verdict) for one in result.network if one.kind == "connect"]
    return [result.text.strip(), reached]
"""
API = ["200", [["api.good.example:443", "allowed"]]]
WEB = ["200", [["www.good.example:80", "allowed"]]]


def fetch(url: str) -> list[str]:
    return ["python3", "-c", FETCH, url]


def library(internet: Internet, code: str, **more: Any) -> Any:
    done = internet.python(BEGIN + code, **more)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_an_allowed_name_is_reached_and_recorded(internet: Internet) -> None:
    result = internet.run(fetch("https://api.good.example/"), ["api.good.example:443"])
    assert result["ok"] and result["stdout"] == "200\n", result
    (one,) = [one for one in result["network"] if one["kind"] == "connect"]
    assert (one["name"], one["port"], one["verdict"], one["rule"]) == (
        "api.good.example", 443, "allowed", "api.good.example:443",
    )  # fmt: skip
    assert one["address"] in ("11.0.0.10", "2a10:600d::10")
    assert one["sent"] > 100 and one["received"] > 100 and one["sent"] == result["usage"]["bytes_sent"]
    assert result["usage"]["bytes_received"] == one["received"]
    assert result["denials"] == [] and result["network_cut"] == ""
    assert internet.reached() <= {("11.0.0.10", 443), ("2a10:600d::10", 443)}


def test_the_control_says_how_it_was_observed(internet: Internet) -> None:
    result = internet.run(["true"], ["api.good.example:443"])
    kept = result["controls"]["network.rules"]
    assert kept["grade"] == "namespace descriptors compared" and "egress" in kept["mechanism"]
    assert "listeners" in kept["observed"]
    assert "network.none" not in result["controls"]


def test_a_refused_name_is_a_denial_with_the_rule_that_would_allow_it(internet: Internet) -> None:
    result = internet.run(fetch("https://evil.example/"), ["api.good.example:443"])
    assert not result["ok"]
    denials = {one["target"]: one for one in result["denials"]}
    assert denials["evil.example"]["hint"] == "--net evil.example"
    assert denials["evil.example"]["wall"] == "network.rules"
    assert "the network rules refused the lookup of evil.example" in result["hint"]
    assert "evil.example" not in internet.asked() and internet.reached() == set()


def test_the_command_line_says_what_was_refused(internet: Internet, tmp_path: Path) -> None:
    done = internet.stockade(
        "run", "--net", "api.good.example:443", "--", *fetch("https://evil.example/"), cwd=tmp_path
    )
    line = "stockade: refused: the name evil.example; allow it with --net evil.example"
    assert line in done.stderr.splitlines(), done.stderr


def test_a_private_address_behind_an_allowed_name_needs_a_rule_of_its_own(
    internet: Internet, tmp_path: Path
) -> None:
    words = fetch("http://private.evil.example/")
    done = internet.stockade("run", "--net", "private.evil.example", "--", *words, cwd=tmp_path)
    line = (
        "stockade: refused: 1 connection to private.evil.example:80 "
        "(the name leads to the private address 10.0.0.5); allow it with --net 10.0.0.5:80"
    )
    assert line in done.stderr.splitlines(), done.stderr
    assert internet.run(words, ["private.evil.example", "10.0.0.5:80"])["stdout"] == "200\n"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nosuch.example", "this machine finds no such name"),
        ("servfail.good.example", "this machine could not look up the name"),
        ("nowhere.good.example", "this machine has no route to 12.0.0.1"),
    ],
)
def test_an_allowed_host_that_cannot_be_reached_is_explained(internet: Internet, name: str, why: str) -> None:
    result = internet.run(fetch(f"http://{name}/"), [name])
    assert result["hint"] == f"the network rules allow {name}:80, but {why}", result
    assert result["denials"] == []


def test_decisions_are_printed_as_they_happen(internet: Internet, tmp_path: Path) -> None:
    words = fetch("https://api.good.example/")
    done = internet.stockade("run", "-v", "--net", "api.good.example:443", "--", *words, cwd=tmp_path)
    lines = [line for line in done.stderr.splitlines() if line.startswith("stockade: network: ")]
    assert any(line.startswith("stockade: network: allowed: api.good.example:443 at ") for line in lines), (
        lines
    )


def test_the_receipt_has_counts_digest_and_the_walls_of_the_egress(internet: Internet) -> None:
    found = library(
        internet,
        """
result = stockade.run(fetch("https://api.good.example/"), POLICY)
stockade.verify(result.receipt, stockade.receipt.public_key(), require=["network.rules"], result=result)
network = result.receipt.predicate.network
other = stockade.run(["true"], POLICY)
import msgspec
try:
    changed = msgspec.structs.replace(result, network=())
    stockade.verify(result.receipt, stockade.receipt.public_key(), result=changed)
except stockade.ReceiptError as error:
    refused = error.failure
print(json.dumps([network.mode, list(network.rules), network.counts.connections_allowed, network.egress.ports,
    sorted(network.egress.namespaces), len(network.egress.plan), refused, other.network == [],
    network.routes, network.listeners, len(network.resolver.filter)]))
""",
    )
    mode, rules, allowed, ports, namespaces, plan, refused, empty, routes, listeners, resolver = found
    assert "local 0.0.0.0/0" in routes and {"tcp4/443", "tcp4/80", "udp4/53"} <= set(listeners)
    assert resolver == 64 and "net" not in namespaces
    assert (mode, allowed, ports) == ("rules", 1, [80, 443])
    assert rules == ["api.good.example", "www.good.example:80"]
    assert "mnt" in namespaces and "pid" in namespaces and plan == 64 and refused == "result" and empty


def test_plain_http_on_an_allowed_port(internet: Internet) -> None:
    result = internet.run(fetch("http://www.good.example/"), ["www.good.example:80"])
    assert result.get("stdout") == "200\n", result


def test_the_log_has_what_was_reached_and_refused(internet: Internet, tmp_path: Path) -> None:
    result = internet.run(fetch("https://api.good.example/"), ["api.good.example:443"], "--name", "logged")
    assert result["ok"], result
    done = internet.stockade("logs", "--json", "--all", cwd=tmp_path)
    (line,) = [one for one in json.loads(done.stdout) if one["name"] == "logged"]
    assert line["reached"] >= 1 and line["refused"] == 0 and line["bytes_received"] > 0
    assert any("api.good.example:443" in words for words in line["network_first"])


def test_a_living_sandbox_reports_to_each_run_what_it_did(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Sandbox(POLICY) as box:
    first = box.run(fetch("https://api.good.example/"))
    second = box.run(fetch("http://www.good.example/"))
    third = box.run(["true"])
    print(json.dumps([said(first), said(second), said(third), third.usage.bytes_sent]))
""",
    )
    # The end of the first run's connection can be seen as late as in the second.
    found[1][1] = [one for one in found[1][1] if one not in API[1]]
    assert found == [API, WEB, ["", []], 0]


def test_an_async_sandbox(internet: Internet) -> None:
    found = library(
        internet,
        """
import asyncio
async def main():
    async with stockade.AsyncSandbox(POLICY) as box:
        return await asyncio.gather(*(box.run(fetch("https://api.good.example/")) for _ in range(3)))
print(json.dumps([result.text for result in asyncio.run(main())]))
""",
    )
    assert found == ["200\n"] * 3


def test_a_shell(internet: Internet) -> None:
    found = library(
        internet,
        """
import shlex
with stockade.Sandbox(POLICY) as box, box.shell() as shell:
    print(json.dumps(said(shell.run(shlex.join(fetch("https://api.good.example/"))))))
""",
    )
    assert found == API


def test_a_pool(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.Pool(POLICY, size=2) as pool:
    print(json.dumps([said(pool.run(fetch("https://api.good.example/"))) for _ in range(3)]))
""",
    )
    assert found == [API] * 3


def test_a_warm_python(internet: Internet) -> None:
    found = library(
        internet,
        """
with stockade.functions.WarmPython(POLICY, preload=["urllib.request"], size=1) as python:
    print(json.dumps([said(python.run(FETCH, args=["https://api.good.example/"])) for _ in range(2)]))
""",
    )
    assert found == [API] * 2


def test_runs_in_threads(internet: Internet) -> None:
    found = library(
        internet,
        """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as threads:
    results = list(threads.map(lambda _: stockade.run(fetch("https://api.good.example/"), POLICY), range(6)))
print(json.dumps([said(result) for result in results]))
""",
    )
    assert found == [API] * 6


def test_an_asynchronous_run(internet: Internet) -> None:
    found = library(
        internet,
        """
import asyncio
print(json.dumps(said(asyncio.run(stockade.run_async(fetch("https://api.good.example/"), POLICY)))))
""",
    )
    assert found == API


@pytest.mark.parametrize("version", [bubblewraps.OLD, bubblewraps.NEW])
def test_bubblewrap_keeps_the_same_rules(internet: Internet, version: str) -> None:
    found = library(
        internet,
        """
policy = stockade.Policy(net=["api.good.example"], backend="bwrap", accept=["ipc", "deny"], toolchain=False)
good = stockade.run(fetch("https://api.good.example/"), policy)
evil = stockade.run(fetch("https://evil.example/"), policy)
print(json.dumps([said(good), evil.ok, [one.target for one in evil.denials]]))
""",
        env={bubblewrap.NAMED: bubblewraps.program(version)},
    )
    assert found == [API, False, ["evil.example"]]


def test_landlock_alone_does_not_offer_rules(internet: Internet) -> None:
    result = internet.run(["true"], ["api.good.example"], "--backend", "landlock")
    assert result["outcome"] == "setup-failed" and "network.rules" in result["reason"], result


@pytest.mark.parametrize("net, mode", [("open", "open"), ("none", "none"), ("api.good.example", "rules")])
def test_the_plan_shows_the_network(internet: Internet, tmp_path: Path, net: str, mode: str) -> None:
    shown = internet.stockade("plan", "--net", net, "--json", "--", "true", cwd=tmp_path)
    assert json.loads(shown.stdout)["network"]["mode"] == mode, shown.stderr
    text = internet.stockade("plan", "--net", net, "--", "true", cwd=tmp_path).stdout
    assert ("network: open: the host's network" in text) is (mode == "open")
    if mode == "rules":
        assert "  api.good.example" in text and "listeners inside: TCP 53, 80, 443" in text
        assert "grant TCP connections to port 443" in text


def test_if_the_egress_process_ends_connections_are_refused_and_the_result_says_so(
    internet: Internet,
) -> None:
    found = library(
        internet,
        """
import os, select, signal
with stockade.Sandbox(POLICY) as box:
    before = box.run(fetch("https://api.good.example/"))
    egress = box._box.egress.process.pidfd
    signal.pidfd_send_signal(egress, signal.SIGKILL)
    select.select([egress], [], [])
    after = box.run(["python3", "-c", '''
import socket, errno
for address in ("198.18.0.1", "203.0.113.9", "127.0.0.1"):
    try:
        socket.create_connection((address, 443), 5)
    except OSError as error:
        print(errno.errorcode[error.errno])
try:
    socket.getaddrinfo("api.good.example", 443)
except OSError as error:
    print(type(error).__name__)
'''])
    print(json.dumps([said(before), after.text.split(), after.warnings]))
""",
    )
    assert found[0] == API
    assert found[1] == ["ECONNREFUSED"] * 3 + ["gaierror"]
    assert any("the egress process ended at" in warning for warning in found[2]), found


def test_nothing_is_left_of_a_sandbox_with_rules(internet: Internet) -> None:
    found = library(
        internet,
        """
import os
def held():
    return sorted(os.readlink(f"/proc/self/fd/{name}").split(":")[0] for name in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{name}"))
for _ in range(2):  # from the second on, a process keeps a cgroup for the next
    stockade.run(["true"], POLICY)
before = held()
for _ in range(3):
    stockade.run(["true"], POLICY)
print(json.dumps([before, held()]))
""",
    )
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "net, mode, said",
    [
        ("open", "open", "open: the host's network"),
        (
            "api.good.example",
            "rules",
            "1 rule: 0 connections allowed, 0 refused; 0 names answered, 0 refused",
        ),
    ],
)
def test_the_result_and_the_receipt_say_which_network_it_was(
    internet: Internet, tmp_path: Path, net: str, mode: str, said: str
) -> None:
    result = internet.run(["true"], net, "--receipt", str(tmp_path / "run.json"))
    assert result["network_mode"] == mode
    shown = internet.stockade("verify", str(tmp_path / "run.json"), cwd=tmp_path).stdout
    assert f"network    {said}" in shown, shown
    line = internet.stockade("run", "-v", "--net", net, "--discard", "--", "true", cwd=tmp_path).stderr
    assert ("stockade: network: open: the host's network" in line) is (net == "open")


def test_a_receipt_without_rules_has_nothing_new(internet: Internet) -> None:
    found = library(
        internet,
        """
import msgspec
network = msgspec.json.decode(stockade.run(["true"]).receipt.payload)["predicate"]["network"]
usage = msgspec.json.decode(stockade.run(["true"]).receipt.payload)["predicate"]["usage"]
print(json.dumps([network, sorted(usage)]))
""",
    )
    assert found[0] == {"mode": "none"}
    assert found[1] == ["bytes_written", "cpu_system", "cpu_user", "peak_memory", "peak_tasks", "source"]
