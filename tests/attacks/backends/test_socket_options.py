"""Options of sockets that hold a lock of the whole kernel, or that few programs need, are closed."""

from __future__ import annotations

from typing import Any

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import Policy, PolicyError, backends
from support.means import clauses_for

CLOSED = "ENOPROTOOPT"
HARMLESS = "IP_TTL"
#: Joins groups on one socket of each family until the kernel refuses.
MANY = """
import socket, struct
def count(family, level, option, value):
    with socket.socket(family, socket.SOCK_DGRAM) as end:
        for joined in range(32):
            try:
                end.setsockopt(level, option, value(joined))
            except OSError:
                return joined
        return 32
four = lambda n: socket.inet_aton(f"239.1.1.{n}") + bytes(4) + struct.pack("=i", 1)
six = lambda n: socket.inet_pton(socket.AF_INET6, f"ff15::{n}") + struct.pack("=I", 1)
print(count(socket.AF_INET, 0, 35, four), count(socket.AF_INET6, 41, 20, six))
"""


@pytest.fixture(scope="module", params=list(backends.BACKENDS))
def walls(request: pytest.FixtureRequest) -> dict[str, Any]:
    clauses = clauses_for(request.param)
    return clauses | ({"net": "open"} if clauses["backend"] == "landlock" else {})


@pytest.fixture(scope="module")
def found(walls: dict[str, Any]) -> Any:
    return inside("options", **walls)


@pytest.fixture(scope="module")
def control() -> Any:
    return outside("options", namespaces="user net")


def test_no_program_joins_a_group(found: Any, control: Any) -> None:
    """200 tasks that did made the start of a neighbour take 30 seconds."""
    shown = [name for name, answer in control["joins"].items() if answer == "ok"]
    assert len(shown) >= 8, "the control shows nothing"
    assert set(found["joins"].values()) == {CLOSED}
    assert set(control["read"].values()).isdisjoint({CLOSED}) and set(found["read"].values()) == {CLOSED}


def test_no_program_asks_drivers_under_the_lock_of_all_networks(found: Any, control: Any) -> None:
    """Nor makes the kernel load the modules of bridges."""
    assert control["devices"]["SIOCETHTOOL"] == "ok", "the control shows nothing"
    assert set(found["devices"].values()) == {"ENOTSUP"}


def test_obscure_options_and_protocols_are_closed(found: Any, control: Any) -> None:
    open_outside = {name for name, answer in control["options"].items() if answer == "ok"}
    assert {"UDP_CORK", "UDP_CORK, high", "IPV6_MTU", "IP_OPTIONS", "SO_ZEROCOPY", HARMLESS} <= open_outside
    assert found["options"].pop(HARMLESS) == "ok"
    assert set(found["options"].values()) == {CLOSED}
    assert set(found["calls"].values()) == {"ENOSYS"} and "ENOSYS" not in control["calls"].values()
    assert control["UDP-Lite"] == control["UDP"] == found["UDP"] == "ok"
    assert found["UDP-Lite"] == "Protocol not supported"


def test_a_policy_opens_each_by_its_name() -> None:
    names = ["UDP_CORK", "IPV6_MTU", "vmsplice"]
    found = inside("options", syscalls={"allow": names})
    assert {name for name, answer in found["options"].items() if answer == "ok"} == {
        "UDP_CORK", "UDP_CORK, high", "IPV6_MTU", HARMLESS
    }  # fmt: skip
    assert found["calls"]["vmsplice"] != "ENOSYS" and found["calls"]["tee"] == "ENOSYS"
    assert set(found["joins"].values()) == {CLOSED}


def test_multicast_by_name_has_few_groups_and_a_warning() -> None:
    policy = Policy(syscalls={"allow": ["multicast"]})
    result = stockade.run([arena.PYTHON, "-c", MANY], policy, timeout=60)
    assert result.check().text == "4 32\n"
    assert any("multicast" in warning for warning in result.warnings)
    with open("/proc/sys/net/ipv4/igmp_max_memberships", encoding="ascii") as file:
        assert file.read() != "4\n", "the host's own limit is as it was"


def test_multicast_is_refused_where_the_groups_cannot_be_limited(walls: dict[str, Any]) -> None:
    clauses = walls if walls["backend"] == "bwrap" else walls | {"net": "open"}
    with pytest.raises(PolicyError, match="few memberships"):
        stockade.run(["true"], Policy(syscalls={"allow": ["multicast"]}, **clauses), timeout=60)
