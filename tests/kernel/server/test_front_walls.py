"""What stands before the server's calls: keys, names, origins, limits; and what its answers never hold."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from support.server import KEY, KEY_HEADER, LIMITS, ServerUnderTest, module_server

CONFIG = """
hosts = ["box.example.com"]
origins = ["https://app.example.com"]
max_connections = 20
max_header_bytes = 8192
max_body_bytes = 65536
client_timeout = 1
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory, CONFIG)


def _raw(server: ServerUnderTest, request: bytes, seconds: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), seconds) as end:
        end.sendall(request)
        answer = b""
        while piece := end.recv(65536):
            answer += piece
        return answer


def _is_error(answer: bytes, status: int) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.startswith(b"HTTP/1.1 %d " % status) and json.loads(body).keys() == {"code", "message"}


def test_only_health_and_ping_need_no_key(server: ServerUnderTest) -> None:
    with httpx.Client(base_url=server.url, limits=LIMITS) as client:
        assert client.get("/health").json() == {"status": "healthy"}
        assert client.get("/ping").status_code == 200
        for path in (
            "/v1/sandboxes",
            "/openapi.json",
            "/v1/capabilities",
            "/version",
            "/metrics",
            "/nothing",
        ):
            assert (client.get(path).status_code, client.get(path).json()["code"]) == (401, "MISSING_API_KEY")
            wrong = client.get(path, headers={KEY_HEADER: "x" * 40})
            assert (wrong.status_code, wrong.json()["code"]) == (401, "INVALID_API_KEY")
    assert server.http.get("/version").json().keys() == {"version"}


def test_an_endpoint_without_token_or_key_answers_the_same_whether_it_exists_or_not(
    server: ServerUnderTest,
) -> None:
    with server.sandbox() as box, httpx.Client(base_url=server.url, limits=LIMITS) as client:
        there = client.get(f"/sandboxes/{box.id}/proxy/44772/ping")
        missing = client.get(f"/sandboxes/{box.id[:-4]}0000/proxy/44772/ping")
        assert there.status_code == 401 and there.json() == missing.json()
        wrong = client.get(
            f"/sandboxes/{box.id}/proxy/44772/ping", headers={"X-EXECD-ACCESS-TOKEN": box.token[:-1]}
        )
        assert wrong.status_code == 401
        with server.sandbox() as other:
            foreign = client.get(
                f"/sandboxes/{box.id}/proxy/44772/ping", headers={"X-EXECD-ACCESS-TOKEN": other.token}
            )
            assert foreign.status_code == 401


def test_a_foreign_host_or_origin_is_refused(server: ServerUnderTest) -> None:
    get = server.http.get
    assert get("/v1/sandboxes", headers={"Host": "evil.example.org"}).status_code == 403
    assert (
        get("/health", headers={"Host": f"evil.example.org:{server.port}"}).json()["code"] == "FORBIDDEN_HOST"
    )
    assert get("/v1/sandboxes", headers={"Host": "box.example.com"}).status_code == 200
    assert get("/v1/sandboxes", headers={"Host": f"localhost:{server.port}"}).status_code == 200
    refused = get("/v1/sandboxes", headers={"Origin": "https://evil.example.org"})
    assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN_ORIGIN")
    page = {"Origin": "https://app.example.com"}
    allowed = get("/v1/sandboxes", headers=page)
    assert allowed.headers["access-control-allow-origin"] == page["Origin"]
    asked = {**page, "Access-Control-Request-Method": "POST"}
    assert httpx.options(f"{server.url}/v1/sandboxes", headers=asked).status_code == 204
    foreign = {**asked, "Origin": "https://evil.example.org"}
    assert httpx.options(f"{server.url}/v1/sandboxes", headers=foreign).status_code == 403


def test_every_answer_has_a_request_id(server: ServerUnderTest) -> None:
    given = server.http.get("/v1/sandboxes", headers={"X-Request-ID": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    strange = server.http.get("/nothing", headers={"X-Request-ID": "a b\tc"})
    assert strange.status_code == 404 and len(strange.headers["x-request-id"]) == 32
    with server.sandbox() as box:
        ping = box.execd.get("/ping", headers={"X-Request-ID": "mine-2"})
        assert ping.headers.get_list("x-request-id") == ["mine-2"]


def test_a_request_that_is_too_large_or_no_request_is_refused(server: ServerUnderTest) -> None:
    host = b"Host: localhost\r\n"
    assert _is_error(_raw(server, b"GET / HTTP/1.1\r\n" + host + b"A: " + b"x" * 9000 + b"\r\n\r\n"), 431)
    assert _is_error(_raw(server, b"GET /" + b"x" * 20000), 431)
    many = b"".join(b"H%d: 1\r\n" % number for number in range(200))
    assert _is_error(_raw(server, b"GET / HTTP/1.1\r\n" + host + many + b"\r\n"), 431)
    assert _is_error(_raw(server, b"\x16\x03\x01 hello\r\n\r\n"), 400)
    large = server.http.post("/v1/sandboxes", content=b'{"image": "' + b"x" * 70000 + b'"}')
    assert large.status_code == 413 and large.json().keys() == {"code", "message"}


def test_a_slow_client_is_sent_away(server: ServerUnderTest) -> None:
    began = time.monotonic()
    assert _is_error(_raw(server, b"GET / HTTP/1.1\r\nHost: loc"), 408)
    key = f"{KEY_HEADER}: {server.key}\r\n".encode()
    slow = b"POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\n" + key
    slow += b"Connection: close\r\nContent-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    assert _is_error(_raw(server, slow), 408)
    assert time.monotonic() - began < 4


def test_more_connections_than_allowed_are_refused(server: ServerUnderTest) -> None:
    ends = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(20)]
    try:
        for end in ends:
            end.sendall(f"GET /v1/pools HTTP/1.1\r\nHost: localhost\r\n{KEY_HEADER}: {KEY}\r\n\r\n".encode())
            assert end.recv(65536).startswith(b"HTTP/1.1 501 ")  # its client has a key
        answer = _raw(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert _is_error(answer, 503) and b"retry-after: 1" in answer
    finally:
        for end in ends:
            end.close()
    time.sleep(0.1)
    assert server.http.get("/health").status_code == 200


@pytest.mark.parametrize(
    "begun",
    ["", "GET /health HTTP/1.1\r\n\r\n", "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na"],
)
def test_who_has_no_key_keeps_nobody_out_who_has_one(server: ServerUnderTest, begun: str) -> None:
    ends = [socket.create_connection(("127.0.0.1", server.port), 5) for _ in range(40)]
    try:
        for end in ends:
            with contextlib.suppress(OSError):  # those that had to make room
                end.sendall(begun.replace("\r\n", "\r\nHost: localhost\r\n", 1).encode())
        assert server.http.get("/v1/sandboxes").status_code == 200
    finally:
        for end in ends:
            end.close()


def test_no_key_or_token_reaches_the_sandbox_or_the_disk_in_clear(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        shown = box.execd.post(
            "/command",
            json={"command": "env; cat /proc/*/environ 2>/dev/null | tr '\\0' '\\n'"},
            headers={KEY_HEADER: server.key, "Cookie": "a=secret", "Authorization": "Bearer secret"},
        ).text
        assert server.key not in shown and box.token not in shown and "secret" not in shown
    for path in (server.home / "server").iterdir():
        assert server.key not in path.read_text()
        assert path.stat().st_mode & 0o077 == 0


def test_errors_name_no_path_of_the_host(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        answers = [
            box.execd.get("/files/download", params={"path": "/nothing"}),
            box.execd.get("/files/info", params={"path": "/../../etc/shadow"}),
            box.execd.get("/directories/list", params={"path": "/proc/1/root/x"}),
            box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/etc"}}),
            box.execd.post("/command", content=b"{"),
            box.execd.get("/%2e%2e/control/record"),
            server.http.get(f"/sandboxes/{box.id}/proxy/44772/../../control/record"),
        ]
        for answer in answers:
            assert answer.status_code >= 400 and answer.json().keys() == {"code", "message"}, answer.text
            assert str(server.home) not in answer.text and "Traceback" not in answer.text


def test_the_private_plane_of_a_supervisor_cannot_be_reached(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        for path in ("/control/record", "/%2fcontrol/record", "/../control/record", "//control/record"):
            for port in (44772, 18080):
                answer = _raw(
                    server,
                    f"GET /sandboxes/{box.id}/proxy/{port}{path} HTTP/1.1\r\nHost: localhost\r\n"
                    f"X-EXECD-ACCESS-TOKEN: {box.token}\r\nConnection: close\r\n\r\n".encode(),
                )
                assert box.token.encode() not in answer and b"HTTP/1.1 4" in answer


def test_a_client_that_goes_away_ends_what_it_started(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        with box.execd.stream("POST", "/command", json={"command": "echo on; sleep 1000"}) as stream:
            identifier = json.loads(next(stream.iter_lines()))["text"]
        end = time.monotonic() + 10
        while box.execd.get(f"/command/status/{identifier}").json()["running"]:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_events_arrive_as_they_happen(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        began = time.monotonic()
        command = {"command": "echo first; sleep 3; echo last"}
        with box.execd.stream("POST", "/command", json=command) as stream:
            for line in stream.iter_lines():
                if "first" in line:
                    break
            assert time.monotonic() - began < 2.5


def test_a_program_that_cannot_start_does_not_tell_which_files_the_host_has(
    server: ServerUnderTest, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    there, missing = tmp_path / "there", tmp_path / "gone"
    there.write_text("#!/bin/sh\n")
    there.chmod(0o755)
    with server.sandbox() as box:
        for field in ("argv", "cwd"):
            answers = []
            for path in (there, missing):
                given = {"argv": [str(path)]} if field == "argv" else {"argv": ["true"], "cwd": str(path)}
                answer = box.execd.post("/command", json=given).text
                assert "CommandExecError" in answer
                shown = answer[answer.index("CommandExecError") :].rpartition('"timestamp"')[0]
                answers.append(shown.replace(str(path), "PATH"))
            assert answers[0] == answers[1]
