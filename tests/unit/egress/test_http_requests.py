"""The screen of plain HTTP: what it passes, byte for byte, and what it refuses."""

from __future__ import annotations

import http.client
import io

import pytest

from stockade.egress.decoders.http_requests import HEAD_SIZE, RequestRefusedError, RequestScreen, refusal

GET = b"GET /path HTTP/1.1\r\nHost: a.test\r\n\r\n"
OTHER = b"GET /path HTTP/1.1\r\nHost: evil.test\r\n\r\n"
UPGRADE = (
    b"GET /chat HTTP/1.1\r\nHost: a.test\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


def passed(data: bytes) -> bytes:
    """What passes, which must not depend on how the data is cut."""
    whole = RequestScreen("a.test", 80).feed(data)
    for size in (1, 2, 3, 17):
        screen = RequestScreen("a.test", 80)
        assert b"".join(screen.feed(data[at : at + size]) for at in range(0, len(data), size)) == whole
    return whole


def refused(data: bytes) -> tuple[str, bytes]:
    """Why a stream is refused, and what passes before; neither depends on how it is cut."""
    screen = RequestScreen("a.test", 80)
    with pytest.raises(RequestRefusedError) as caught:
        screen.feed(data)
    whole = (str(caught.value), caught.value.passed)
    with pytest.raises(RequestRefusedError, match=whole[0]):
        screen.feed(GET)
    for size in (1, 2, 3, 17):
        screen, before = RequestScreen("a.test", 80), b""
        with pytest.raises(RequestRefusedError) as caught:
            for at in range(0, len(data), size):
                before += screen.feed(data[at : at + size])
        assert (str(caught.value), before + caught.value.passed) == whole
    return whole


def head(*lines: bytes, line: bytes = b"POST / HTTP/1.1") -> bytes:
    return b"\r\n".join([line, *lines, b"", b""])


def post(*lines: bytes, body: bytes = b"") -> bytes:
    return head(b"Host: a.test", *lines) + body


@pytest.mark.parametrize(
    "data",
    [
        GET,
        head(b"Host: A.Test"),
        head(b"Host: a.test:80"),
        head(b"Host: a.test."),
        head(b"host:\t a.test \t"),
        head(b"Host: a.test", line=b"GET http://a.test/path?a=http://b HTTP/1.1"),
        head(b"Host: a.test", line=b"GET HTTP://A.TEST:80 HTTP/1.1"),
        head(b"Host: a.test", line=b"GET http://a.test?query HTTP/1.1"),
        head(b"Host: a.test", line=b"OPTIONS * HTTP/1.1"),
        head(b"Host: a.test", line=b"PROPFIND //double HTTP/1.1"),
        head(b"Host: a.test", line=b"GET / HTTP/1.0"),
        post(b"X-Text: caf\xe9, \ttab", b"X-Empty:"),
        post(b"Content-Length: 5", body=b"hello"),
        post(b"Content-Length: 0"),
        post(b"Content-Length: 5", body=b"hello") + GET + post(b"Content-Length: 1", body=b"\n") + GET,
        post(b"Content-Length: %d" % len(OTHER), body=OTHER) + GET,
        post(b"Transfer-Encoding: chunked", body=b"5\r\nhello\r\n00A\r\n0123456789\r\n0\r\n\r\n") + GET,
        post(b"Transfer-Encoding: chunked", body=b"0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n") + GET,
        post(b"Transfer-Encoding: chunked", body=b"%x\r\n%s\r\n0\r\n\r\n" % (len(OTHER), OTHER)) + GET,
        post(b"Expect: 100-continue", b"Content-Length: 2", body=b"ab"),
        GET * 50,
    ],
)
def test_requests_for_the_name_pass_unchanged(data: bytes) -> None:
    assert passed(data) == data


def test_what_a_library_sends_passes() -> None:
    class Recorder(http.client.HTTPConnection):
        sent = b""

        def connect(self) -> None:
            pass

        def send(self, data: object) -> None:
            self.sent += data.read() if isinstance(data, io.BytesIO) else data  # type: ignore[operator]

    client = Recorder("a.test")
    client.request(
        "POST", "/upload", body=iter([b"one", b"two"]), headers={"Accept": "*/*"}, encode_chunked=True
    )
    assert b"Transfer-Encoding: chunked" in client.sent
    assert passed(client.sent) == client.sent


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (OTHER, "Host differs"),
        (head(b"Host: a.test:8080"), "Host differs"),
        (head(b"Host: a.test:080"), "Host differs"),
        (head(b"Host: a.test:"), "Host differs"),
        (head(b"Host: a.test.."), "Host differs"),
        (head(b"Host: user@a.test"), "Host differs"),
        (head(b"Host: a.test, evil.test"), "Host differs"),
        (head(b"Host: a.test evil.test"), "Host differs"),
        (head(b"Host: evil.test/a.test"), "Host differs"),
        (head(b"Host: xa.test"), "Host differs"),
        (head(b"Host:"), "Host differs"),
        (head(b"Host: evil.test", line=b"GET / HTTP/1.0"), "Host differs"),
        (head(), "no Host"),
        (head(line=b"GET / HTTP/1.0"), "no Host"),
        (head(b"X-Host: a.test"), "no Host"),
        (head(b"Host: a.test", b"Host: a.test"), "several Hosts"),
        (head(b"Host: a.test", b"host: evil.test"), "several Hosts"),
        (head(b"Host: a.test", line=b"GET http://evil.test/ HTTP/1.1"), "target differs"),
        (head(b"Host: a.test", line=b"GET http://a.test:81/ HTTP/1.1"), "target differs"),
        (head(b"Host: a.test", line=b"GET http://evil.test@a.test/ HTTP/1.1"), "target differs"),
        (head(b"Host: a.test", line=b"GET http://a.test\\@evil.test/ HTTP/1.1"), "target differs"),
        (head(b"Host: a.test", line=b"GET http:///path HTTP/1.1"), "target differs"),
        (head(b"Host: evil.test", line=b"GET http://a.test/ HTTP/1.1"), "Host differs"),
        (head(line=b"GET http://a.test/ HTTP/1.1"), "no Host"),
        (head(b"Host: a.test", line=b"GET http://a.test#@evil.test/ HTTP/1.1"), "target of a request"),
        (head(b"Host: a.test", line=b"GET https://a.test/ HTTP/1.1"), "target of a request"),
        (head(b"Host: a.test", line=b"GET a.test HTTP/1.1"), "target of a request"),
        (head(b"Host: a.test", line=b"GET * HTTP/1.1"), "target of a request"),
        (head(b"Host: a.test", line=b"CONNECT a.test:80 HTTP/1.1"), "CONNECT"),
        (head(b"Host: a.test", line=b"connect / HTTP/1.1"), "CONNECT"),
        (post(b"Content-Length: 3", b"Transfer-Encoding: chunked"), "Content-Length and Transfer-Encoding"),
        (post(b"Content-Length: 3", b"Content-Length: 3"), "several Content-Lengths"),
        (post(b"Content-Length: 3, 3"), "Content-Length"),
        (post(b"Content-Length: +3"), "Content-Length"),
        (post(b"Content-Length: -3"), "Content-Length"),
        (post(b"Content-Length: 0x3"), "Content-Length"),
        (post(b"Content-Length:"), "Content-Length"),
        (post(b"Content-Length: 1_0"), "Content-Length"),
        (post(b"Content-Length: " + b"9" * 19), "Content-Length"),
        (post(b"Transfer-Encoding: gzip, chunked"), "Transfer-Encoding"),
        (post(b"Transfer-Encoding: Chunked"), "Transfer-Encoding"),
        (post(b"Transfer-Encoding: identity"), "Transfer-Encoding"),
        (post(b"Transfer-Encoding:"), "Transfer-Encoding"),
        (post(b"Transfer-Encoding: chunked", b"Transfer-Encoding: chunked"), "Transfer-Encoding"),
        (post(b"Transfer-Encoding: \x0bchunked"), "control byte"),
        (head(b"Host: a.test", b"Transfer-Encoding: chunked", line=b"POST / HTTP/1.0"), "Transfer-Encoding"),
        (post(b"Transfer_Encoding: chunked"), "name of a header"),
        (post(b"Content_Length: 3"), "name of a header"),
        (post(b"Connection: close, Host"), "Connection names a header that decides"),
        (post(b"Connection: content-length"), "Connection names a header that decides"),
        (post(b"X-Long: a", b" folded"), "folded header"),
        (post(b"X-Long: a", b"\tfolded"), "folded header"),
        (head(b" Host: a.test"), "folded header"),
        (post(b"X-Space : a"), "name of a header"),
        (head(b"Host : a.test"), "name of a header"),
        (post(b"no colon"), "name of a header"),
        (post(b": empty"), "name of a header"),
        (post(b"X-\xe9: a"), "name of a header"),
        (post(b"X: a\0b"), "control byte"),
        (post(b"X: a\x7fb"), "control byte"),
        (post(b"X: a\rb"), "bare CR"),
        (post(b"X: a\r"), "bare CR"),
        (post(b"X: a\nHost: evil.test"), "bare LF"),
        (b"GET / HTTP/1.1\nHost: a.test\n\n", "bare LF"),
        (b"GET / HTTP/1.1\r\nHost: a.test\r\n\n", "bare LF"),
        (b"GET / HTTP/1.1\rHost: a.test\r\n\r\n", "bare CR"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "HTTP/2 without TLS"),
        (b"GET /\r\n", "HTTP/0.9"),
        (b"GET / HTTP/1.2\r\n", "not HTTP"),
        (b"GET / HTTP/2.0\r\n", "not HTTP"),
        (b"GET  / HTTP/1.1\r\n", "not HTTP"),
        (b"GET / HTTP/1.1 \r\n", "not HTTP"),
        (b" GET / HTTP/1.1\r\n", "not HTTP"),
        (b"GET\t/ HTTP/1.1\r\n", "not HTTP"),
        (b"GET /\xc3\xa4 HTTP/1.1\r\n", "not HTTP"),
        (b"\r\n" + GET, "not HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "not HTTP"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not HTTP"),
        (post(b"Upgrade: h2c", b"Connection: Upgrade, HTTP2-Settings"), "upgrade to another protocol"),
        (post(b"Upgrade: websocket, h2c"), "upgrade to another protocol"),
        (post(b"Upgrade: websocket", b"Upgrade: h2c"), "upgrade to another protocol"),
        (post(b"Upgrade: TLS/1.2"), "upgrade to another protocol"),
        (post(b"Upgrade: websocket", b"Content-Length: 4"), "upgrade with a body"),
        (post(b"Upgrade: websocket", b"Transfer-Encoding: chunked"), "upgrade with a body"),
    ],
)
def test_what_another_server_could_read_differently_is_refused(data: bytes, reason: str) -> None:
    assert refused(data) == (reason, b"")
    assert refused(GET + data) == (reason, GET)


CHUNKED = post(b"Transfer-Encoding: chunked")


@pytest.mark.parametrize(
    ("body", "before", "reason"),
    [
        (b"5;ext=1\r\nhello\r\n", b"", "chunk size"),
        (b"5 \r\nhello\r\n", b"", "chunk size"),
        (b" 5\r\nhello\r\n", b"", "chunk size"),
        (b"0x5\r\nhello\r\n", b"", "chunk size"),
        (b"-1\r\n", b"", "chunk size"),
        (b"\r\n", b"", "chunk size"),
        (b"0" * 16 + b"\r\n", b"", "chunk size"),
        (b"5\nhello\r\n", b"", "bare LF"),
        (b"5\r\nhelloX\r\n", b"5\r\nhello", "end of a chunk"),
        (b"5\r\nhello\n0\r\n\r\n", b"5\r\nhello", "bare LF"),
        (b"5\r\nhelloXYZ", b"5\r\nhello", "end of a chunk"),
        (b"0\r\nHost: evil.test\r\n\r\n", b"0\r\n", "trailer that must be a header"),
        (b"0\r\nContent-Length: 5\r\n\r\n", b"0\r\n", "trailer that must be a header"),
        (b"0\r\n folded\r\n\r\n", b"0\r\n", "folded header"),
        (b"0\r\n" + OTHER, b"0\r\n", "name of a header"),
        (b"0\r\n\r\n" + OTHER, b"0\r\n\r\n", "Host differs"),
    ],
)
def test_chunks_that_another_server_could_read_differently_are_refused(
    body: bytes, before: bytes, reason: str
) -> None:
    assert refused(CHUNKED + body) == (reason, CHUNKED + before)


def test_every_request_of_a_connection_is_judged() -> None:
    assert refused(GET + GET + OTHER) == ("Host differs", GET + GET)
    body = post(b"Content-Length: 5", body=b"hello")
    assert refused(body + OTHER) == ("Host differs", body)


def test_the_refusal_names_the_host_that_was_asked_for() -> None:
    with pytest.raises(RequestRefusedError) as caught:
        RequestScreen("a.test", 80).feed(head(b"Host: Evil.test\xff:81"))
    assert caught.value.host == "evil.test?:81"


def test_nothing_passes_before_the_head_is_complete() -> None:
    screen = RequestScreen("a.test", 80)
    assert screen.feed(GET[:-1]) == b""
    assert screen.requests == 0
    assert screen.feed(b"\n") == GET
    assert screen.requests == 1


def test_a_head_is_bounded() -> None:
    def filled(size: int) -> bytes:
        return post(b"X: " + b"a" * (size - len(post(b"X: "))))

    assert len(filled(HEAD_SIZE)) == HEAD_SIZE
    assert RequestScreen("a.test", 80).feed(filled(HEAD_SIZE)) == filled(HEAD_SIZE)
    many = post(*[b"X: y"] * (HEAD_SIZE // 6))
    for data in (filled(HEAD_SIZE + 1), b"G" * (HEAD_SIZE + 1), many):
        for size in (1, 4096, len(data)):
            screen = RequestScreen("a.test", 80)
            with pytest.raises(RequestRefusedError, match="head too long"):
                for at in range(0, len(data), size):
                    screen.feed(data[at : at + size])


def test_bodies_are_not_held() -> None:
    screen = RequestScreen("a.test", 80)
    screen.feed(post(b"Content-Length: 1000000000000"))
    for _ in range(100):
        assert len(screen.feed(bytes(100_000))) == 100_000


def test_a_websocket_passes_when_the_server_agrees() -> None:
    screen = RequestScreen("a.test", 80)
    assert screen.feed(UPGRADE + b"\x81early") == UPGRADE
    assert screen.waiting_for_response and not screen.opaque
    assert screen.feed(b" frame") == b""
    assert screen.response_head(b"HTTP/1.1 101") == b""
    assert screen.response_head(b" Switching Protocols\r\n\r\n") == b"\x81early frame"
    assert screen.opaque and not screen.waiting_for_response
    assert screen.feed(OTHER) == OTHER
    assert screen.response_head(b"anything") == b""


@pytest.mark.parametrize(
    "response",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 426 \r\n",
        b"HTTP/1.1 1010 what\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\n\r\n",
        b"HTTP/1.1 103 HTTP/1.1 101 x\r\nLink: HTTP/1.1 101 x\r\n\r\nHTTP/1.1 200 OK\r\n\r\n",
        b"HTTP/1.1 102 x\r\n" + b"X: y\r\n" * 2000,
        b"HTTP/2.0 101 x\r\n\r\n",
        b"Hello, HTTP/1.1 101 Switching\r\n\r\n",
    ],
)
def test_after_a_failed_upgrade_requests_are_judged_again(response: bytes) -> None:
    for size in (1, 5, len(response)):
        screen = RequestScreen("a.test", 80)
        assert screen.feed(UPGRADE + GET + OTHER) == UPGRADE
        with pytest.raises(RequestRefusedError, match="Host differs") as caught:
            for at in range(0, len(response), size):
                assert screen.response_head(response[at : at + size]) == b""
        assert caught.value.passed == GET


def test_interim_responses_do_not_end_the_wait_for_an_upgrade() -> None:
    screen = RequestScreen("a.test", 80)
    screen.feed(UPGRADE + b"frame")
    assert screen.response_head(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nLink: x\r\n\r\n") == b""
    assert screen.waiting_for_response
    assert screen.response_head(b"HTTP/1.1 101 \r\n") == b"frame"


def test_an_upgrade_is_the_first_request_of_its_connection() -> None:
    assert refused(GET + UPGRADE) == ("upgrade after other requests", GET)


def test_what_is_held_during_an_upgrade_is_bounded() -> None:
    screen = RequestScreen("a.test", 80)
    screen.feed(UPGRADE)
    assert screen.feed(bytes(HEAD_SIZE)) == b""
    with pytest.raises(RequestRefusedError, match="too much before the answer"):
        screen.feed(b"a")


def test_the_response_to_a_refused_request_is_one() -> None:
    client = http.client.HTTPResponse(
        Socket(refusal("Host differs", "allow it with: evil.test:80\r\nX: \x1b"))
    )  # type: ignore[arg-type]
    client.begin()
    assert (client.status, client.getheader("Connection")) == (403, "close")
    assert client.read().decode() == (
        "Stockade refused this request: Host differs\nallow it with: evil.test:80?\nX: ?\n"
    )


class Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)
