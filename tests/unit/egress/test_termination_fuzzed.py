"""The terminating path under mutated bytes of programs and of servers.

Whatever both sides send, a connection ends in bounded time and by its own errors, and another parser finds in
what reached the server only requests that the rules allow. STOCKADE_FUZZ_SECONDS is how long is fuzzed, a
sixth for each; a failure prints seed and input.
"""

from __future__ import annotations

import os
import random

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h11
import hpack
from hyperframe.frame import DataFrame, HeadersFrame, SettingsFrame

from support.http_pipes import HOST, ONE, ONE_TO_TWO, TWO, pass_through
from support.mutation import pieces, run_fuzzer

SECONDS = float(os.environ.get("STOCKADE_FUZZ_SECONDS", "5")) / 6
INTERESTING = (
    b"\0", b"\r", b"\n", b"\r\n", b"\r\n\r\n", b" ", b"\t", b":", b";", b"%2f", b"%2e%2e", b"..", b"//",
    b"Host: evil.test\r\n", b"Host: a.test\r\n", b"GET /secret HTTP/1.1\r\nHost: a.test\r\n\r\n",
    b"Content-Length: 5\r\n", b"Content-Length: 60\r\n", b"Transfer-Encoding: chunked\r\n", b"0\r\n\r\n",
    b"5\r\nhello\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n", b"HTTP/1.1 101 x\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", b"HTTP/1.1 100 x\r\n\r\n",
    b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", b"\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08",
)  # fmt: skip


def check_all(connections: list[bytes]) -> None:
    """Read what reached the server with another parser; a body is alone on its connection."""
    for reached in connections:
        check_one(reached)
        if b"transfer-encoding: chunked" in reached or b"content-length" in reached:
            requests = reached.count(b" HTTP/1.1\r\nhost: a.test\r\n")
            assert requests == 1 or b"content-length: 0\r\n" in reached, reached


def check_one(reached: bytes) -> None:
    server = h11.Connection(h11.SERVER)
    server.receive_data(reached)
    server.receive_data(b"")
    while True:
        try:
            event = server.next_event()
        except h11.RemoteProtocolError:
            # A body that was cut off; no head is, because heads are written whole.
            return
        if isinstance(event, h11.Request):
            headers = dict(event.headers)
            assert headers[b"host"] == HOST.encode(), reached
            assert event.method in (b"GET", b"POST") and event.target.startswith(b"/ok"), reached
            assert b".." not in event.target.split(b"/"), reached
            if b"upgrade" in headers:
                return
        elif event is h11.PAUSED:
            server.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            server.send(h11.EndOfMessage())
            server.start_next_cycle()
        elif isinstance(event, h11.ConnectionClosed) or event is h11.NEED_DATA:
            return


def get(target: str = "/ok/x", more: str = "", method: str = "GET") -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: {HOST}\r\n{more}\r\n".encode()


REQUESTS = [
    get() + get("/ok/y"),
    get(method="POST", more="Content-Length: 5\r\n") + b"hello" + get(),
    get(method="POST", more="Transfer-Encoding: chunked\r\n") + b"5\r\nhello\r\n0\r\nX: y\r\n\r\n" + get(),
    get("/ok/a%2fb?x=%20y"),
    get(more="Connection: Upgrade\r\nUpgrade: websocket\r\n") + b"bytes",
    get("https://a.test/ok/x") + get("/secret"),
]
RESPONSES = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    b"HTTP/1.0 200 OK\r\nX: y\r\n\r\nuntil the end",
    b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
    b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nbytes",
]


def test_only_allowed_requests_reach_a_server_whatever_a_program_sends() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        found = pass_through(ONE, pieces(data, chance), lambda _: RESPONSES[0])
        check_all(found.reached)
        return any(not one.reason for one in found.judged)

    run_fuzzer(REQUESTS, examine, INTERESTING, SECONDS)


def test_a_connection_ends_whatever_a_server_answers() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        found = pass_through(ONE, [chance.choice(REQUESTS)], lambda _: data, once=True)
        check_all(found.reached)
        return any(found.reached)

    run_fuzzer(RESPONSES, examine, INTERESTING, SECONDS)


# HTTP/2


def head(fields: list[tuple[str, str]], stream: int, *, ends: bool = True) -> bytes:
    frame = HeadersFrame(stream)
    frame.data = hpack.Encoder().encode(fields, huffman=False)
    frame.flags.add("END_HEADERS")
    if ends:
        frame.flags.add("END_STREAM")
    return bytes(frame.serialize())


def asked(path: str = "/ok/x", method: str = "GET", authority: str = HOST) -> list[tuple[str, str]]:
    return [(":method", method), (":scheme", "https"), (":authority", authority), (":path", path)]


def data_of(content: bytes, stream: int) -> bytes:
    frame = DataFrame(stream, content)
    frame.flags.add("END_STREAM")
    return bytes(frame.serialize())


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SettingsFrame(0).serialize()
STREAMS = [
    PREFACE + head(asked(), 1) + head(asked("/ok/y"), 3),
    PREFACE + head(asked(method="POST"), 1, ends=False) + data_of(b"hello", 1),
    PREFACE + head([*asked(), ("x", "y"), ("cookie", "a=b")], 1) + head(asked("/secret"), 3),
    PREFACE + head(asked(authority="evil.test"), 1) + head(asked("/ok/%2e"), 3),
]
SETTINGS = SettingsFrame(0).serialize()
ANSWERS = [
    SETTINGS + head([(":status", "200"), ("x", "y")], 1, ends=False) + data_of(b"ok", 1),
    SETTINGS + head([(":status", "204")], 1),
    SETTINGS + b"\x00\x00\x08\x07\x00\x00\x00\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00",
]


def check_two(reached: bytes) -> None:
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    for event in server.receive_data(reached):
        if isinstance(event, h2.events.RequestReceived):
            found = dict(event.headers or ())
            assert found[b":authority"] == HOST.encode() and found[b":path"].startswith(b"/ok"), reached
            assert found[b":method"] in (b"GET", b"POST") and b".." not in found[b":path"].split(b"/"), (
                reached
            )


def test_only_allowed_streams_reach_a_server_whatever_a_program_sends() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        begun: list[bool] = []

        def answer(_: bytes) -> bytes:
            begun.append(True)
            return SETTINGS if len(begun) == 1 else b""

        found = pass_through(TWO, pieces(data, chance), answer)
        check_two(found.reached[0])
        return any(not one.reason for one in found.judged)

    run_fuzzer(STREAMS, examine, INTERESTING, SECONDS)


def test_a_connection_of_http2_ends_whatever_a_server_answers() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        found = pass_through(TWO, [chance.choice(STREAMS)], lambda _: data, once=True)
        check_two(found.reached[0])
        return any(found.reached)

    run_fuzzer(ANSWERS, examine, INTERESTING, SECONDS)


# A program that speaks HTTP/1 and a server that speaks HTTP/2


def test_only_allowed_streams_reach_a_server_whatever_a_program_sends_in_http1() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        found = pass_through(ONE_TO_TWO, pieces(data, chance), lambda _: ANSWERS[0])
        for reached in found.reached:
            check_two(reached) if reached.startswith(b"PRI") else check_one(reached)
        return any(not one.reason for one in found.judged)

    run_fuzzer(REQUESTS, examine, INTERESTING, SECONDS)


def test_a_connection_of_http1_ends_whatever_a_server_answers_in_http2() -> None:
    def examine(data: bytes, chance: random.Random) -> bool:
        found = pass_through(ONE_TO_TWO, [chance.choice(REQUESTS)], lambda _: data, once=True)
        # What a program gets is responses of HTTP/1, however hostile the frames are.
        assert not found.said or found.said.startswith(b"HTTP/1.1 "), found.said
        return b"HTTP/1.1 20" in found.said

    run_fuzzer(ANSWERS, examine, INTERESTING, SECONDS)
