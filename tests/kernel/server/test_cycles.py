"""Sandboxes and sessions that come and go leave descriptors, memory, processes and the disk as they were."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import ServedSandbox, ServerUnderTest, module_server, zygote_of

SESSION = "/v1/isolated/session"
#: How many sessions come and go, and a fifth as many sandboxes. A thousand take a minute or more.
CYCLES = int(os.environ.get("STOCKADE_CYCLES", "60"))
#: What may be under way at a moment: a connection, a file of a call.
SPARE = 3
#: What the allocator may keep, however many there were.
SPARE_BYTES = 8 << 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def memory(pid: int) -> int:
    """The bytes that a process shares with no file."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) << 10


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

        def found() -> tuple[Any, ...]:
            return tuple(files(server.home / name) for name in ("sandboxes", "run", "workspaces"))

        for _ in range(20):
            cycle_session(box)
        pid = json.loads((server.home / "sandboxes" / box.id / "record.json").read_text())["supervisor"]
        before, open_before, memory_before = found(), descriptors(pid), memory(pid)
        for _ in range(CYCLES):
            cycle_session(box)
        assert found() == before
        assert descriptors(pid) <= open_before + SPARE
        assert memory(pid) <= memory_before + SPARE_BYTES
        assert box.execd.get("/v1/isolated/sessions").json() == {"sessions": []}


def test_sandboxes_that_come_and_go_leave_the_server_and_its_zygote_as_they_were(
    server: ServerUnderTest,
) -> None:
    assert server.process is not None
    pids = server.process.pid, zygote_of(server)
    for _ in range(5):
        with server.sandbox():
            pass
    before = [(descriptors(pid), memory(pid)) for pid in pids]
    for _ in range(CYCLES // 5):
        with server.sandbox():
            pass
    for pid, (open_before, memory_before) in zip(pids, before, strict=True):
        assert descriptors(pid) <= open_before + SPARE
        assert memory(pid) <= memory_before + SPARE_BYTES
    for name in ("sandboxes", "workspaces"):
        assert list((server.home / name).iterdir()) == []
