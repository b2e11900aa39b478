"""Sandboxes and sessions that come and go leave descriptors, processes and the disk as they were."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import ServedSandbox, ServerUnderTest, module_server

SESSION = "/v1/isolated/session"
#: What may be under way at a moment: a connection, a file of a call.
SPARE = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def files(top: Path) -> int:
    return sum(len(directories) + len(names) for _, directories, names in os.walk(top))


def cycle_session(box: ServedSandbox) -> None:
    answer = box.execd.post(SESSION, json={"workspace": {"path": "/workspace"}})
    assert answer.status_code == 201, answer.text
    path = f"{SESSION}/{answer.json()['session_id']}"
    assert box.execd.post(f"{path}/run", json={"code": "echo x > file"}).status_code == 200
    assert box.execd.delete(path).status_code == 200


def test_sessions_that_come_and_go_leave_the_supervisor_as_it_was(server: ServerUnderTest) -> None:
    with server.sandbox() as box:
        for _ in range(5):
            cycle_session(box)
        found = re.search(
            r'"supervisor":\s*(\d+)', (server.home / "sandboxes" / box.id / "record.json").read_text()
        )
        assert found is not None
        pid = int(found[1])
        before = descriptors(pid), files(server.home / "sandboxes"), files(server.home / "run")
        for _ in range(40):
            cycle_session(box)
        after = descriptors(pid), files(server.home / "sandboxes"), files(server.home / "run")
        assert after[0] <= before[0] + SPARE and after[1:] == before[1:]
        assert box.execd.get("/v1/isolated/sessions").json() == {"sessions": []}


def test_sandboxes_that_come_and_go_leave_the_server_as_it_was(server: ServerUnderTest) -> None:
    assert server.process is not None
    for _ in range(3):
        with server.sandbox():
            pass
    before = descriptors(server.process.pid)
    for _ in range(15):
        with server.sandbox():
            pass
    assert descriptors(server.process.pid) <= before + SPARE
    assert list((server.home / "sandboxes").iterdir()) == []
    assert list((server.home / "workspaces").glob("*")) == []
