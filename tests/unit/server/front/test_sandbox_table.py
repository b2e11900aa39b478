"""The server's table of sandboxes, whose supervisors are dead here."""

from __future__ import annotations

import asyncio
import os
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from stockade.errors import SetupError
from stockade.server.directory import DirectoryState, make_directory, remove_directory
from stockade.server.front import sandbox_table
from stockade.server.front.sandbox_table import SandboxTable
from stockade.server.record import ServerRecord, now, write_record
from stockade.server.wire.errors import ApiError


def _record(id: str, seconds: int) -> ServerRecord:
    """A record of a sandbox that expires in so many seconds."""
    at = now() + timedelta(seconds=seconds)
    return ServerRecord(id=id, owner="me", token="t", created_at=now(), image="host", expires_at=at)


class _StubbornTable(SandboxTable):
    """A table whose sandboxes cannot be removed; it counts the attempts."""

    attempts = 0

    def _clean_up(self, id: str) -> None:
        self.attempts += 1
        raise SetupError(f"cannot remove {id}", stage="environment")


def test_a_sandbox_that_cannot_be_removed_does_not_end_the_housekeeping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_table, "HOUSEKEEPING", 0.01)
    id = str(uuid.uuid4())
    directory, lock = make_directory(str(tmp_path), id)
    write_record(directory, _record(id, -1))
    for descriptor in (directory, lock):
        os.close(descriptor)

    async def keep_house() -> int:
        table = _StubbornTable(str(tmp_path), str(tmp_path / "state"))
        table.start()
        await asyncio.sleep(0.3)
        table.stop()
        return table.attempts

    assert asyncio.run(keep_house()) > 1


def test_a_failed_sandbox_stays_until_the_expiry_that_its_supervisor_wrote_last(tmp_path: Path) -> None:
    id = str(uuid.uuid4())
    directory, lock = make_directory(str(tmp_path), id)
    os.close(lock)

    async def keep_house() -> None:
        write_record(directory, _record(id, -1))
        table = SandboxTable(str(tmp_path), str(tmp_path / "state"))
        table.start()
        write_record(directory, _record(id, 60))  # before the first look
        await asyncio.sleep(0.2)
        assert [known.record.id for known in table.all()] == [id]
        table.stop()

    asyncio.run(keep_house())
    os.close(directory)
    assert (tmp_path / id).exists()


def test_a_sandbox_that_ends_while_the_server_finds_it_is_not_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its supervisor removes its directory then, and the server starts all the same."""
    id, other = str(uuid.uuid4()), str(uuid.uuid4())
    for one in (id, other):
        for descriptor in make_directory(str(tmp_path), one):
            os.close(descriptor)
    found = {one: DirectoryState(_record(one, 60), lives=False) for one in (id, other)}
    monkeypatch.setattr(sandbox_table, "survey", lambda root: found)
    remove_directory(str(tmp_path), id)

    async def find() -> list[str]:
        table = SandboxTable(str(tmp_path), str(tmp_path / "state"))
        table.start()
        known = [one.record.id for one in table.all()]
        with pytest.raises(ApiError, match="ended as soon as it had begun"):
            table.discover(id)
        table.stop()
        return known

    assert asyncio.run(find()) == [other]
