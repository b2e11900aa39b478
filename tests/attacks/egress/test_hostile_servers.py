"""Servers that rules allow and that lie: about who they are, and about where their responses end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest

from attacks.egress.reach import Reach
from support.network import Internet

WWW, PORT, TLS_PORT = "www.good.example", 8088, 8089
#: What the server sends for each path, in hexadecimal; {many} stands for a lot.
RESPONSES = {
    "/two": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nunasked",
    "/lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 50\r\n\r\nok",
    "/both": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nok\r\n0\r\n\r\n",
    "/short": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nok",
    "/status": b"HTTP/1.1 2000 OK\r\nContent-Length: 2\r\n\r\nok",
    "/other": b"SSH-2.0-OpenSSH\r\n\r\n",
    "/lf": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "/folded": b"HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\nok",
    "/extension": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nok\r\n0\r\n\r\n",
    "/huge-chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nok",
    "/coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "/upgrade": b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\nok",
    "/interim": b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    "/headers": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 100000,
    "/header": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 1000000,
}
#: What a program may get to see of each: the body as it was announced, or nothing of it.
WHOLE = {"/two"}
SERVER = """
import json, socketserver, ssl, sys
ANSWER = b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok"
responses = {path: bytes.fromhex(text) for path, text in json.loads(sys.stdin.readline()).items()}
class Handler(socketserver.BaseRequestHandler):
    def handle(self):
        end = self.request
        try:
            if self.server.context:
                end = self.server.context.wrap_socket(end, server_side=True)
            while data := end.recv(65536):
                end.sendall(responses.get(data.split(b" ")[1].decode(), ANSWER))
                if data.split(b" ")[1] in (b"/short", b"/huge-chunk"):
                    return
        except OSError:
            pass
class Server(socketserver.ThreadingTCPServer):
    allow_reuse_address, daemon_threads, context = True, True, None
server = Server(("11.0.0.11", int(sys.argv[1])), Handler)
if len(sys.argv) > 2:
    server.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.context.load_cert_chain(sys.argv[2], sys.argv[3])
print("ready", flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def liar(shared_internet: Internet) -> Iterator[None]:
    """A server of plain HTTP that answers with `RESPONSES`."""
    argv = [sys.executable, "-c", SERVER, str(PORT)]
    with shared_internet.server(argv, stdin=-1, stdout=-1, text=True) as process:
        process.stdin.write(json.dumps({path: one.hex() for path, one in RESPONSES.items()}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()
        process.stdout.close()


def test_a_response_that_ends_elsewhere_is_never_passed_on(reach: Reach, liar: None) -> None:
    attack = [
        [WWW, PORT, "", [f"GET {path} HTTP/1.1\r\nHost: {WWW}:{PORT}\r\n\r\n".encode().hex()], 0]
        for path in RESPONSES
    ]
    outside = reach.outside("judged", attack)
    assert all(b"ok" in bytes.fromhex(one) or len(one) > 20 for one in outside), "a control did not answer"
    inside = reach.inside("judged", attack, net=[f"GET http://{WWW}:{PORT}/**"])
    for path, found in zip(RESPONSES, inside.verdict, strict=True):
        said = bytes.fromhex(found) if not found.endswith("Error") else b""
        assert b"unasked" not in said and len(said) < 100000, (path, said[:200])
        assert said.count(b"HTTP/1.1 200") <= 1
        if path not in WHOLE:
            passed = said.startswith(b"HTTP/1.1 200") and not said.endswith(b"0\r\n\r\n")
            assert not said or said.startswith((b"HTTP/1.1 502", b"HTTP/1.1 100")) or passed, (
                path,
                said[:200],
            )
    assert {one["reason"] for one in inside.decisions("request", verdict="denied")} == {"bad response"}


def test_a_server_whose_certificate_the_roots_do_not_vouch_for_gets_no_request(
    reach: Reach, liar: None
) -> None:
    """Neither one with another name, nor any if the policy names other roots."""
    internet = reach.internet
    file, key = internet.issue("other.example")
    request = [
        WWW,
        TLS_PORT,
        "http/1.1",
        [f"GET /x HTTP/1.1\r\nHost: {WWW}:{TLS_PORT}\r\n\r\n".encode().hex()],
        0,
    ]
    with internet.server(
        [sys.executable, "-c", SERVER, str(TLS_PORT), str(file), str(key)], stdin=-1, stdout=-1, text=True
    ) as process:
        process.stdin.write("{}\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        inside = reach.inside("judged", [request], net=[f"GET https://{WWW}:{TLS_PORT}/**"])
        process.stdin.close()
        process.stdout.close()
    said = bytes.fromhex(inside.verdict[0])
    assert said.startswith(b"HTTP/1.1 502") and b"certificate" in said, said
    assert [one["reason"] for one in inside.decisions(verdict="failed")] == ["bad certificate"]
    good = [
        "api.good.example",
        443,
        "http/1.1",
        [b"GET /x HTTP/1.1\r\nHost: api.good.example\r\n\r\n".hex()],
        0,
    ]
    rule = "GET https://api.good.example/**"
    roots = internet.trust["SSL_CERT_FILE"]
    trusted = reach.inside("judged", [good], net=[rule], net_roots=roots)
    assert bytes.fromhex(trusted.verdict[0]).startswith(b"HTTP/1.1 200")
    other = reach.inside("judged", [good], net=[rule], net_roots=str(file))
    assert bytes.fromhex(other.verdict[0]).startswith(b"HTTP/1.1 502")
    assert internet.events("request") == []
