"""Another host behind an allowed name: in the TLS hello, and in the requests of plain HTTP."""

from __future__ import annotations

import ssl
import struct
from typing import Any

import pytest

from attacks.egress.reach import Reach

GOOD, EVIL = "api.good.example", "evil.example"
ALERT, HANDSHAKE = 21, 22


def hello(name: str | None, version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3) -> bytes:
    """The first message of a real client for a name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = version
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


def records(message: bytes, size: int) -> list[bytes]:
    """The same hello in records of another size."""
    body = message[5:]
    return [message[:3] + struct.pack(">H", len(body[at : at + size])) + body[at : at + size]
            for at in range(0, len(body), size)]  # fmt: skip


def with_extension(message: bytes, kind: int, data: bytes) -> bytes:
    """The same hello with one more extension, first of all."""
    body = bytearray(message[9:])
    at = 2 + 32
    at += 1 + body[at]
    at += 2 + struct.unpack_from(">H", body, at)[0]
    at += 1 + body[at]
    (length,) = struct.unpack_from(">H", body, at)
    extension = struct.pack(">HH", kind, len(data)) + data
    body[at : at + 2] = struct.pack(">H", length + len(extension))
    body[at + 2 : at + 2] = extension
    handshake = b"\x01" + len(body).to_bytes(3, "big") + bytes(body)
    return message[:3] + struct.pack(">H", len(handshake)) + handshake


def server_name(name: str) -> bytes:
    encoded = name.encode()
    return struct.pack(">HBH", len(encoded) + 3, 0, len(encoded)) + encoded


def talk(port: int, *pieces: bytes, pause: float = 0.0) -> list[Any]:
    return [GOOD, port, [piece.hex() for piece in pieces], pause]


def answered(found: str) -> int:
    """The kind of the first record of an answer; -1 if there is none."""
    return int(found[:2], 16) if found and not found.isupper() and found[:2] != "no" else -1


#: Hellos that ask the server behind the allowed name for another one, or for none.
HELLOS: dict[str, list[bytes]] = {
    "another name": [hello(EVIL)],
    "another name, TLS 1.2": [hello(EVIL, ssl.TLSVersion.TLSv1_2)],
    "no name": [hello(None)],
    "in many records": records(hello(EVIL), 16),
    "byte by byte": [bytes([byte]) for byte in hello(EVIL)[:60]] + [hello(EVIL)[60:]],
    "a parent of the name": [hello("good.example")],
    "a name below the name": [hello("x." + GOOD)],
}
#: Hellos that servers may read in one way and the egress in another; not every server takes them.
ODD: dict[str, list[bytes]] = {
    "two name extensions": [with_extension(hello(GOOD), 0, server_name(EVIL))],
    "two name extensions, the good one first": [with_extension(hello(EVIL), 0, server_name(GOOD))],
    "two names in one": [with_extension(hello(None), 0, struct.pack(">H", len(GOOD) + len(EVIL) + 6)
        + server_name(GOOD)[2:] + server_name(EVIL)[2:])],
    "with an empty record first": [hello(GOOD)[:3] + b"\0\0", hello(EVIL)],
    "with a warning first": [b"\x15\x03\x01\x00\x02\x01\x00", hello(EVIL)],
    "an empty name": [with_extension(hello(None), 0, server_name(""))],
    "a name with a NUL": [with_extension(hello(None), 0, server_name(GOOD + "\0." + EVIL))],
    "an address as name": [with_extension(hello(None), 0, server_name("11.0.0.66"))],
}  # fmt: skip


@pytest.mark.parametrize("port", [443, 8443])
def test_a_hello_for_another_name_is_refused_on_every_port(reach: Reach, port: int) -> None:
    attack = [talk(port, *pieces, pause=0.002) for pieces in HELLOS.values()]
    outside = dict(zip(HELLOS, reach.outside("streams", attack), strict=True))
    assert {name for name, found in outside.items() if answered(found) != HANDSHAKE} == set(), outside
    attack += [talk(port, *pieces, pause=0.01) for pieces in ODD.values()]
    inside = reach.inside("streams", attack, net=[f"{GOOD}:{port}"])
    found = dict(zip([*HELLOS, *ODD], inside.verdict, strict=True))
    assert {name for name, said in found.items() if answered(said) == HANDSHAKE} == set(), found
    # On 443 the name was not even looked up.
    assert port != 443 or reach.internet.events() == []
    assert {one["reason"] for one in inside.decisions()} >= {"SNI differs", "no SNI", "not TLS"}
    assert inside.decisions(verdict="allowed") == []


@pytest.mark.parametrize("port", [443, 8443])
def test_a_hello_for_the_name_passes_however_it_is_cut(reach: Reach, port: int) -> None:
    good = hello(GOOD)
    ways = [[good], records(good, 20), [good[:7], good[7:80], good[80:]], [hello(GOOD.upper())]]
    inside = reach.inside(
        "streams", [talk(port, *pieces, pause=0.002) for pieces in ways], net=[f"{GOOD}:{port}"]
    )
    assert [answered(found) for found in inside.verdict] == [HANDSHAKE] * len(ways), inside.verdict


def test_an_encrypted_hello_counts_as_its_outer_name(reach: Reach) -> None:
    """A server that holds the key could read another name from it; the key is in no answer of our DNS."""
    ech = b"\0\0\x01\0\x01\x07\0\x20" + bytes(32) + b"\0\x40" + bytes(64)
    attack = [talk(443, with_extension(hello(name), 0xFE0D, ech)) for name in (EVIL, GOOD)]
    outside = reach.outside("streams", attack)
    assert [answered(found) for found in outside] == [HANDSHAKE] * 2
    inside = reach.inside("streams", attack, net=[f"{GOOD}:443"])
    assert [answered(found) for found in inside.verdict] == [ALERT, HANDSHAKE], inside.verdict


def test_on_443_nothing_but_tls_gets_out(reach: Reach) -> None:
    """On a name's port 443 the first bytes decide; the server would have taken them."""
    ssl_2 = b"\x80\x2e\x01\x03\x01" + bytes(40)
    words = [get(EVIL), b"SSH-2.0-x\r\n", ssl_2, b"\x16\x02\x00\x00\x05hello", b"\n" * 100]
    attack = [talk(443, each) for each in words]
    reach.outside("streams", attack)
    inside = reach.inside("streams", attack, net=[f"{GOOD}:443"])
    assert reach.internet.events() == [] and inside.decisions(verdict="allowed") == []


def get(host: str, target: str = "/", more: str = "") -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode()


def hosts(reach: Reach) -> set[str]:
    return {event["host"] for event in reach.internet.events("request")}


POST = b"POST /echo HTTP/1.1\r\nHost: api.good.example\r\n"
CHUNKED = "Transfer-Encoding: chunked\r\n"
SMUGGLED = get(EVIL, "/smuggled")
#: Several requests of one connection, of which one is for another host. Each arrives as such outside.
REQUESTS: dict[str, list[bytes]] = {
    "the first request": [get(EVIL)],
    "the second request": [get(GOOD), get(EVIL)],
    "pipelined": [get(GOOD) + get(EVIL)],
    "after a body": [POST + b"Content-Length: 5\r\n\r\nhello" + get(EVIL)],
    "after chunks": [POST + CHUNKED.encode()
        + b"\r\n3\r\nabc\r\n0\r\n\r\n" + get(EVIL)],
    "cut in the middle of the Host": [get(EVIL)[:20], get(EVIL)[20:28], get(EVIL)[28:]],
    "lower case": [b"GET / HTTP/1.1\r\nhost:evil.example\r\n\r\n"],
    "the last Host": [b"GET / HTTP/1.1\r\nHost: api.good.example\r\nHost: evil.example\r\n\r\n"],
    "after ten others": [get(GOOD) * 10, get(EVIL)],
    "a name with a port": [get(EVIL + ":80")],
    "a length and chunks": [POST + b"Content-Length: %d\r\n" % len(
        b"0\r\n\r\n" + SMUGGLED) + CHUNKED.encode() + b"\r\n0\r\n\r\n" + SMUGGLED],
    "chunks by an odd word": [POST + b"Content-Length: %d\r\n" % (
        len(SMUGGLED) + 5) + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SMUGGLED],
    "a chunk extension": [POST + CHUNKED.encode()
        + b"\r\n1;a=b\r\nx\r\n0\r\n\r\n" + SMUGGLED],
    "a failed upgrade": [get(GOOD, "/", "Upgrade: h2c\r\nConnection: Upgrade\r\n") + get(EVIL)],
    "a failed WebSocket": [get(GOOD, "/status?code=400",
        "Upgrade: WebSocket, x\r\nConnection: Upgrade\r\n") + get(EVIL)],
}  # fmt: skip
#: What other servers might take for a request to another host; the one of the tests does not.
ODD_REQUESTS: dict[str, list[bytes]] = {
    "absolute form": [f"GET http://{EVIL}/ HTTP/1.1\r\nHost: {GOOD}\r\n\r\n".encode()],
    "absolute form with the other Host": [f"GET http://{GOOD}/ HTTP/1.1\r\nHost: {EVIL}\r\n\r\n".encode()],
    "absolute form with a user": [f"GET http://{GOOD}@{EVIL}/ HTTP/1.1\r\nHost: {GOOD}\r\n\r\n".encode()],
    "CONNECT": [f"CONNECT {EVIL}:80 HTTP/1.1\r\nHost: {EVIL}:80\r\n\r\n".encode()],
    "CONNECT with the good Host": [f"CONNECT {EVIL}:80 HTTP/1.1\r\nHost: {GOOD}\r\n\r\n".encode()],
    "no Host": [b"GET / HTTP/1.1\r\n\r\n"],
    "HTTP/1.0 without Host": [b"GET / HTTP/1.0\r\n\r\n"],
    "HTTP/0.9": [b"GET /\r\n"],
    "HTTP/2 by knowledge": [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
    "bare line ends": [b"GET / HTTP/1.1\nHost: evil.example\n\n"],
    "a folded Host": [b"GET / HTTP/1.1\r\nHost: api.good.example\r\n evil.example\r\n\r\n"],
    "a space before the colon": [b"GET / HTTP/1.1\r\nHost : evil.example\r\nHost: api.good.example\r\n\r\n"],
    "a NUL in the Host": [b"GET / HTTP/1.1\r\nHost: api.good.example\0.evil.example\r\n\r\n"],
    "two lengths": [POST + b"Content-Length: 0\r\nContent-Length: 40\r\n\r\n"
        + SMUGGLED],
    "a signed length": [POST + b"Content-Length: +40\r\n\r\n" + SMUGGLED],
    "a list of hosts": [get(f"{GOOD}, {EVIL}")],
    "a user in the Host": [get(f"{GOOD}@{EVIL}")],
}  # fmt: skip


def test_a_request_for_another_host_never_arrives(reach: Reach) -> None:
    attack = [talk(80, *pieces, pause=0.1) for pieces in REQUESTS.values()]
    reach.outside("streams", attack)
    arrived = [event for event in reach.internet.events("request") if event["host"].startswith(EVIL)]
    assert len(arrived) == len(REQUESTS), "a control did not arrive"
    attack += [talk(80, *pieces, pause=0.1) for pieces in ODD_REQUESTS.values()]
    inside = reach.inside("streams", attack, net=[GOOD])
    assert hosts(reach) <= {GOOD}, hosts(reach)
    assert not [event for event in reach.internet.events("request") if "smuggled" in event["target"]]
    assert {one["reason"] for one in inside.decisions(verdict="denied")} >= {"Host differs", "not HTTP"}
    # Those that begin well are refused at the wrong request, and say so.
    begin_well = [
        found for name, found in zip(REQUESTS, inside.verdict, strict=False) if name.startswith("the second")
    ]
    assert all(
        b" 200 " in bytes.fromhex(found) and b" 421 " in bytes.fromhex(found) for found in begin_well
    ), [bytes.fromhex(found) for found in begin_well]


def test_after_a_real_upgrade_the_stream_is_between_the_program_and_its_server(reach: Reach) -> None:
    """A WebSocket is opaque; that it stays with the server that was dialled is what the rules say."""
    upgrade = get(GOOD, "/", "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
                  "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n")  # fmt: skip
    inside = reach.inside("streams", [talk(80, upgrade, get(EVIL), pause=0.3)], net=[GOOD])
    assert b" 101 " in bytes.fromhex(inside.verdict[0])
    assert hosts(reach) == {GOOD}
    assert {address for address, _ in reach.internet.reached()} <= {"11.0.0.10", "2a10:600d::10"}
