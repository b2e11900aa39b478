"""The tables of routes and addresses that the supervisor reads: one entry more or less is refused."""

from __future__ import annotations

import pytest

from stockade.errors import SetupError
from stockade.runs.network.network_evidence import _check_ipv4, _check_ipv6

TRIE = """Local:
  +-- 0.0.0.0/0 3 0 5
     |-- 0.0.0.0
        /0 host LOCAL
     +-- 127.0.0.0/8 2 0 2
        +-- 127.0.0.0/31 1 0 0
           |-- 127.0.0.0
              /8 host LOCAL
           |-- 127.0.0.1
              /32 host LOCAL
        |-- 127.255.255.255
           /32 link BROADCAST
     |-- 198.18.0.2
        /32 host LOCAL
"""
ZERO = "0" * 32
OWN = "fd005afe000000000000000000000002"


def route(address: str, length: str, metric: str, flags: str, device: str = "lo") -> str:
    return f"{address} {length} {ZERO} 00 {ZERO} {metric} 00000001 00000000 {flags}       {device}\n"


DEFAULT = route(ZERO, "00", "00000400", "80000001")
NOTHING = route(ZERO, "00", "ffffffff", "00200200")
ADDRESSED = route(OWN, "80", "00000000", "80200001")
TABLE = NOTHING + DEFAULT + ADDRESSED + route(OWN, "80", "00000100", "00200200")
LOOPBACK = f"{1:032x} 01 80 10 80       lo\n"
HELD = LOOPBACK + f"{OWN} 01 80 00 82       lo\n"


def test_the_expected_ipv4_routes_pass() -> None:
    _check_ipv4(TRIE)
    _check_ipv4("Main:\n" + TRIE.partition("\n")[2] + TRIE)
    _check_ipv4(TRIE.replace("/8 host LOCAL\n", "/8 host LOCAL\n              /32 link BROADCAST\n"))


@pytest.mark.parametrize(
    "table",
    [
        "",
        "no table\n\n/\n|--\n",
        TRIE.replace("        /0 host LOCAL\n", ""),
        TRIE.replace("/0 host LOCAL", "/0 universe UNICAST"),
        TRIE.replace("198.18.0.2", "198.18.0.3"),
        TRIE + "     |-- 10.0.0.0\n        /8 universe UNICAST\n",
        TRIE + "     |-- 0.0.0.0\n        /0 universe UNICAST\n",
    ],
)
def test_other_ipv4_routes_are_refused(table: str) -> None:
    with pytest.raises(SetupError, match="IPv4 routes are not as they must be") as caught:
        _check_ipv4(table)
    assert caught.value.stage == "evidence"


def test_the_expected_ipv6_routes_and_addresses_pass() -> None:
    _check_ipv6(TABLE, HELD, True)
    _check_ipv6(NOTHING + DEFAULT, HELD, True)
    for addresses in ("", LOOPBACK):
        _check_ipv6("", addresses, False)
        _check_ipv6(NOTHING, addresses, False)


@pytest.mark.parametrize(
    ("routes", "addresses", "wanted"),
    [
        (NOTHING + ADDRESSED, HELD, True),
        ("", HELD, True),
        ("short line\n", HELD, True),
        (TABLE.replace("80000001", "00000001"), HELD, True),
        (TABLE + route(ZERO, "00", "00000100", "00000003", "eth0"), HELD, True),
        (TABLE + route(ZERO, "00", "00000100", "00000003"), HELD, True),
        (TABLE + route("fe80" + "0" * 28, "40", "00000100", "00000001"), HELD, True),
        (TABLE, LOOPBACK, True),
        (TABLE, "", True),
        (TABLE, HELD + f"{2:032x} 02 40 00 80     eth0\n", True),
        (TABLE, HELD, False),
        (NOTHING, HELD, False),
        (DEFAULT, LOOPBACK, False),
    ],
)
def test_other_ipv6_routes_and_addresses_are_refused(routes: str, addresses: str, wanted: bool) -> None:
    with pytest.raises(SetupError, match="are not as they must be") as caught:
        _check_ipv6(routes, addresses, wanted)
    assert caught.value.stage == "evidence"
