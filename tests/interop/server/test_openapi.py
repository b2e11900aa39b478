"""The server does what its OpenAPI description says: schemathesis calls it, and no call is a server error."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

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

        call()
    assert faults == []
    assert calls > 300
