"""Attacks on rules for requests: other paths and hosts, on connections that begin with an allowed request."""

from __future__ import annotations

import hpack
import pytest
from hyperframe.frame import DataFrame, Frame, HeadersFrame, PingFrame, RstStreamFrame, SettingsFrame

from attacks.egress.reach import Reach

GOOD, EVIL, TWO = "api.good.example", "evil.example", "h2.good.example"
RULES = [f"GET,POST https://{GOOD}/ok/**", f"GET,POST http://{GOOD}/ok/**", f"GET,POST https://{TWO}/ok/**"]
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()


def get(target: str = "/ok/x", host: str = GOOD, more: str = "", method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode("latin-1")


POST = get(method="POST", more="Content-Length: 5\r\n") + b"hello"
SMUGGLED = get("/secret/smuggled")
#: What a server of the internet answers, if it arrives.
ARRIVES: dict[str, list[bytes]] = {
    "another path": [get("/secret/first")],
    "another path after an allowed one": [get() + get("/secret/second")],
    "another path on a kept connection": [get(), get("/secret/third")],
    "another method": [get(method="DELETE", target="/ok/secret")],
    "after a body": [POST + get("/secret/fourth")],
    "another host": [get("/ok/secret", EVIL)],
    "another host after an allowed request": [get(), get("/ok/secret", EVIL)],
    "dots": [get("/ok/../secret")],
    "encoded dots": [get("/ok/%2e%2e/secret")],
}
#: Fields that some server takes for the method, the path or the host, one of each kind.
OVERRIDES = (
    ("x-http-method-override", "DELETE"),
    ("x_original_url", "/secret/x"),
    ("x-forwarded-host", EVIL),
)
#: What some server might take for another request.
ODD: dict[str, list[bytes]] = {
    "a length and chunks": [
        get(method="POST", more="Content-Length: 5\r\nTransfer-Encoding: chunked\r\n")
        + b"0\r\n\r\n"
        + SMUGGLED
    ],
    "two lengths": [get(method="POST", more="Content-Length: 0\r\nContent-Length: 40\r\n") + SMUGGLED],
    "an obscure coding": [
        get(method="POST", more="Transfer-Encoding: xchunked\r\n") + b"0\r\n\r\n" + SMUGGLED
    ],
    "a coding twice": [
        get(method="POST", more="Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n") + SMUGGLED
    ],
    "a chunk extension": [
        get(method="POST", more="Transfer-Encoding: chunked\r\n") + b"1;x\r\nx\r\n0\r\n\r\n" + SMUGGLED
    ],
    "a trailer that decides": [
        get(method="POST", more="Transfer-Encoding: chunked\r\n") + b"0\r\nHost: evil.example\r\n\r\n"
    ],
    **{
        f"the trailer {name}": [
            get(method="POST", more="Transfer-Encoding: chunked\r\n")
            + f"0\r\n{name}: {value}\r\n\r\n".encode()
        ]
        for name, value in OVERRIDES
    },
    "a bare line end": [b"GET /ok/x HTTP/1.1\nHost: api.good.example\n\n" + SMUGGLED],
    "a folded header": [get(more="X: y\r\n z\r\n")],
    "a space before the colon": [get(more="Content-Length : 40\r\n") + SMUGGLED],
    "absolute form": [get(f"https://{EVIL}/ok/x")],
    "absolute form with another scheme": [get(f"ftp://{GOOD}/ok/x")],
    "CONNECT": [get(f"{EVIL}:443", f"{EVIL}:443", method="CONNECT")],
    "two Hosts": [get(more=f"Host: {EVIL}\r\n")],
    "no Host": [b"GET /ok/x HTTP/1.1\r\n\r\n"],
    "a port that is another": [get(host=f"{GOOD}:8443")],
    "an upgrade to HTTP/2": [get(more="Connection: Upgrade\r\nUpgrade: h2c\r\n") + SMUGGLED],
    "a method in small letters": [get(method="get")],
    "a method behind the method": [get(more="X-HTTP-Method-Override: DELETE\r\n")],
    "a method in the query": [get("/ok/x?a=1&_method=DELETE")],
    "a method in the query, encoded": [get("/ok/x?a;%5Fmethod=del%65te")],
    "a path behind the path": [get(more="X-Original-URL: /secret/x\r\n")],
    "a path behind the path, with underscores": [get(more="X_Rewrite_URL: /secret/x\r\n")],
    "a host behind the host": [get(more=f"X-Forwarded-Host: {EVIL}\r\n")],
    "a host behind the host, after the right one": [get(more=f"X-Forwarded-Host: {GOOD}:443, {EVIL}\r\n")],
    "a host behind the host, as RFC 7239 has it": [get(more=f"Forwarded: host={GOOD}, host={EVIL}\r\n")],
    "an original host behind the host": [get(more=f"X-Original-Host: {EVIL}\r\n")],
    "a forwarded path behind the path": [get(more="X-Forwarded-Uri: /secret/x\r\n")],
    "a path of a gateway behind the path": [get(more="X-Envoy-Original-Path: /secret/x\r\n")],
    "a slash that some servers decode": [get("/ok/..%2fsecret")],
    "dots that some servers decode twice": [get("/ok/%252e%252e/secret")],
    "dots with a parameter": [get("/ok/..;/secret")],
    "a backslash": [get("/ok/..\\secret")],
    "a NUL": [get("/ok/%00")],
    "overlong dots": [get("/ok/%c0%ae%c0%ae/secret")],
    "overlong dots of three bytes": [get("/ok/%e0%80%ae%e0%80%ae/secret")],
    "overlong dots of four bytes": [get("/ok/%f0%80%80%ae%f0%80%80%ae/secret")],
    "half of a letter": [get("/ok/%80/secret")],
    "dots before a decoded end of the path": [get("/ok/..%3F/secret")],
    "OPTIONS *": [get("*", method="OPTIONS")],
    "Connection that removes the Host": [get(more="Connection: Host\r\n")],
    "HTTP/2 without TLS": [PREFACE],
    "HTTP/0.9": [b"GET /ok/x\r\n\r\n"],
}


def secrets(reach: Reach) -> list[str]:
    """What arrived that no rule allows."""
    return [
        f"{event['method']} {event['host']} {event['target']}"
        for event in reach.internet.events("request")
        if "secret" in event["target"] or event["host"].partition(":")[0] not in (GOOD, TWO)
        or event["method"] not in ("GET", "POST")
    ]  # fmt: skip


def talk(protocol: str, *pieces: bytes, host: str = GOOD, pause: float = 0.1) -> list[object]:
    return [host, 443 if protocol else 80, protocol, [piece.hex() for piece in pieces], pause]


@pytest.mark.parametrize("protocol", ["http/1.1", ""])
def test_every_request_of_a_connection_is_judged(reach: Reach, protocol: str) -> None:
    attack = [talk(protocol, *pieces) for pieces in ARRIVES.values()]
    reach.outside("judged", attack)
    assert len(secrets(reach)) == len(ARRIVES), "a control did not arrive"
    inside = reach.inside("judged", attack, net=RULES)
    assert secrets(reach) == []
    for name, found in zip(ARRIVES, inside.verdict, strict=True):
        said = bytes.fromhex(found)
        status = b"421" if "host" in name else b"400" if "dots" in name else b"403"
        assert b"HTTP/1.1 " + status in said, (name, said)
        assert (b"HTTP/1.1 200" in said) is ("after" in name or "kept" in name), (name, said)
    assert {one["reason"] for one in inside.decisions("request", verdict="denied")} == {
        "no rule", "Host differs", "ambiguous request",
    }  # fmt: skip
    refused = {one["target"]: one for one in inside.result["denials"]}
    scheme = "https" if protocol else "http"
    assert refused[f"GET {scheme}://{GOOD}/secret/first"]["wall"] == "network.http"
    assert refused[f"GET {scheme}://{GOOD}/secret/first"]["hint"] == (
        f"--net 'GET {scheme}://{GOOD}/secret/first'"
    )


@pytest.mark.parametrize("protocol", ["http/1.1", ""])
def test_a_request_that_servers_read_in_different_ways_goes_nowhere(reach: Reach, protocol: str) -> None:
    overrides = [talk(protocol, *pieces) for name, pieces in ODD.items() if " behind the " in name]
    assert all(b" 200 " in bytes.fromhex(one)[:13] for one in reach.outside("judged", overrides))
    inside = reach.inside("judged", [talk(protocol, *pieces) for pieces in ODD.values()], net=RULES)
    assert secrets(reach) == []
    for name, found in zip(ODD, inside.verdict, strict=True):
        said = bytes.fromhex(found)
        assert said[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 403", b"HTTP/1.1 421"), (name, said)
        assert b"HTTP/1.1 200" not in said, (name, said)


# HTTP/2


def heads(fields: list[tuple[str, str]], stream: int = 1, *, ends: bool = True) -> bytes:
    frame = HeadersFrame(stream)
    frame.data = hpack.Encoder().encode(fields, huffman=False)
    frame.flags.add("END_HEADERS")
    if ends:
        frame.flags.add("END_STREAM")
    return bytes(frame.serialize())


def two(
    path: str = "/ok/x", authority: str = TWO, method: str = "GET", more: tuple[tuple[str, str], ...] = ()
) -> list[tuple[str, str]]:
    return [(":method", method), (":scheme", "https"), (":authority", authority), (":path", path), *more]


def data(content: bytes, stream: int = 1, *, ends: bool = True) -> bytes:
    frame = DataFrame(stream, content)
    if ends:
        frame.flags.add("END_STREAM")
    return bytes(frame.serialize())


def answers(said: bytes) -> dict[int, str]:
    """The status of each stream, or how it ended."""
    decoder, found, at = hpack.Decoder(), {}, 0
    while len(said) - at >= 9:
        frame, length = Frame.parse_frame_header(memoryview(said[at : at + 9]))
        frame.parse_body(memoryview(said[at + 9 : at + 9 + length]))
        at += 9 + length
        if isinstance(frame, HeadersFrame):
            status = dict(decoder.decode(frame.data)).get(":status", "")
            found[frame.stream_id] = status
        elif isinstance(frame, RstStreamFrame):
            found.setdefault(frame.stream_id, "reset")
        elif frame.type == 7:
            found.setdefault(0, "goodbye")
    return found


ARRIVES_TWO: dict[str, list[bytes]] = {
    "another path": [heads(two("/secret/first"))],
    "another path beside an allowed one": [heads(two(), 1) + heads(two("/secret/second"), 3)],
    "another method": [heads(two("/ok/secret", method="DELETE"))],
    "another host": [heads(two("/ok/secret", EVIL))],
    "dots": [heads(two("/ok/../secret"))],
}
ODD_TWO: dict[str, bytes] = {
    "another Host beside it": heads(two(more=(("host", EVIL),))),
    "CONNECT": heads([(":method", "CONNECT"), (":authority", f"{EVIL}:443")]),
    "a WebSocket by CONNECT": heads([*two(method="CONNECT"), (":protocol", "websocket")]),
    "another scheme": heads(
        [(":method", "GET"), (":scheme", "http"), (":authority", TWO), (":path", "/ok/x")]
    ),
    "no authority": heads([(":method", "GET"), (":scheme", "https"), (":path", "/ok/x")]),
    "two paths": heads([*two(), (":path", "/secret/x")]),
    "a path after a header": heads(
        [(":method", "GET"), (":scheme", "https"), (":authority", TWO), ("x", "y"), (":path", "/ok/x")]
    ),
    "chunks": heads(two(more=(("transfer-encoding", "chunked"),))),
    "Connection": heads(two(more=(("connection", "x"),))),
    "capitals": heads(two(more=(("X-Capital", "y"),))),
    "a line break in a value": heads(two(more=(("x", "y\r\nHost: evil.example"),))),
    "a line break in the path": heads(two("/ok/x HTTP/1.1\r\nHost: evil.example\r\n\r\nGET /secret")),
    "a colon in a name": heads(two(more=(("x: y", "z"),))),
    "a wrong length": heads(two(method="POST", more=(("content-length", "1"),)), ends=False)
    + data(b"GET /secret/x HTTP/1.1\r\n\r\n"),
    "a trailer that decides": heads(two(method="POST"), ends=False)
    + data(b"x", ends=False)
    + heads([("content-length", "5")]),
    "a pseudo-header in trailers": heads(two(method="POST"), ends=False)
    + data(b"x", ends=False)
    + heads([(":path", "/secret/x")]),
    **{
        f"the trailer {name}": heads(two(method="POST"), ends=False)
        + data(b"x", ends=False)
        + heads([(name, value)])
        for name, value in OVERRIDES
    },
    "an absolute path": heads(two(f"https://{EVIL}/ok/x")),
    "a path behind the path": heads(two(more=(("x-original-url", "/secret/x"),))),
    "a length with an underscore": heads(two(more=(("content_length", "5"),))),
    "dots that some servers decode": heads(two("/ok/%2e%2e%2fsecret")),
    "HTTP/1 instead": get("/secret/x", TWO),
}


def test_every_stream_of_http2_is_judged(reach: Reach) -> None:
    attack = [talk("h2", PREFACE, *pieces, host=TWO) for pieces in ARRIVES_TWO.values()]
    reach.outside("judged", attack)
    assert len(secrets(reach)) == len(ARRIVES_TWO), "a control did not arrive"
    inside = reach.inside("judged", attack, net=RULES)
    assert secrets(reach) == []
    found = [answers(bytes.fromhex(one)) for one in inside.verdict]
    assert found == [{1: "403"}, {1: "200", 3: "403"}, {1: "403"}, {1: "421"}, {1: "400"}]


def test_a_stream_that_http2_does_not_allow_goes_nowhere(reach: Reach) -> None:
    attack = [talk("h2", PREFACE, one, host=TWO) for one in ODD_TWO.values()]
    inside = reach.inside("judged", attack, net=RULES)
    assert secrets(reach) == []
    for name, found in zip(ODD_TWO, inside.verdict, strict=True):
        said = answers(bytes.fromhex(found)) if not found.endswith("Error") else {0: "goodbye"}
        assert "200" not in said.values() and said, (name, said)


def test_floods_of_frames_end_a_connection_and_no_other(reach: Reach) -> None:
    resets = b"".join(
        heads(two(), stream) + RstStreamFrame(stream, error_code=8).serialize()
        for stream in range(1, 1001, 2)
    )
    endless = HeadersFrame(1, data=b"\x00\x01x\x01y").serialize()
    floods = [
        (PREFACE, PingFrame(0, opaque_data=b"12345678").serialize()),
        (PREFACE, SettingsFrame(0, settings={4: 65535}).serialize()),
        (PREFACE + heads(two(method="POST"), ends=False), data(b"", ends=False)),
        (PREFACE + endless, b"\x00\x00\x05\x09\x00\x00\x00\x00\x01\x00\x01x\x01y"),
    ]
    attack = [[TWO, 443, "h2", [first.hex(), f"{flood.hex()}*20000"], 0.3] for first, flood in floods]
    attack.append(talk("h2", PREFACE, resets, host=TWO))
    attack.append(talk("h2", PREFACE, heads(two()), host=TWO, pause=1.0))
    inside = reach.inside("judged", attack, net=RULES)
    *flooded, beside = inside.verdict
    assert answers(bytes.fromhex(beside)) == {1: "200"}
    for one in flooded:
        assert one.endswith("Error") or 0 in answers(bytes.fromhex(one)), one[:200]
    assert len(reach.internet.events("request")) < 300


# The authority


def test_the_key_of_the_authority_is_nowhere_inside_and_each_sandbox_has_another(reach: Reach) -> None:
    inside = [reach.inside("authority", GOOD, net=RULES) for _ in range(2)]
    for one in inside:
        assert one.verdict["keys"] == []
        assert one.verdict["writable"] == []
        assert "Stockade" in one.verdict["issuer"]
    assert inside[0].verdict["authority"] != inside[1].verdict["authority"]
