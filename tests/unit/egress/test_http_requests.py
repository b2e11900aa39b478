"""The heads of requests: what is decoded, what goes to the server instead, and what is refused."""

from __future__ import annotations

import http.client
import io

import h11
import pytest

from stockade.egress.client_checks import RefusalError, names_host
from stockade.egress.decoders.http_requests import RequestRefusedError
from stockade.egress.termination.http1_heads import (
    HEAD_SIZE,
    Http1Request,
    decode_request,
    encode_request,
    refusal_of,
)

GET = b"GET /path HTTP/1.1\r\nHost: a.test\r\n\r\n"
OTHER = b"GET /path HTTP/1.1\r\nHost: evil.test\r\n\r\n"


def decoded(data: bytes) -> Http1Request:
    return decode_request(data, "http", "a.test", 80)


def head(*lines: bytes, line: bytes = b"POST / HTTP/1.1") -> bytes:
    return b"\r\n".join([line, *lines, b"", b""])


def post(*lines: bytes) -> bytes:
    return head(b"Host: a.test", *lines)


def first_head(data: bytes, size: int) -> bool:
    """Whether a client has sent its first head, in pieces of a size."""
    received, done = bytearray(), False
    for at in range(0, len(data), size):
        received += data[at : at + size]
        done = names_host(received, len(data[at : at + size]), "a.test", 80)
    return done


@pytest.mark.parametrize(
    ("data", "target"),
    [
        (GET, b"/path"),
        (head(b"Host: A.Test"), b"/"),
        (head(b"Host: a.test:80"), b"/"),
        (head(b"Host: a.test."), b"/"),
        (head(b"host:\t a.test \t"), b"/"),
        (head(b"Host: a.test", line=b"GET http://a.test/path?a=http://b HTTP/1.1"), b"/path?a=http://b"),
        (head(b"Host: a.test", line=b"GET HTTP://A.TEST:80 HTTP/1.1"), b"/"),
        (head(b"Host: a.test", line=b"GET http://a.test?query HTTP/1.1"), b"/?query"),
        (head(b"Host: a.test", line=b"PROPFIND //double HTTP/1.1"), b"//double"),
        (head(b"Host: a.test", line=b"GET / HTTP/1.0"), b"/"),
        (post(b"X-Text: caf\xe9, \ttab", b"X-Empty:"), b"/"),
        (post(b"Content-Length: 5"), b"/"),
        (post(b"Transfer-Encoding: chunked"), b"/"),
        (post(b"Expect: 100-continue", b"Content-Length: 2"), b"/"),
    ],
)
def test_a_request_for_the_name_is_written_anew(data: bytes, target: bytes) -> None:
    found = decoded(data)
    server = h11.Connection(h11.SERVER)
    server.receive_data(encode_request(found, found.head, "a.test"))
    event = server.next_event()
    assert isinstance(event, h11.Request) and event.target == target
    headers = dict(event.headers)
    assert headers[b"host"] == b"a.test" and b"expect" not in headers
    assert all(first_head(data, size) for size in (1, 2, 17, len(data)))


def test_what_a_library_sends_is_decoded() -> None:
    class Recorder(http.client.HTTPConnection):
        sent = b""

        def connect(self) -> None:
            pass

        def send(self, data: object) -> None:
            self.sent += data.read() if isinstance(data, io.BytesIO) else data  # type: ignore[operator]

    client = Recorder("a.test")
    client.request("POST", "/upload", body=iter([b"one"]), headers={"Accept": "*/*"}, encode_chunked=True)
    found = decoded(client.sent.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
    assert found.body.chunked and (b"accept", b"*/*") in found.head.fields


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
        (b"\x16\x03\x01\x02\x00\x01\x00", "control byte"),
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
    block = data if b"\r\n\r\n" in data else data + b"\r\n\r\n"
    with pytest.raises(RequestRefusedError) as caught:
        decoded(block)
    assert str(caught.value) == reason
    for size in (1, 2, 3, 17, len(block)):
        with pytest.raises(RefusalError) as refused:
            first_head(block, size)
        assert refused.value.reason == refusal_of(caught.value).reason


def test_the_refusal_names_the_host_that_was_asked_for() -> None:
    with pytest.raises(RequestRefusedError) as caught:
        decoded(head(b"Host: Evil.test\xff:81"))
    assert caught.value.host == "evil.test?:81"
    client = http.client.HTTPResponse(Socket(refusal_of(caught.value).response))  # type: ignore[arg-type]
    client.begin()
    assert (client.status, client.getheader("Connection")) == (421, "close")
    assert client.read() == b"Stockade refused a request: Host differs (it names evil.test?:81)\n"


def test_a_head_is_bounded() -> None:
    def filled(size: int) -> bytes:
        return post(b"X: " + b"a" * (size - len(post(b"X: "))))

    assert len(filled(HEAD_SIZE)) == HEAD_SIZE
    assert first_head(filled(HEAD_SIZE), 4096)
    for data in (filled(HEAD_SIZE + 1), b"G" * (HEAD_SIZE + 1), post(*[b"X: y"] * (HEAD_SIZE // 6))):
        for size in (4096, len(data)):
            with pytest.raises(RefusalError, match="not HTTP"):
                first_head(data, size)


class Socket:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)
