"""Clients that send what no client should: every answer is a refusal, and the server stays as it was."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.event_streams import command
from support.isolated import SESSIONS, create
from support.means import applies
from support.server import KEY, KEY_HEADER, ServedSandbox, ServerUnderTest, module_server

DEEP = b"[" * 100_000
NOT_TEXT = b'{"a":"\xed\xa0\x80"}'
JSON = {"content-type": "application/json"}
MEBIBYTE = 1 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


@pytest.fixture(scope="module")
def box(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with server.sandbox() as made:
        yield made


def _raw(server: ServerUnderTest, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), 10) as end:
        end.sendall(request)
        answer = b""
        while piece := end.recv(65536):
            answer += piece
        return answer


@pytest.mark.parametrize("content", [DEEP, b'{"unknown":' + DEEP, b'{"a":' * 100_000, NOT_TEXT])
def test_a_body_that_cannot_be_decoded_is_the_clients_fault(
    server: ServerUnderTest, box: ServedSandbox, content: bytes
) -> None:
    answers = [
        server.http.post("/v1/sandboxes", content=content, headers=JSON),
        server.http.patch(f"/v1/sandboxes/{box.id}/metadata", content=content, headers=JSON),
        box.egress.put("/policy", content=content, headers=JSON),
        box.execd.post("/command", content=content, headers=JSON),
        box.execd.post("/files/mv", content=content, headers=JSON),
        box.execd.post("/v1/isolated/session", content=content, headers=JSON),
    ]
    assert [answer.status_code for answer in answers] == [400] * len(answers)


@pytest.mark.parametrize(
    "body",
    [
        {"resourceLimits": {"memory": "9" * 400}},
        {"resourceLimits": {"cpu": "9" * 400}},
        {"extensions": {"access.renew.extend.seconds": "9" * 5000}},
    ],
)
def test_a_number_beyond_all_numbers_is_refused(server: ServerUnderTest, body: dict[str, object]) -> None:
    assert server.create(**body).status_code == 400


@pytest.mark.parametrize("at", ["0001-01-01T00:00:00+23:59", "9999-12-31T23:59:59-23:59"])
def test_a_time_before_or_after_all_times_is_refused(box: ServedSandbox, at: str) -> None:
    renew = f"/v1/sandboxes/{box.id}/renew-expiration"
    assert box.server.http.post(renew, json={"expiresAt": at}).status_code == 400


def test_no_client_makes_the_server_read_much_for_each_answer(
    server: ServerUnderTest, box: ServedSandbox
) -> None:
    many = {f"key{number}": "v" * 60 for number in range(2000)}
    for field in ("env", "metadata", "extensions"):
        assert (
            server.create(**{field: many | {f"more{key}": one for key, one in many.items()}}).status_code
            == 400
        )
    assert server.create(entrypoint=["x" * (1 << 20)]).status_code == 400
    patch = f"/v1/sandboxes/{box.id}/metadata"
    assert server.http.patch(patch, json=many).status_code == 200  # the control: it grows, but not for ever
    answers = [server.http.patch(patch, json={f"{n}{key}": one for key, one in many.items()}) for n in "ab"]
    assert answers[-1].status_code == 400 and "KiB" in answers[-1].json()["message"]
    assert server.http.patch(patch, json=dict.fromkeys(many)).status_code == 200


def test_changes_of_metadata_at_the_same_time_are_all_kept(box: ServedSandbox) -> None:
    def change(number: int) -> int:
        patch = f"/v1/sandboxes/{box.id}/metadata"
        return box.server.http.patch(patch, json={f"at-once-{number}": "x"}).status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(change, range(24))) == {200}
    kept = box.server.http.get(f"/v1/sandboxes/{box.id}").json()["metadata"]
    assert {key for key in kept if key.startswith("at-once")} == {f"at-once-{n}" for n in range(24)}


def test_a_limit_of_the_disk_is_refused_because_it_cannot_be_kept(server: ServerUnderTest) -> None:
    answer = server.create(resourceLimits={"disk": "20Mi"})
    assert answer.status_code == 400 and "no limit would hold" in answer.json()["message"]


def test_only_an_upload_may_be_larger_than_the_supervisor_holds_in_memory(box: ServedSandbox) -> None:
    def large(begin: bytes, end: bytes) -> Iterator[bytes]:
        yield begin
        for _ in range(20):
            yield b"a" * MEBIBYTE
        yield end

    body = large(b'{"command":"true","x":"', b'"}')
    assert box.execd.post("/command", content=body, headers=JSON).status_code == 413
    part = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n'
    begin = part % b"metadata" + b'{"path":"/workspace/large"}\r\n' + part % b"file"
    kind = {"content-type": "multipart/form-data; boundary=x"}  # the control: as many bytes
    answer = box.execd.post("/files/upload", content=large(begin, b"\r\n--x--\r\n"), headers=kind)
    assert answer.status_code == 200, answer.text


def test_uploads_take_no_more_memory_than_the_sandbox_may_have(server: ServerUnderTest) -> None:
    made = server.create(resourceLimits={"memory": "32Mi"})
    applies(made.status_code == 202, "limits of memory need a cgroup of this user")
    with contextlib.closing(ServedSandbox(server, made.json())) as box:
        session = create(box, workspace={"path": "/data"}).json()["session_id"]
        part = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\n\r\n'
        kind = {"content-type": "multipart/form-data; boundary=x"}
        for call, path in (("", b"/dev/shm/much"), (f"{SESSIONS}/{session}", b"/tmp/much")):
            for size, status in ((8, 200), (64, 507)):
                begin = part % b"metadata" + b'{"path":"%s"}\r\n' % path + part % b"file"
                content = begin + b"a" * (size * MEBIBYTE) + b"\r\n--x--\r\n"
                answer = box.execd.post(f"{call}/files/upload", content=content, headers=kind)
                assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Host: localhost\r\nContent-Length: 22", 200),  # the control
        ("Host: localhost\r\nTransfer-Encoding: gzip, chunked", 400),
        ("Host: localhost\r\nContent-Length: 22\r\nUpgrade: h2c\r\nConnection: upgrade", 400),
        ("Host: evil.example.org\r\nHost: localhost\r\nContent-Length: 22", 400),
        ("Host: localhost\r\nX-EXECD-ACCESS-TOKEN: x\r\nContent-Length: 22", 400),
        ("Host: [::1].evil.example.org\r\nContent-Length: 22", 403),
        ("Host: localhost:1@evil.example.org\r\nContent-Length: 22", 403),
    ],
)
def test_headers_with_two_meanings_are_refused(
    server: ServerUnderTest, box: ServedSandbox, headers: str, status: int
) -> None:
    head = (
        f"POST /sandboxes/{box.id}/proxy/44772/command HTTP/1.1\r\nX-EXECD-ACCESS-TOKEN: {box.token}\r\n"
        f"Content-Type: application/json\r\n{headers}\r\nConnection: close\r\n\r\n"
    )
    answer = _raw(server, head.encode() + b'{"command":"echo out"}')
    assert answer.startswith(b"HTTP/1.1 %d " % status), answer


def test_no_path_leads_to_the_plane_that_is_the_servers_own(
    server: ServerUnderTest, box: ServedSandbox
) -> None:
    base = f"/sandboxes/{box.id}/proxy/44772"
    for path in (
        "/../control/record", "/%2e%2e/control/record", "/..%2fcontrol/record", "%2f..%2fcontrol/record",
        "/%252e%252e/control/record", "//control/record", "/./../control/record", "/..;/control/record",
        "%2f..%2f..%2fcontrol/record", "%3f/control/record", "\\..\\control\\record",
    ):  # fmt: skip
        head = f"GET {base}{path} HTTP/1.1\r\nHost: localhost\r\n{KEY_HEADER}: {KEY}\r\n"
        answer = _raw(server, f"{head}Connection: close\r\n\r\n".encode())
        assert answer.split(b" ", 2)[1] in (b"400", b"404", b"501"), path
        assert box.token.encode() not in answer


def test_the_receipt_of_another_sandbox_is_not_even_named(
    server: ServerUnderTest, box: ServedSandbox
) -> None:
    command(box.execd, "true")
    (newest,) = server.http.get(f"/v1/sandboxes/{box.id}/receipts?limit=1").json()["receipts"]
    number = newest["id"].partition("-")[0]
    assert server.http.get(f"/v1/sandboxes/{box.id}/receipts/{newest['id']}").status_code == 200
    with server.sandbox() as other:
        for asked in (newest["id"], f"{number}-00000000", "last", "999999-00000000", "%00"):
            answer = server.http.get(f"/v1/sandboxes/{other.id}/receipts/{asked}")
            assert answer.status_code == 404
            assert json.loads(answer.text)["message"] == "the sandbox has no such receipt"


def test_requests_that_nobody_reads_answers_to_are_not_gathered(server: ServerUnderTest) -> None:
    ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), 10) as end:
        end.sendall(ask * 10)  # the control: a few wait for each other, and all are answered
        answers = b""
        while answers.count(b"healthy") < 10:
            answers += end.recv(65536)
    with socket.create_connection(("127.0.0.1", server.port), 10) as end, pytest.raises(ConnectionError):
        for _ in range(500):
            end.sendall(ask * 2000)
    assert server.http.get("/health").status_code == 200


CHUNKED = b"POST /v1/metrics/events HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"


def test_what_follows_a_body_is_no_header(server: ServerUnderTest) -> None:
    known = f"{KEY_HEADER}: {KEY}\r\n".encode()
    end = b"2\r\n{}\r\n0\r\n"
    # In one packet, so that everything has arrived before the request is looked at.
    answer = _raw(server, CHUNKED + b"Connection: close\r\n" + known + b"\r\n" + end + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 204 "), answer  # the control
    answer = _raw(server, CHUNKED + b"Connection: close\r\n\r\n" + end + known + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 401 "), answer


@pytest.mark.parametrize("piece", [b"a: b\r\n" * 50_000, b"a" * 300_000])
def test_what_follows_a_body_is_not_gathered_without_end(server: ServerUnderTest, piece: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), 10) as end, pytest.raises(ConnectionError):
        end.sendall(CHUNKED + b"\r\n0\r\na: b")
        for _ in range(100):
            end.sendall(piece)
    assert server.http.get("/health").status_code == 200
