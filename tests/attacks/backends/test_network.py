"""Network: loopback of its own and nothing else, over whatever family, type or protocol.

What network rules let out is attacked in `attacks/egress`.
"""

from __future__ import annotations

import socket
from typing import Any

import pytest

from attacks.arena import inside, outside
from support.means import need

ALLOWED = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
STREAM, DATAGRAM, RAW = 1, 2, 3
PACKET, VSOCK = 17, 40
HIGH = 1 << 32
REFUSED = {"EAFNOSUPPORT", "EPERM"}
NETS = pytest.mark.parametrize("net", [[], ["api.good.example"], "open"], ids=["none", "rules", "open"])


@NETS
def test_every_family_but_the_four_common_ones_is_refused(net: Any) -> None:
    every = [f"{family},{kind},0" for family in range(64) if family not in ALLOWED for kind in (1, 2, 3, 5)]
    verdict = inside("sockets", *every, net=net)
    assert {answer for answer, _ in verdict.values()} == {"EAFNOSUPPORT"}
    # Which of them a kernel has differs; packet sockets are everywhere, for whoever owns the network.
    assert outside("sockets", "17,3,0", namespaces="user net")["17,3,0"][0] == "ok"


@NETS
def test_a_pair_of_another_family_does_not_even_reach_its_code(net: Any) -> None:
    """Where a family cannot make pairs the kernel finds out only after it has loaded and entered its code."""
    every = [f"{family},{kind},0" for family in range(64) if family not in ALLOWED for kind in (1, 2, 3, 5)]
    pairs = {words: pair for words, (_, pair) in inside("sockets", *every, net=net).items()}
    assert {words: pair for words, pair in pairs.items() if pair not in REFUSED} == {}
    assert outside("sockets", "17,3,0", namespaces="user net")["17,3,0"][1] not in REFUSED


@NETS
def test_a_number_beyond_32_bits_does_not_slip_past(net: Any) -> None:
    """The kernel looks at the low half only; a filter that compares both halves must refuse the rest."""
    words = [f"{HIGH | PACKET},{RAW},0", f"{HIGH | VSOCK},{STREAM},0", f"16,{RAW},{HIGH | 15}"]
    assert {answer for answer, _ in inside("sockets", *words, net=net).values()} <= REFUSED
    assert outside("sockets", words[0], namespaces="user net")[words[0]][0] == "ok"


@NETS
def test_raw_sockets_are_refused(net: Any) -> None:
    words = [f"{family},{RAW},{protocol}" for family in (2, 10) for protocol in (1, 6, 17, 58, 255)]
    found = {answer for answer, _ in inside("sockets", *words, net=net).values()}
    assert found == {"EPERM", "EPROTONOSUPPORT"}
    assert {answer for answer, _ in outside("sockets", *words, namespaces="user net").values()} == {"ok"}


@NETS
def test_of_netlink_only_the_routing_tables_answer(net: Any) -> None:
    others = [f"16,{RAW},{protocol}" for protocol in range(1, 32)]
    assert {answer for answer, _ in inside("sockets", *others, net=net).values()} == {"EAFNOSUPPORT"}
    assert outside("sockets", f"16,{RAW},15")[f"16,{RAW},15"][0] == "ok"


def test_the_routing_tables_are_of_its_own_namespace_and_cannot_be_changed() -> None:
    verdict = inside("routes")
    assert verdict["names"] == ["lo"]
    assert (verdict["up"], verdict["add"]) == ("EPERM", "EPERM")
    assert set(outside("routes")["names"]) == {name for _, name in socket.if_nameindex()}
    owner = outside("routes", namespaces="user net")
    assert owner["up"] == "ok" and owner["add"] != "EPERM"


def test_in_the_hosts_network_nothing_can_be_changed() -> None:
    verdict = inside("routes", net="open")
    assert (verdict["up"], verdict["add"]) == ("EPERM", "EPERM")
    assert outside("routes", namespaces="user net")["up"] == "ok"


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("kind", [STREAM, DATAGRAM], ids=["tcp", "udp"])
def test_the_hosts_own_ports_are_out_of_reach(address: str, kind: int) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, kind) as end:
        try:
            end.bind((address, 0))
        except OSError as error:
            need(False, f"this host has no {address}: {error.strerror}")
        if kind == STREAM:
            end.listen(1)
        end.settimeout(0.2)
        words = f"{int(family)},{kind},{address},{end.getsockname()[1]}"
        assert inside("packets", words)[words] in ("ECONNREFUSED", "ok" if kind == DATAGRAM else "")
        with pytest.raises(TimeoutError):
            end.accept() if kind == STREAM else end.recv(16)
        assert outside("packets", words) == {words: "ok"}
        if kind == DATAGRAM:
            assert end.recv(16) == b"a secret"


@pytest.mark.parametrize("kind", [STREAM, DATAGRAM], ids=["tcp", "udp"])
def test_no_packet_leaves(kind: int) -> None:
    """Addresses for documentation, a metadata service and a name server's; the control stays on loopback."""
    targets = [
        f"2,{kind},{address},53" for address in ("192.0.2.1", "169.254.169.254", "10.0.0.1", "224.0.0.1")
    ]
    targets += [
        f"10,{kind},{address},53" for address in ("2001:db8::1", "fe80::1", "64:ff9b::a9fe:a9fe", "ff02::1")
    ]
    assert set(inside("packets", *targets).values()) <= {
        "ENETUNREACH",
        "EADDRNOTAVAIL",
        "EINVAL",
        "EHOSTUNREACH",
    }
    with socket.socket(socket.AF_INET, kind) as end:
        end.bind(("127.0.0.1", 0))
        if kind == STREAM:
            end.listen(1)
        words = f"2,{kind},127.0.0.1,{end.getsockname()[1]}"
        assert outside("packets", words) == {words: "ok"}


def test_with_an_open_network_the_host_is_reached_because_the_policy_says_so() -> None:
    with socket.socket() as end:
        end.bind(("127.0.0.1", 0))
        end.listen(1)
        words = f"2,1,127.0.0.1,{end.getsockname()[1]}"
        assert inside("packets", words, net="open") == {words: "ok"}
        assert outside("packets", words) == {words: "ok"}
