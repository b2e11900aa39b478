"""Faults of the machine: a full disk, a lack of descriptors or processes, killed processes, raced calls."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.event_streams import command
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
