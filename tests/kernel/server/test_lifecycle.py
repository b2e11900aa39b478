"""The lifecycle of sandboxes over HTTP."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest

from stockade.errors import SetupError
from stockade.images import store
from support.means import applies
from support.roots import busybox_root
from support.server import KEY_HEADER, LIMITS, ServerUnderTest, module_server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory, '[images]\n"python:*" = "host"\n"a-name/*" = "tools:1"\n')


def _nulls(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_nulls, value.values()))
    return any(map(_nulls, value)) if isinstance(value, list) else value is None


def test_a_new_sandbox_answers_and_a_deleted_one_is_gone(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        assert box.answer["status"]["state"] == "Running"
        assert box.execd.get("/ping").status_code == 200
        assert box.egress.get("/ping").status_code == 200
        assert (server.home / "sandboxes" / box.id).is_dir()
    assert server.http.get(f"/v1/sandboxes/{box.id}").status_code == 404
    assert not (server.home / "sandboxes" / box.id).exists()
    assert server.http.delete(f"/v1/sandboxes/{box.id}").status_code == 404


def test_no_answer_of_the_lifecycle_has_a_null(server: ServerUnderTest) -> None:
    bodies: tuple[dict[str, Any], ...] = (
        {"timeout": None},
        {"metadata": {"a": "b"}, "extensions": {"c": "d"}},
    )
    for body in bodies:
        with server.sandbox(**body) as box:
            shown = server.http.get(f"/v1/sandboxes/{box.id}").json()
            listed = server.http.get("/v1/sandboxes").json()
            assert not _nulls([box.answer, shown, listed])
            assert {"id", "status", "createdAt", "entrypoint"} <= shown.keys()
            assert ("expiresAt" in shown) == ("timeout" not in body)


def test_a_list_is_filtered_and_paged(server: ServerUnderTest) -> None:
    with (
        server.sandbox(metadata={"team": "red", "app/tier": "web"}) as one,
        server.sandbox(metadata={"team": "red"}) as two,
        server.sandbox(metadata={"team": "blue"}),
    ):

        def ids(**query: Any) -> list[str]:
            return [item["id"] for item in server.http.get("/v1/sandboxes", params=query).json()["items"]]

        assert ids(metadata="team=red") == [two.id, one.id]
        assert ids(metadata="app%2Ftier=web&team=red") == [one.id]  # as the Python SDK writes it
        assert ids(metadata="app/tier=web") == [one.id]
        assert len(ids(state=["Running", "Paused"])) == 3
        assert ids(state="Paused") == []
        page = server.http.get("/v1/sandboxes", params={"page": 2, "pageSize": 2}).json()
        expected = {"page": 2, "pageSize": 2, "totalItems": 3, "totalPages": 2, "hasNextPage": False}
        assert page["pagination"] == expected and len(page["items"]) == 1
        for wrong in ({"page": 0}, {"pageSize": 201}, {"state": "Dancing"}, {"metadata": "x"}):
            refused = server.http.get("/v1/sandboxes", params=wrong)
            assert (refused.status_code, refused.json()["message"].partition(":")[0]) == (400, *wrong)


def test_metadata_is_merged_and_null_deletes(server: ServerUnderTest) -> None:
    with server.sandbox(metadata={"a": "1", "b": "2"}) as box:
        path = f"/v1/sandboxes/{box.id}/metadata"
        answer = server.http.patch(path, json={"a": None, "c": "3"})
        assert answer.status_code == 200 and answer.json()["metadata"] == {"b": "2", "c": "3"}
        for wrong in ({"opensandbox.io/x": "1"}, {"a b": "1"}, {"a": "-"}, {"a": 1}):
            refused = server.http.patch(path, json=wrong)
            assert refused.status_code == 400 and refused.json().keys() == {"code", "message"}


def test_an_expiry_can_move_but_not_into_the_past(server: ServerUnderTest) -> None:
    with server.sandbox(timeout=600) as box, server.sandbox(timeout=None) as endless:
        later = (datetime.now(UTC) + timedelta(hours=2)).isoformat()
        answer = server.http.post(f"/v1/sandboxes/{box.id}/renew-expiration", json={"expiresAt": later})
        assert datetime.fromisoformat(answer.json()["expiresAt"]) == datetime.fromisoformat(later)
        past = {"expiresAt": "2020-01-01T00:00:00Z"}
        assert server.http.post(f"/v1/sandboxes/{box.id}/renew-expiration", json=past).status_code == 400
        none = server.http.post(f"/v1/sandboxes/{endless.id}/renew-expiration", json={"expiresAt": later})
        assert none.status_code == 409


def test_a_sandbox_ends_with_its_timeout(server: ServerUnderTest) -> None:
    with server.sandbox(timeout=1) as box:
        wait_until(lambda: server.http.get(f"/v1/sandboxes/{box.id}").status_code == 404)
        assert not (server.home / "sandboxes" / box.id).exists()


def test_an_access_moves_the_expiry_if_the_request_says_so(server: ServerUnderTest) -> None:
    with server.sandbox(timeout=100, extensions={"access.renew.extend.seconds": "3600"}) as box:
        box.execd.get("/ping")
        shown = server.http.get(f"/v1/sandboxes/{box.id}").json()
        left = datetime.fromisoformat(shown["expiresAt"]) - datetime.now(UTC)
        assert timedelta(minutes=55) < left <= timedelta(hours=1)
        assert shown["extensions"] == {"access.renew.extend.seconds": "3600"}
    assert server.create(extensions={"access.renew.extend.seconds": "5"}).status_code == 400


def test_a_paused_sandbox_stands_still_and_says_so(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        box.execd.post(
            "/command", json={"command": "while :; do date +%N > /tmp/now; done", "background": True}
        )
        path = f"/v1/sandboxes/{box.id}"
        assert server.http.post(f"{path}/resume").status_code == 409
        paused = server.http.post(f"{path}/pause")
        assert (paused.status_code, paused.headers["content-length"]) == (202, "0")
        assert server.http.get(path).json()["status"]["state"] == "Paused"
        ping = box.execd.get("/ping")
        assert ping.status_code == 409 and ping.json().keys() == {"code", "message"}
        assert server.http.post(f"{path}/pause").status_code == 409
        file = server.home / "sandboxes" / box.id / "tree" / "tmp" / "now"
        before = file.read_bytes()
        time.sleep(0.1)
        assert file.read_bytes() == before
        assert server.http.post(f"{path}/resume").status_code == 202
        assert box.execd.get("/ping").status_code == 200


def test_a_paused_sandbox_can_be_deleted(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        server.http.post(f"/v1/sandboxes/{box.id}/pause")
        assert server.http.delete(f"/v1/sandboxes/{box.id}").status_code == 204
        assert not (server.home / "sandboxes" / box.id).exists()


def test_an_endpoint_is_a_path_of_the_server(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        for port in (44772, 18080, 3000):
            found = server.http.get(f"/v1/sandboxes/{box.id}/endpoints/{port}").json()
            assert found["endpoint"] == f"127.0.0.1:{server.port}/sandboxes/{box.id}/proxy/{port}"
            assert found["headers"] == {"X-EXECD-ACCESS-TOKEN": box.token}
        signed = server.http.get(f"/v1/sandboxes/{box.id}/endpoints/80", params={"expires": "1"})
        assert signed.status_code == 400
        other = server.http.get(f"/sandboxes/{box.id}/proxy/3000/")
        assert other.status_code == 501 and other.json()["code"] == "NOT_SUPPORTED"
        assert server.http.get(f"/v1/sandboxes/{box.id}/proxy/44772/ping").status_code == 200


def test_resources_become_limits_and_the_policy_shows_them(server: ServerUnderTest) -> None:
    controls = server.http.get("/v1/capabilities").json()["controls"]
    kept = all(controls[f"limits.{name}"]["available"] for name in ("cpu", "memory"))
    applies(kept, "this user has no cgroups")
    with server.sandbox(resourceLimits={"cpu": "500m", "memory": "256Mi"}, env={"A": "b"}) as box:
        policy = server.http.get(f"/v1/sandboxes/{box.id}/policy").json()["policy"]
        assert policy["limits"]["cpu"] == 0.5
        assert policy["env"]["A"] == "b" and policy["env"]["OPENSANDBOX_ID"] == box.id
    gpu = server.create(resourceLimits={"gpu": "1"})
    assert gpu.status_code == 400 and "gpu" in gpu.json()["message"]


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"image": {"uri": "nothing:1"}}, 400, "[images]"),
        ({"image": None}, 400, "image"),
        ({"image": {"uri": 7}}, 400, "uri"),
        ({"timeout": 0}, 400, "timeout"),
        ({"platform": {"os": "windows"}}, 400, "platform.os"),
        ({"resourceLimits": {"memory": "much"}}, 400, "resourceLimits.memory"),
        ({"metadata": {"opensandbox.io/a": "b"}}, 400, "reserved"),
        ({"env": {"A=B": "c"}}, 400, "env"),
        ({"networkPolicy": {"egress": [{"action": "allow", "target": "127.0.0.1"}]}}, 400, "networkPolicy"),
        ({"snapshotId": "x"}, 501, "snapshotId"),
        ({"volumes": [{"name": "a"}]}, 501, "volumes"),
        ({"credentialProxy": {"enabled": True}}, 501, "credentialProxy"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_field(
    server: ServerUnderTest, body: dict[str, Any], status: int, words: str
) -> None:
    answer = server.create(**body)
    assert answer.status_code == status, answer.text
    assert words in answer.json()["message"] and answer.json().keys() == {"code", "message"}


def test_a_pattern_of_the_configuration_maps_an_image(server: ServerUnderTest) -> None:
    with server.sandbox(image={"uri": "python:3.12-slim"}) as box:
        assert server.http.get(f"/v1/sandboxes/{box.id}").json()["image"] == {"uri": "python:3.12-slim"}


def test_an_imported_image_is_the_system_of_a_sandbox(server: ServerUnderTest, tmp_path: Path) -> None:
    store.import_image(str(busybox_root(tmp_path / "root")), "tools:1", home=str(server.home))
    try:
        for name in ("tools:1", "a-name/for:it"):
            with server.sandbox(image={"uri": name}) as box:
                ran = box.execd.post("/command", json={"command": "cat /usr/share/mark"}).text
                assert '"text":"of the image"' in ran
                # Their shell is bash, which this image does not have.
                refused = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}})
                assert (refused.status_code, refused.json()["code"]) == (503, "SERVICE_UNAVAILABLE")
                assert "need bash" in refused.json()["message"]
                with pytest.raises(SetupError):
                    store.remove_image("tools:1", str(server.home))
    finally:
        store.remove_image("tools:1", str(server.home))


def test_the_entrypoint_runs_in_the_background(server: ServerUnderTest) -> None:
    with server.sandbox(entrypoint=["sh", "-c", "echo $OPENSANDBOX_ID > /tmp/began; sleep 600"]) as box:
        wait_until(
            lambda: box.execd.get("/files/download", params={"path": "/tmp/began"}).text.strip() == box.id
        )


def test_the_same_idempotency_key_makes_one_sandbox(server: ServerUnderTest) -> None:
    def create(key: str, **body: Any) -> httpx.Response:
        whole = {"image": {"uri": "host"}, "timeout": 60, **body}
        return server.http.post("/v1/sandboxes", json=whole, headers={"Idempotency-Key": key})

    first, again, other = create("k1"), create("k1"), create("k1", timeout=61)
    try:
        assert first.json() == again.json()
        assert other.status_code == 409
    finally:
        server.http.delete(f"/v1/sandboxes/{first.json()['id']}")


def test_runs_have_receipts_that_only_their_sandbox_shows(server: ServerUnderTest) -> None:
    with server.sandbox() as box, server.sandbox() as other:
        box.execd.post("/command", json={"command": "exit 3"})
        path = f"/v1/sandboxes/{box.id}/receipts"
        rows = server.http.get(path).json()["receipts"]
        assert len(rows) == 1
        envelope = server.http.get(f"{path}/{rows[0]['id']}").json()
        assert envelope["signatures"]
        foreign = server.http.get(f"/v1/sandboxes/{other.id}/receipts/{rows[0]['id']}")
        assert foreign.status_code == 404


def test_limits_that_this_machine_cannot_keep_are_refused_without_its_paths(server: ServerUnderTest) -> None:
    controls = server.http.get("/v1/capabilities").json()["controls"]
    applies(not controls["limits.memory"]["available"], "this user has cgroups")
    refused = server.create(resourceLimits={"memory": "256Mi"})
    assert refused.status_code == 503 and "limits.memory" in refused.json()["message"]
    assert "/sys/" not in refused.text


def test_the_server_says_what_it_enforces(server: ServerUnderTest) -> None:
    found = server.http.get("/v1/capabilities").json()
    assert found["available"] is True and found["controls"]["files"]["available"] is True
    assert "snapshots" in found["not_supported"]


def test_what_this_version_lacks_says_so(server: ServerUnderTest) -> None:
    for method, path in (
        ("POST", "/v1/sandboxes/x/snapshots"),
        ("GET", "/v1/snapshots"),
        ("GET", "/v1/templates"),
        ("GET", "/v1/pools"),
        ("GET", "/v1/sandboxes/x/diagnostics/logs"),
    ):
        answer = server.http.request(method, path)
        assert (answer.status_code, answer.json()["code"]) == (501, "NOT_SUPPORTED"), path
    assert server.http.post("/v1/metrics/events", json={"eventType": "x"}).status_code == 204
    assert server.http.get("/nothing").json()["code"] == "NOT_FOUND"


def test_the_register_shows_a_sandbox_and_kill_ends_it(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        stockade = [sys.executable, "-m", "stockade"]
        listed = subprocess.run(
            [*stockade, "ps", "--json"], env=server.environ, capture_output=True, text=True, check=True
        )
        assert box.id in listed.stdout
        record = next(line for line in listed.stdout.split("}") if box.id in line)
        register_id = record.split('"id": "')[1].split('"')[0]
        subprocess.run([*stockade, "kill", "--now", register_id], env=server.environ, check=True)
        wait_until(lambda: server.http.get(f"/v1/sandboxes/{box.id}").status_code == 404)
        assert not (server.home / "sandboxes" / box.id).exists()


def test_a_sandbox_whose_supervisor_was_killed_failed_and_can_be_deleted(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        os.kill(_supervisor(server, box.id), signal.SIGKILL)
        path = f"/v1/sandboxes/{box.id}"
        wait_until(lambda: server.http.get(path).json()["status"]["state"] == "Failed")
        status = server.http.get(path).json()["status"]
        assert status["reason"] == "SUPERVISOR_DIED" and "died" in status["message"]
        refused = box.execd.get("/ping")
        assert refused.status_code == 409 and refused.json().keys() == {"code", "message"}
        assert server.http.delete(path).status_code == 204
        assert not (server.home / "sandboxes" / box.id).exists()


def test_a_key_sees_only_its_own_sandboxes(server: ServerUnderTest) -> None:
    command = [sys.executable, "-m", "stockade", "serve", "--add-key", "other"]
    added = subprocess.run(command, env=server.environ, capture_output=True, text=True, check=True)
    key = added.stdout.strip()
    assert key not in "".join(path.read_text() for path in (server.home / "server").glob("*.json"))
    with (
        server.sandbox() as box,
        httpx.Client(base_url=server.url, headers={KEY_HEADER: key}, limits=LIMITS) as other,
    ):
        assert other.get("/v1/sandboxes").json()["items"] == []
        for method, path in (
            ("GET", ""), ("DELETE", ""), ("POST", "/pause"), ("GET", "/endpoints/44772"), ("GET", "/policy"),
            ("GET", "/receipts"), ("PATCH", "/metadata"), ("GET", "/networkpolicy"),
        ):  # fmt: skip
            answer = other.request(method, f"/v1/sandboxes/{box.id}{path}", json={})
            missing = other.request(method, f"/v1/sandboxes/{box.id[:-4]}0000{path}", json={})
            assert answer.status_code == 404 and answer.json() == missing.json(), path
        proxied = other.get(f"/sandboxes/{box.id}/proxy/44772/ping")
        assert proxied.status_code == 404
        assert box.execd.get("/ping").status_code == 200


def _supervisor(server: ServerUnderTest, id: str) -> int:
    import json

    return int(json.loads((server.home / "sandboxes" / id / "record.json").read_text())["supervisor"])


def test_a_request_can_write_clauses_of_its_policy(server: ServerUnderTest) -> None:
    with server.sandbox(policy={"limits": {"files": 64}, "syscalls": {"deny": ["ptrace"]}}) as box:
        shown = server.http.get(f"/v1/sandboxes/{box.id}/policy").json()["policy"]
        assert (shown["limits"]["files"], shown["syscalls"]["deny"]) == (64, ["ptrace"])
        answer = box.execd.post("/command", json={"command": "ulimit -n"})
        assert '"64"' in answer.text


@pytest.mark.parametrize(
    "policy", [{"read": ["/etc"]}, {"limits": {"taks": 1}}, {"syscalls": {"allow": ["bpf"]}}]
)
def test_a_request_cannot_write_clauses_about_the_host(
    server: ServerUnderTest, policy: dict[str, Any]
) -> None:
    body = {"image": {"uri": "host"}, "timeout": 60, "policy": policy}
    answer = server.http.post("/v1/sandboxes", json=body)
    assert answer.status_code == 400 and any(
        word in answer.json()["message"] for word in ("read", "taks", "allow")
    )


def test_a_field_that_does_not_exist_is_named(server: ServerUnderTest) -> None:
    answer = server.http.post("/v1/sandboxes", json={"image": {"uri": "host"}, "timout": 60})
    assert answer.status_code == 400 and "timout" in answer.json()["message"]
