"""Faults of the machine: a full disk, a lack of descriptors or processes, killed processes, raced calls."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.event_streams import command
from support.isolated import SessionUnderTest, create
from support.server import ServedSandbox, ServerUnderTest, module_server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


def _hinder_records(box: ServedSandbox) -> Path:
    """Let the supervisor fail whenever it writes its record, as on a full disk; return the directory."""
    directory = box.server.home / "sandboxes" / box.id
    (directory / "record.json.new").mkdir()
    return directory


def test_a_sandbox_whose_record_cannot_be_written_can_be_used_and_deleted(server: ServerUnderTest) -> None:
    with server.sandbox(extensions={"access.renew.extend.seconds": "1200"}) as box:
        directory = _hinder_records(box)
        assert command(box.execd, "echo on").texts() == ["on\n"]
        assert server.http.delete(f"/v1/sandboxes/{box.id}").status_code == 204
        assert not directory.exists()


def test_a_sandbox_whose_record_cannot_be_written_expires(server: ServerUnderTest) -> None:
    with server.sandbox(timeout=1) as box:
        directory = _hinder_records(box)
        wait_until(lambda: not directory.exists())


def test_a_pause_that_cannot_be_recorded_stops_nothing(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        _hinder_records(box)
        assert server.http.post(f"/v1/sandboxes/{box.id}/pause").status_code >= 400
        assert command(box.execd, "echo on").texts() == ["on\n"]


def _session(box: ServedSandbox) -> SessionUnderTest:
    return SessionUnderTest(box, create(box).json()["session_id"])


def test_a_session_that_is_deleted_during_a_reset_leaves_nothing(server: ServerUnderTest) -> None:
    with server.sandbox() as box, ThreadPoolExecutor(1) as pool:
        for attempt in range(6):
            session = _session(box)
            reset = pool.submit(session.http.post, f"{session.path}/reset")
            time.sleep(0.006 * attempt)
            session.delete()
            assert reset.result().status_code in (200, 404, 409)
        assert list((server.home / "workspaces").iterdir()) == []
        assert server.http.post(f"/v1/sandboxes/{box.id}/pause").status_code == 202  # it knows no dead one


def test_a_sandbox_is_paused_and_resumed_while_sessions_end(server: ServerUnderTest) -> None:
    with server.sandbox() as box, ThreadPoolExecutor(2) as pool:
        for _ in range(8):
            session = _session(box)
            ending = pool.submit(session.http.post, f"{session.path}/reset")
            deleting = pool.submit(_session(box).delete)
            answers = [server.http.post(f"/v1/sandboxes/{box.id}/{call}") for call in ("pause", "resume") * 2]
            assert [answer.status_code for answer in answers] == [202] * 4, answers[-1].text
            ending.result()
            with contextlib.suppress(AssertionError):  # a paused sandbox takes no call
                deleting.result()


def test_a_session_that_is_deleted_during_a_commit_is_committed_whole_or_not_at_all(
    server: ServerUnderTest,
) -> None:
    with server.sandbox() as box, ThreadPoolExecutor(1) as pool:
        session = _session(box)
        session.text("for n in $(seq 300); do echo > $n; done")
        commit = pool.submit(session.commit)
        time.sleep(0.05)
        session.delete()
        status, (count,) = commit.result().status_code, command(box.execd, "ls /workspace | wc -l").texts()
        assert (status, count.strip()) in ((200, "300"), (404, "0"), (409, "0"))


def test_what_a_dead_supervisor_left_can_be_deleted_by_several_at_once(server: ServerUnderTest) -> None:
    with server.sandbox() as box, ThreadPoolExecutor(4) as pool:
        command(box.execd, "cd /data; for n in $(seq 500); do echo > $n; done")
        directory = server.home / "sandboxes" / box.id
        os.kill(json.loads((directory / "record.json").read_text())["supervisor"], signal.SIGKILL)
        path = f"/v1/sandboxes/{box.id}"
        wait_until(lambda: server.http.get(path).json()["status"]["state"] == "Failed")
        answers = pool.map(lambda _: server.http.delete(path).status_code, range(4))
        assert set(answers) <= {204, 404}
        assert not directory.exists()
