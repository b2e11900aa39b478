"""The rules that every SDK relies on, with a plain HTTP client: bodies, framing, line endings, ids."""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from support.server import KEY_HEADER, ServedSandbox, ServerUnderTest

PYTHON = "OpenSandbox-Python-SDK/1.1.1"
UNKNOWN = "00000000-0000-4000-8000-000000000000"
TERMINAL = ("error", "execution_complete")


@pytest.fixture(scope="module")
def box(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with server.sandbox(metadata={"a": "1"}) as found:
        yield found


@pytest.fixture(scope="module")
def session(box: ServedSandbox) -> str:
    """An isolated session."""
    made = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}})
    assert made.status_code == 201, made.text
    return str(made.json()["session_id"])


@pytest.fixture(scope="module")
def shell(box: ServedSandbox) -> str:
    """A bash session."""
    return str(box.execd.post("/session", json={}).json()["session_id"])


def nulls(value: Any, place: str = "$") -> list[str]:
    """Where a value has a null."""
    if isinstance(value, dict):
        return [found for name, part in value.items() for found in nulls(part, f"{place}.{name}")]
    if isinstance(value, list):
        return [found for number, part in enumerate(value) for found in nulls(part, f"{place}[{number}]")]
    return [place] if value is None else []


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that has ended."""
    return [json.loads(line) for line in answer.text.split("\n") if line]


# No nulls


def test_no_answer_of_the_lifecycle_has_a_null(server: ServerUnderTest, box: ServedSandbox) -> None:
    assert nulls(box.answer) == []
    made = server.create(timeout=None)
    answers = [made]
    base = f"/v1/sandboxes/{made.json()['id']}"
    answers += [server.http.get(base), server.http.get("/v1/sandboxes")]
    answers += [server.http.get(f"{base}/endpoints/{port}") for port in (44772, 18080, 8000)]
    answers += [server.http.patch(f"{base}/metadata", json={"x": "1"}), server.http.get("/v1/capabilities")]
    server.http.delete(base)
    assert {one.url.path: nulls(one.json()) for one in answers if nulls(one.json())} == {}
    assert {one.status_code for one in answers} == {200, 202}


def test_no_answer_of_a_sandbox_has_a_null(box: ServedSandbox, session: str) -> None:
    box.execd.post("/directories", json={"/tmp/nulls": {"mode": 755}})
    answers = [
        box.execd.get("/metrics"),
        box.execd.get("/files/info", params={"path": "/tmp/nulls"}),
        box.execd.get("/directories/list", params={"path": "/tmp"}),
        box.execd.get("/v1/isolated/capabilities"),
        box.execd.get("/v1/isolated/sessions"),
        box.execd.get(f"/v1/isolated/session/{session}"),
        box.execd.get("/code/contexts", params={"language": "python"}),
        box.egress.get("/policy"),
    ]
    assert {one.url.path: one.text for one in answers if one.status_code != 200} == {}
    assert {one.url.path: nulls(one.json()) for one in answers if nulls(one.json())} == {}


# Errors


ERRORS = [
    ("GET", "/v1/sandboxes/" + UNKNOWN, None, 404),
    ("DELETE", "/v1/sandboxes/" + UNKNOWN, None, 404),
    ("GET", "/v1/sandboxes/nonsense", None, 404),
    ("GET", "/v1/nothing-here", None, 404),
    ("PUT", "/v1/sandboxes", {}, 405),
    ("POST", "/v1/sandboxes", [], 400),
    ("POST", "/v1/sandboxes", {}, 400),
    ("POST", "/v1/sandboxes", {"image": {"uri": "host"}, "timeout": "soon"}, 400),
    ("POST", "/v1/sandboxes", {"snapshotId": "x"}, 501),
    ("GET", "/v1/snapshots", None, 501),
    ("GET", "/v1/templates", None, 501),
    ("GET", "/v1/pools", None, 501),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), ERRORS, ids=lambda value: str(value)[:50])
def test_every_error_of_the_server_has_a_code_and_a_message(
    server: ServerUnderTest, method: str, path: str, body: object, status: int
) -> None:
    answer = server.http.request(method, path, json=body)
    told = answer.json()
    assert answer.status_code == status, answer.text
    assert told["code"] and told["message"] and nulls(told) == []
    assert answer.headers["content-type"].startswith("application/json") and answer.headers["x-request-id"]
    assert "Traceback" not in answer.text and str(server.home) not in answer.text


EXECD_ERRORS = [
    ("GET", "/nothing-here", None, 404),
    ("POST", "/command", {}, 400),
    ("POST", "/command", {"command": "x", "argv": ["x"]}, 400),
    ("POST", "/command", {"command": "x", "gid": 1}, 400),
    ("GET", "/command/status/none", None, 404),
    ("GET", "/command/none/logs", None, 404),
    ("DELETE", "/command", None, 400),
    ("POST", "/session/none/run", {"command": "x"}, 404),
    ("DELETE", "/session/none", None, 404),
    ("POST", "/code", {"context": {"language": "python"}}, 400),
    ("GET", "/code/contexts/none", None, 404),
    ("GET", "/files/info", None, 400),
    ("GET", "/files/info?path=/none", None, 404),
    ("GET", "/files/download?path=/none", None, 404),
    ("POST", "/files/permissions", [], 400),
    ("POST", "/v1/isolated/session", {}, 400),
    ("GET", "/v1/isolated/session/" + UNKNOWN, None, 404),
    ("POST", f"/v1/isolated/session/{UNKNOWN}/run", {"code": "x"}, 404),
    ("GET", f"/v1/isolated/session/{UNKNOWN}/diff", None, 404),
    ("GET", "/pty/" + UNKNOWN, None, 501),
]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"), EXECD_ERRORS, ids=lambda value: str(value)[:50]
)
def test_every_error_of_a_sandbox_has_a_code_and_a_message(
    box: ServedSandbox, method: str, path: str, body: object, status: int
) -> None:
    answer = box.execd.request(method, path, json=body)
    told = answer.json()
    assert answer.status_code == status, answer.text
    assert told["code"] and told["message"] and nulls(told) == []
    assert answer.headers["content-type"].startswith("application/json") and answer.headers["x-request-id"]


@pytest.mark.parametrize("header", [{}, {"X-EXECD-ACCESS-TOKEN": "wrong"}, {KEY_HEADER: "wrong"}], ids=str)
def test_a_ping_without_the_token_is_a_401_with_a_body(
    server: ServerUnderTest, box: ServedSandbox, header: dict[str, str]
) -> None:
    answer = httpx.get(f"{server.url}/sandboxes/{box.id}/proxy/44772/ping", headers=header)
    assert answer.status_code == 401 and answer.json()["code"] and answer.json()["message"]


def test_a_ping_of_a_paused_sandbox_fails_with_a_body(server: ServerUnderTest) -> None:
    with server.sandbox() as paused:
        server.http.post(f"/v1/sandboxes/{paused.id}/pause")
        answer = paused.execd.get("/ping")
        assert answer.status_code >= 400 and answer.json()["code"]
        server.http.post(f"/v1/sandboxes/{paused.id}/resume")
        assert paused.execd.get("/ping").status_code == 200


def test_a_file_that_no_one_paired_is_an_invalid_file(box: ServedSandbox) -> None:
    metadata = ("metadata", ("m", b'{"path": "/tmp/x"}', "application/json"))
    file = ("file", ("f", b"x", "application/octet-stream"))
    answer = box.execd.post("/files/upload", files=[metadata, metadata, file])
    assert (answer.status_code, answer.json()["code"]) == (400, "INVALID_FILE")


# Empty answers


def test_every_empty_success_says_that_it_is_empty(server: ServerUnderTest, box: ServedSandbox) -> None:
    with server.sandbox() as other:
        base = f"/v1/sandboxes/{other.id}"
        answers = [server.http.post(f"{base}/pause"), server.http.post(f"{base}/resume")]
        assert [one.status_code for one in answers] == [202, 202]
        shell = other.execd.post("/session").json()["session_id"]
        context = other.execd.post("/code/context", json={"language": "bash"}).json()["id"]
        parts = [
            ("metadata", ("m", b'{"path": "/tmp/new"}', "application/json")),
            ("file", ("f", b"x", "application/octet-stream")),
        ]
        workspace = {"workspace": {"path": "/workspace"}}
        session = other.execd.post("/v1/isolated/session", json=workspace).json()["session_id"]
        answers += [
            other.execd.get("/ping"),
            other.execd.post("/files/upload", files=parts),
            other.execd.post("/files/permissions", json={"/tmp/new": {"mode": 600}}),
            other.execd.post("/files/mv", json=[{"src": "/tmp/new", "dest": "/tmp/newer"}]),
            other.execd.delete("/files", params={"path": "/tmp/newer"}),
            other.execd.post("/directories", json={"/tmp/dir": {"mode": 755}}),
            other.execd.delete("/directories", params={"path": "/tmp/dir"}),
            other.execd.delete(f"/session/{shell}"),
            other.execd.delete(f"/code/contexts/{context}"),
            other.execd.delete(f"/v1/isolated/session/{session}"),
        ]
    wrong = {
        one.url.path: (one.status_code, dict(one.headers), one.content)
        for one in answers
        if one.status_code not in (200, 202) or one.content or one.headers.get("content-length") != "0"
    }
    assert wrong == {}


def test_an_event_of_an_sdk_is_taken_with_204(server: ServerUnderTest) -> None:
    body = {"eventType": "sandbox.create", "createDurationMs": 12, "success": True}
    answer = server.http.post("/v1/metrics/events", json=body)
    assert answer.status_code == 204 and answer.content == b""


# Streams


RUNS = [
    ("/command", "command"),
    ("/session/{shell}/run", "command"),
    ("/v1/isolated/session/{session}/run", "code"),
]


@pytest.mark.parametrize(("path", "field"), RUNS, ids=[path for path, _ in RUNS])
@pytest.mark.parametrize(("code", "name"), [(0, "execution_complete"), (3, "error")])
def test_a_stream_is_bare_json_with_one_end(
    box: ServedSandbox, session: str, shell: str, path: str, field: str, code: int, name: str
) -> None:
    body = {field: f"echo out; echo err >&2; (exit {code})"}
    answer = box.execd.post(
        path.format(session=session, shell=shell), json=body, headers={"User-Agent": PYTHON}
    )
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text.startswith("{") and answer.text.endswith("}\n\n") and "\n\n\n" not in answer.text
    found = events(answer)
    assert all(isinstance(one["timestamp"], int) and one["timestamp"] > 10**12 for one in found)
    assert found[0]["type"] == "init" and found[0]["text"]
    assert [one["type"] for one in found if one["type"] in TERMINAL] == [name] == [found[-1]["type"]]
    if name == "error":
        assert found[-1]["error"]["evalue"] == "3" and isinstance(found[-1]["error"]["traceback"], list)
    else:
        assert isinstance(found[-1]["execution_time"], int)
    assert nulls(found) == []


def test_a_stream_ends_at_once_after_its_last_event(box: ServedSandbox) -> None:
    best = 10.0
    for _ in range(5):
        start = time.monotonic()
        box.execd.post("/command", json={"command": "true"})
        best = min(best, time.monotonic() - start)
    assert best < 0.15


def test_code_is_one_object_to_a_line_and_its_results_are_strings(box: ServedSandbox) -> None:
    code = (
        "class Picture:\n    def _repr_png_(self): return b'\\x89PNG'\n"
        "    def _repr_html_(self): return '<b>'\nPicture()"
    )
    answer = box.execd.post("/code", json={"code": code, "context": {"language": "python"}})
    found = events(answer)
    results = next(one["results"] for one in found if one["type"] == "result")
    assert results["text"] and results["text/html"] == "<b>" and results["image/png"]
    assert all(isinstance(value, str) for value in results.values())
    assert [one["type"] for one in found].count("execution_complete") == 1


def test_a_quiet_command_says_that_it_lives(box: ServedSandbox) -> None:
    found = events(box.execd.post("/command", json={"command": "sleep 3.5"}))
    assert "ping" in [one["type"] for one in found]


@pytest.mark.parametrize(
    ("agent", "texts"),
    [
        (PYTHON, ["a\n", "\n", "b\r\n", "end"]),
        ("OpenSandbox-Python-SDK/1.2.0", ["a\n", "\n", "b\r\n", "end"]),
        ("OpenSandbox-Python-SDK/1.1.0", ["a", "\n", "b", "end"]),
        ("OpenSandbox-JS-SDK/0.1.11", ["a", "\n", "b", "end"]),
        ("OpenSandbox-Go-SDK/1.0.0", ["a", "\n", "b", "end"]),
        ("curl/8", ["a", "\n", "b", "end"]),
        ("stockade/1.0 (client)", ["a\n", "\n", "b\r\n", "end"]),
    ],
)
@pytest.mark.parametrize(("path", "field"), RUNS, ids=[path for path, _ in RUNS])
def test_the_ending_of_a_line_depends_on_the_client(
    box: ServedSandbox, session: str, shell: str, path: str, field: str, agent: str, texts: list[str]
) -> None:
    body = {field: "printf 'a\\n\\nb\\r\\nend'"}
    answer = box.execd.post(
        path.format(session=session, shell=shell), json=body, headers={"User-Agent": agent}
    )
    assert [one["text"] for one in events(answer) if one["type"] == "stdout"] == texts


def test_output_that_is_no_text_and_very_long_lines_arrive(box: ServedSandbox) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff\\xfe ok ' + b'x' * 6_000_000)"
    answer = box.execd.post(
        "/command", json={"argv": ["python3", "-c", code]}, headers={"User-Agent": PYTHON}
    )
    assert max(map(len, answer.text.split("\n"))) < 4 << 20
    text = "".join(one["text"] for one in events(answer) if one["type"] == "stdout")
    assert " ok " in text and text.count("x") == 6_000_000


def test_a_client_that_goes_away_ends_its_command(server: ServerUnderTest, box: ServedSandbox) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    body = json.dumps({"command": "echo $$ > /tmp/pid; exec sleep 60"})
    headers = {"X-EXECD-ACCESS-TOKEN": box.token, "Content-Type": "application/json"}
    connection.request("POST", f"/sandboxes/{box.id}/proxy/44772/command", body, headers)
    answer = connection.getresponse()
    assert answer.read1(10)
    alive = {"command": "until test -s /tmp/pid; do sleep 0.05; done; kill -0 $(cat /tmp/pid)"}
    assert events(box.execd.post("/command", json=alive))[-1]["type"] == "execution_complete"
    assert connection.sock is None or connection.sock.shutdown(socket.SHUT_RDWR) is None
    answer.close()
    connection.close()
    gone = {"command": "while kill -0 $(cat /tmp/pid) 2>/dev/null; do sleep 0.1; done", "timeout": 20_000}
    assert events(box.execd.post("/command", json=gone))[-1]["type"] == "execution_complete"


# Names of requests


@pytest.mark.parametrize("path", ["/v1/sandboxes", "/v1/sandboxes/nothing", "/health", "/nowhere"])
def test_a_request_keeps_its_id_or_gets_one(server: ServerUnderTest, path: str) -> None:
    assert server.http.get(path, headers={"X-Request-ID": "mine-1"}).headers["x-request-id"] == "mine-1"
    first, second = (server.http.get(path).headers["x-request-id"] for _ in range(2))
    assert first and second and first != second


@pytest.mark.parametrize("path", ["/ping", "/files/info?path=/none", "/nothing"])
def test_a_request_into_a_sandbox_keeps_its_id(box: ServedSandbox, path: str) -> None:
    answer = box.execd.get(path, headers={"X-Request-ID": "mine-2"})
    assert answer.headers.get_list("x-request-id") == ["mine-2"]
    assert box.execd.get("/ping").headers["x-request-id"]


def test_an_id_of_a_request_cannot_write_headers(server: ServerUnderTest) -> None:
    answer = server.http.get("/health", headers={"X-Request-ID": "x" * 5000})
    assert len(answer.headers["x-request-id"]) < 300
