"""Sandboxes outlive the server and the zygote, however these end; nothing of a half-made one stays."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.means import need_program
from support.paths import ROOT
from support.server import KEY_HEADER, ServerUnderTest, module_server, wait_until, zygote_of
from support.server_launcher import LaunchedServer

#: How often the server is killed under load.
KILLS = 50


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The server's process changes in these tests; the session's own check looks for what they leave."""


def _ids(server: ServerUnderTest) -> set[str]:
    items = server.http.get("/v1/sandboxes", params={"pageSize": 200}).json()["items"]
    return {item["id"] for item in items}


def test_a_session_goes_on_after_the_server_was_killed(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        made = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}}).json()
        run = f"/v1/isolated/session/{made['session_id']}/run"
        box.execd.post(run, json={"code": "x=41; echo new > file"})
        server.stop(signal.SIGKILL)
        server.start()
        assert server.http.get(f"/v1/sandboxes/{box.id}").json()["status"]["state"] == "Running"
        assert '"text":"42"' in box.execd.post(run, json={"code": "echo $((x + 1))"}).text
        changes = box.execd.get(
            f"/v1/isolated/session/{made['session_id']}/diff", params={"format": "json"}
        ).json()
        assert [one["path"] for one in changes["overlays"][0]["changes"]] == ["file"]
        assert box.execd.post(f"/v1/isolated/session/{made['session_id']}/commit").status_code == 200
        assert box.execd.get("/files/download", params={"path": "/workspace/file"}).text == "new\n"


def test_the_first_start_shows_a_key_once_and_a_state_directory_has_one_server(tmp_path: Path) -> None:
    server = ServerUnderTest(tmp_path)
    server.key = ""
    server.start()
    try:
        (line,) = (line for line in server.lines if "OPEN_SANDBOX_API_KEY" in line)
        answer = httpx.get(
            f"{server.url}/v1/sandboxes", headers={KEY_HEADER: line.strip().rpartition("=")[2]}
        )
        assert answer.json()["items"] == []
        second = subprocess.run(
            [sys.executable, "-m", "stockade", "serve", "--listen", "127.0.0.1:0"],
            env=server.environ, capture_output=True, text=True, check=False, timeout=60,
        )  # fmt: skip
        assert second.returncode == 125 and "another server already runs" in second.stderr
        server.stop()
        server.start()
        assert not any("OPEN_SANDBOX_API_KEY" in line for line in server.lines)
    finally:
        server.stop()


def test_the_systemd_unit_is_valid_and_spares_the_sandboxes(tmp_path: Path) -> None:
    analyse = need_program("systemd-analyze")
    unit = ROOT / "docs" / "reference" / "stockade.service"
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    checked = subprocess.run(
        [analyse, "verify", "--user", unit], env=environ, capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "\nKillMode=process\n" in unit.read_text()


def test_sigterm_ends_the_server_and_no_sandbox(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        supervisor = _record(server, box.id)["supervisor"]
        server.stop(signal.SIGTERM)
        assert Path(f"/proc/{supervisor}").exists()
        server.start()
        assert box.execd.get("/ping").status_code == 200


def test_a_killed_zygote_is_started_again(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        os.kill(zygote_of(server), signal.SIGKILL)
        with server.sandbox() as other:
            assert other.execd.get("/ping").status_code == 200
        assert box.execd.get("/ping").status_code == 200


def test_an_idempotency_key_survives_the_server(server: ServerUnderTest) -> None:
    headers, body = {"Idempotency-Key": "once"}, {"image": {"uri": "host"}, "timeout": 60}
    first = server.http.post("/v1/sandboxes", json=body, headers=headers).json()
    server.stop(signal.SIGKILL)
    server.start()
    again = server.http.post("/v1/sandboxes", json=body, headers=headers).json()
    assert again["id"] == first["id"]
    server.http.delete(f"/v1/sandboxes/{first['id']}")


def test_a_create_that_is_slower_than_the_servers_restart_is_found(server: ServerUnderTest) -> None:
    headers, body = {"Idempotency-Key": "slow"}, {"image": {"uri": "host"}, "timeout": 60}

    def create() -> httpx.Response:
        return httpx.post(
            f"{server.url}/v1/sandboxes", json=body, headers={KEY_HEADER: server.key, **headers}, timeout=60
        )

    with ThreadPoolExecutor(1) as pool:
        made, supervisor, asked = _half_made(server, lambda: pool.submit(create))
        try:
            server.stop(signal.SIGKILL)
            assert isinstance(asked.exception(), httpx.HTTPError)
            server.start()
        finally:
            os.kill(supervisor, signal.SIGCONT)
    again = server.http.post("/v1/sandboxes", json=body, headers=headers).json()
    assert again["id"] == made.name
    assert server.http.delete(f"/v1/sandboxes/{made.name}").status_code == 204
    assert not made.exists()


def test_a_supervisor_that_dies_while_it_opens_its_sandbox_leaves_nothing(server: ServerUnderTest) -> None:
    with ThreadPoolExecutor(1) as pool:
        made, supervisor, asked = _half_made(server, lambda: pool.submit(server.create))
        os.kill(supervisor, signal.SIGKILL)
        assert asked.result().status_code == 500
    wait_until(lambda: not made.exists())


def _half_made(
    server: ServerUnderTest, ask: Callable[[], Future[httpx.Response]]
) -> tuple[Path, int, Future[httpx.Response]]:
    """Ask for a sandbox, and stop its supervisor before that has written a record; return it stopped."""
    root = server.home / "sandboxes"
    for _ in range(50):
        before = set(root.iterdir())
        asked = ask()
        made, supervisor = _stop_new_supervisor(root, before)
        if not (made / "record.json").exists():
            return made, supervisor, asked
        os.kill(supervisor, signal.SIGCONT)  # it was quicker: the next one
        assert server.http.delete(f"/v1/sandboxes/{asked.result().json()['id']}").status_code == 204
    raise AssertionError("every supervisor was quicker than this test")


def _stop_new_supervisor(root: Path, before: set[Path]) -> tuple[Path, int]:
    """Stop the supervisor that makes a new directory, soon after it holds the lock."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        for path in set(root.iterdir()) - before:
            with contextlib.suppress(FileNotFoundError):
                inode = (path / "lock").stat().st_ino
                for line in Path("/proc/locks").read_text().splitlines():
                    fields = line.split()
                    if fields[5].rpartition(":")[2] == str(inode):
                        pid = int(fields[4])
                        os.kill(pid, signal.SIGSTOP)
                        wait_until(lambda: " T " in Path(f"/proc/{pid}/stat").read_text())  # noqa: B023
                        return path, pid
    raise AssertionError("no supervisor began")


def test_a_failed_sandbox_goes_when_its_time_is_over(server: ServerUnderTest) -> None:
    id = server.create(timeout=2).json()["id"]
    os.kill(_record(server, id)["supervisor"], signal.SIGKILL)
    wait_until(lambda: server.http.get(f"/v1/sandboxes/{id}").json()["status"]["state"] == "Failed")
    time.sleep(2)
    server.stop()
    server.start()  # the first thing that it does, and then every half minute
    wait_until(lambda: server.http.get(f"/v1/sandboxes/{id}").status_code == 404)
    assert not (server.home / "sandboxes" / id).exists()


def test_what_a_dead_create_left_is_swept_at_the_next_start(server: ServerUnderTest) -> None:
    server.stop()
    left = server.home / "sandboxes" / str(uuid.uuid4())
    (left / "tree" / "tmp").mkdir(parents=True)
    (left / "lock").touch()
    server.start()
    assert not left.exists()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[LaunchedServer]:
    server = LaunchedServer(tmp_path)
    server.start()
    yield server
    server.close()


def test_fifty_kills_under_load_lose_and_orphan_nothing(launched: LaunchedServer) -> None:
    server = launched
    with server.sandbox() as box:
        made = box.execd.post("/v1/isolated/session", json={"workspace": {"path": "/workspace"}}).json()
        session = f"/v1/isolated/session/{made['session_id']}"
        box.execd.post(f"{session}/run", json={"code": "x=41; echo new > file"})
        stop = threading.Event()
        threads = [threading.Thread(target=_load, args=(server, box.id, box.token, stop)) for _ in range(3)]
        for thread in threads:
            thread.start()
        chance = random.Random(7)
        try:
            for _ in range(KILLS):
                time.sleep(chance.uniform(0, 0.2))
                server.stop(signal.SIGKILL)
                server.start()
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert '"text":"42"' in box.execd.post(f"{session}/run", json={"code": "echo $((x + 1))"}).text
        assert box.execd.post(f"{session}/commit").json()["overlays"][0]["changes"][0]["path"] == "file"
        # Every supervisor that lives is of a sandbox that the server lists, and the other way round.
        wait_until(lambda: _supervisors(server) == _ids(server))
        for id in _ids(server) - {box.id}:
            assert server.http.delete(f"/v1/sandboxes/{id}").status_code == 204
    wait_until(lambda: not _supervisors(server))
    assert os.listdir(server.home / "sandboxes") == []


def _load(server: ServerUnderTest, id: str, token: str, stop: threading.Event) -> None:
    """Make and delete sandboxes, and run commands, whatever becomes of the server meanwhile."""
    url, headers = server.url, {KEY_HEADER: server.key}
    with httpx.Client(base_url=url, headers=headers, timeout=20) as client:
        while not stop.is_set():
            try:
                client.post(f"/sandboxes/{id}/proxy/44772/command", json={"command": "echo hi"})
                made = client.post("/v1/sandboxes", json={"image": {"uri": "host"}, "timeout": 300})
                if made.status_code == 202:
                    client.delete(f"/v1/sandboxes/{made.json()['id']}")
            except httpx.HTTPError:
                time.sleep(0.01)


def _record(server: ServerUnderTest, id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((server.home / "sandboxes" / id / "record.json").read_text())
    return found


def _supervisors(server: ServerUnderTest) -> set[str]:
    """The sandboxes of all supervisors of this server that live, by their locks."""
    held = set()
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        held.add(fields[5].rpartition(":")[2])
    found = set()
    for path in (server.home / "sandboxes").iterdir():
        try:
            inode = (path / "lock").stat().st_ino
        except FileNotFoundError:
            continue
        if str(inode) in held:
            found.add(path.name)
    return found
