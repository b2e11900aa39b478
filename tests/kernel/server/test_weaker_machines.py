"""Servers where something is missing: user namespaces, or other users than root inside."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.means import applies, need_program
from support.server import ServedSandbox, ServerUnderTest, module_server

#: A user namespace in which no further one can be made, as on machines that switch them off.
WITHOUT_NAMESPACES = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$@"'


def test_without_namespaces_a_create_is_a_503_with_the_reason(tmp_path: Path) -> None:
    server = ServerUnderTest(tmp_path)
    unshare = need_program("unshare")
    server.prefix = (unshare, "--user", "--map-root-user", "sh", "-c", WITHOUT_NAMESPACES, "sh")
    server.start()
    try:
        warning = "\n".join(server.lines)
        assert "cannot make a sandbox" in warning and "user.max_user_namespaces" in warning
        # Nobody is told to do without walls.
        assert "accept" not in warning
        refused = server.create()
        told = refused.json()
        assert (refused.status_code, told["code"]) == (503, "SERVICE_UNAVAILABLE")
        assert "user.max_user_namespaces=0" in told["message"] and "accept" not in told["message"]
        found = server.http.get("/v1/capabilities").json()
        assert found["available"] is False and "namespaces" in found["controls"]["files"]["reason"]
        assert os.listdir(server.home / "sandboxes") == []
    finally:
        server.close()


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedSandbox]:
    """A sandbox of an ordinary user without subordinate ids: the programs that map them are not found."""
    applies(os.geteuid() != 0, "root needs no subordinate ids")
    servers = module_server(tmp_path_factory, environ={"PATH": "/nowhere"})
    server = next(servers)
    assert server.http.get("/v1/capabilities").json()["several_ids"] is False
    with server.sandbox() as found:
        yield found
    next(servers, None)


def test_without_subordinate_ids_a_chown_says_what_is_missing(box: ServedSandbox) -> None:
    box.execd.post("/command", json={"command": "touch file"})
    to_other = box.execd.post("/files/permissions", json={"/workspace/file": {"owner": "nobody"}})
    assert (to_other.status_code, to_other.json()["code"]) == (403, "DENIED")
    assert "/etc/subuid" in to_other.json()["message"]
    told = json.dumps({"path": "/workspace/other", "owner": "1000"}).encode()
    parts = [("metadata", ("m", told)), ("file", ("f", b"content"))]
    assert "/etc/subuid" in box.execd.post("/files/upload", files=parts).json()["message"]
    to_root = box.execd.post("/files/permissions", json={"/workspace/file": {"owner": "root", "mode": 600}})
    assert to_root.status_code == 200


def test_without_subordinate_ids_no_call_takes_another_user(box: ServedSandbox) -> None:
    workspace = {"workspace": {"path": "/workspace"}}
    for answer in (
        box.execd.post("/command", json={"command": "id", "uid": 1000}),
        box.execd.post("/v1/isolated/session", json={**workspace, "uid": 1000, "gid": 1000}),
        box.execd.get("/v1/filesystem/1000/1000/files/info", params={"path": "/workspace"}),
    ):
        assert answer.status_code == 400, answer.text
        assert answer.json()["message"] == "uid: 1000 cannot be used here: newuidmap is not installed"
    assert box.execd.get("/v1/isolated/capabilities").json()["setpriv_available"] is False


def test_without_subordinate_ids_everything_else_works(box: ServedSandbox) -> None:
    made = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}, "uid": 0})
    session = f"/v1/isolated/session/{made.json()['session_id']}"
    assert '"text":"0"' in box.execd.post(f"{session}/run", json={"code": "id -u; echo new > new"}).text
    assert box.execd.post(f"{session}/commit").status_code == 200
    assert box.execd.get("/files/download", params={"path": "new"}).text == "new\n"
