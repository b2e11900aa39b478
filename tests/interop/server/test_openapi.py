"""The server's OpenAPI description is valid and true: schemathesis calls the server by it.

No call is a server error, and every answer is as the description says. What schemathesis makes up seldom
exists, so the answers to calls that succeed are looked at by themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from support.server import KEY_HEADER, ServedSandbox, ServerUnderTest

#: How many calls of each operation are made.
EXAMPLES = 5
SEED = 20261117
#: Calls after which the sandbox would be gone or asleep: they are made of sandboxes that do not exist.
ENDING = re.compile(r"/v1/sandboxes/\{sandbox_id\}(/pause|/renew-expiration)?$")
#: A stream without an end, and the end of the session that the other calls need.
LEFT_OUT = {("GET", "/metrics/watch"), ("DELETE", "/v1/isolated/session/{session_id}")}


@pytest.fixture(scope="module")
def description(server: ServerUnderTest) -> dict[str, Any]:
    answer = server.http.get("/openapi.json")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.fixture(scope="module")
def box(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with server.sandbox(networkPolicy={"defaultAction": "deny", "egress": []}) as found:
        yield found


@pytest.fixture(scope="module")
def known(server: ServerUnderTest, box: ServedSandbox) -> dict[str, str]:
    """Ids that exist, by the names of their parameters."""
    session = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}})
    return {"sandbox_id": box.id, "session_id": session.json()["session_id"], "uid": "0", "gid": "0"}


def with_ids(description: dict[str, Any], known: dict[str, str]) -> dict[str, Any]:
    """Put ids that exist into the paths, so that the calls get beyond the search for them."""
    paths: dict[str, Any] = {}
    for path, operations in description["paths"].items():
        kept = {
            method: dict(operation)
            for method, operation in operations.items()
            if (method.upper(), path.rpartition("/44772")[2]) not in LEFT_OUT
        }
        ids = {} if ENDING.search(path) else known
        for operation in kept.values():
            parameters = operation.get("parameters", [])
            operation["parameters"] = [
                one for one in parameters if one["in"] != "path" or one["name"] not in ids
            ]
        paths[re.sub(r"\{(\w+)\}", lambda name, ids=ids: ids.get(name[1], name[0]), path)] = kept
    return description | {"paths": paths}


def test_the_description_is_valid(description: dict[str, Any]) -> None:
    schemathesis.openapi.from_dict(description).validate()
    with pytest.raises(ValueError, match="required"):
        schemathesis.openapi.from_dict(description | {"info": {}}).validate()


def test_the_description_names_what_is_there(description: dict[str, Any]) -> None:
    assert {"/v1/sandboxes", "/v1/sandboxes/{sandbox_id}", "/v1/capabilities"} <= set(description["paths"])
    assert description["openapi"].startswith("3.") and "Stockade" in description["info"]["title"]


def test_the_description_asks_for_nothing_of_the_server_itself(description: dict[str, Any]) -> None:
    create = description["paths"]["/v1/sandboxes"]["post"]
    assert [one["name"] for one in create.get("parameters", ()) if one["in"] == "query"] == []


def test_no_call_that_the_description_allows_is_a_server_error(
    server: ServerUnderTest, description: dict[str, Any], known: dict[str, str]
) -> None:
    schema = schemathesis.openapi.from_dict(with_ids(description, known))
    headers = {KEY_HEADER: server.key}
    faults: list[str] = []
    calls = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @seed(SEED)
        @settings(
            max_examples=EXAMPLES,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def call(case: Any) -> None:
            nonlocal calls
            calls += 1
            answer = case.call(base_url=server.url, headers=headers, timeout=20)
            if answer.status_code >= 500 and answer.status_code != 501:
                faults.append(f"{case.method} {case.path}: {answer.status_code} {answer.text[:300]}")
            elif answer.status_code >= 400:
                told = json.loads(answer.content)
                if not (told.get("code") and told.get("message")):
                    faults.append(f"{case.method} {case.path}: {answer.status_code} {answer.text[:300]}")
            case.validate_response(answer, checks=[content_type_conformance, response_schema_conformance])

        call()
    assert faults == []
    assert calls > 300


def session_of(box: ServedSandbox) -> str:
    made = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}})
    session = f"/v1/isolated/session/{made.json()['session_id']}"
    box.execd.post(f"{session}/run", json={"code": "echo text > file"})
    return session


def test_answers_to_calls_that_succeed_are_as_described(
    server: ServerUnderTest, description: dict[str, Any], box: ServedSandbox
) -> None:
    schema = schemathesis.openapi.from_dict(description)

    def check(template: str, answer: httpx.Response) -> httpx.Response:
        operation = description["paths"][template][answer.request.method.lower()]
        where = f"{answer.request.method} {template} {answer.status_code}"
        assert answer.is_success and str(answer.status_code) in operation["responses"], (
            f"{where} {answer.text}"
        )
        content = operation["responses"][str(answer.status_code)].get("content", {})
        kind = answer.headers.get("content-type", "").partition(";")[0]
        assert kind in content if content else answer.content == b"", f"{where}: {kind}"
        answer.request.read()
        schema[template][answer.request.method].validate_response(answer)
        return answer

    def inside(template: str, method: str, path: str | None = None, **options: Any) -> httpx.Response:
        answer = box.execd.request(method, path or template, **options)
        return check(f"/sandboxes/{{sandbox_id}}/proxy/44772{template}", answer)

    def outside(template: str, path: str) -> None:
        check(f"/v1/sandboxes{template}", server.http.get(f"/v1/sandboxes{path}"))

    inside("/command", "POST", json={"command": "echo a"})
    begun = inside("/command", "POST", json={"command": "echo a; sleep 60", "background": True})
    identifier = json.loads(begun.text.splitlines()[0])["text"]
    inside("/command/status/{identifier}", "GET", f"/command/status/{identifier}")
    inside("/command/{identifier}/logs", "GET", f"/command/{identifier}/logs")
    inside("/command", "DELETE", params={"id": identifier})
    inside("/code/context", "POST", json={"language": "bash"})
    inside("/code/contexts", "DELETE", params={"language": "bash"})
    inside("/metrics", "GET")

    told = json.dumps({"path": "/workspace/up", "mode": 640}).encode()
    inside("/files/upload", "POST", files=[("metadata", ("m", told)), ("file", ("f", b"0123456789"))])
    inside("/files/info", "GET", params={"path": "/workspace/up"})
    inside("/files/download", "GET", params={"path": "/workspace/up"})
    part = inside("/files/download", "GET", params={"path": "/workspace/up"}, headers={"Range": "bytes=2-3"})
    assert part.status_code == 206
    inside("/files/download", "GET", params={"path": "/workspace/up", "offset": 1})
    inside("/files/search", "GET", params={"path": "/workspace"})
    inside("/directories/list", "GET", params={"path": "/workspace"})

    place, session = "/v1/isolated/session/{session_id}", session_of(box)
    inside(place, "GET", session)
    ran = inside(f"{place}/run", "POST", f"{session}/run", json={"code": "true", "background": True})
    run = f"{session}/runs/{ran.json()['run_id']}"
    inside(f"{place}/runs/{{run_id}}", "GET", run)
    inside(f"{place}/runs/{{run_id}}/logs", "GET", f"{run}/logs")
    for form in ("tar", "json", "patch"):
        inside(f"{place}/diff", "GET", f"{session}/diff", params={"format": form})
    inside(f"{place}/commit", "POST", f"{session}/commit", json={"strategy": "overwrite"})
    inside(f"{place}/commit", "POST", f"{session}/commit")
    inside(place, "DELETE", session)

    outside("", "")
    for name in ("", "/policy", "/receipts", "/networkpolicy", "/endpoints/{port}"):
        outside(f"/{{sandbox_id}}{name}", f"/{box.id}{name.replace('{port}', '44772')}")
    (first, *_) = server.http.get(f"/v1/sandboxes/{box.id}/receipts").json()["receipts"]
    outside("/{sandbox_id}/receipts/{receipt}", f"/{box.id}/receipts/{first['id']}")
    check("/metrics", server.http.get("/metrics"))
    check("/v1/capabilities", server.http.get("/v1/capabilities"))
