"""The directories of the server's sandboxes."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

import pytest

from stockade.errors import SetupError
from stockade.server import directory as server_directory
from stockade.server.directory import make_directory, remove_directory, sandboxes_root, survey
from stockade.server.record import ServerRecord, is_id, now, read_record, write_record


def _record(id: str) -> ServerRecord:
    return ServerRecord(id=id, owner="one", token="t", created_at=now(), image="host")


def _made(root: str, id: str) -> None:
    directory, lock = make_directory(root, id)
    write_record(directory, _record(id))
    os.close(directory)
    os.close(lock)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    id = str(uuid.uuid4())
    directory, lock = make_directory(str(tmp_path), id)
    try:
        assert read_record(directory) is None
        write_record(directory, _record(id))
        found = read_record(directory)
        assert found is not None and found.id == id
        assert os.stat("record.json", dir_fd=directory).st_mode & 0o777 == 0o600
    finally:
        os.close(directory)
        os.close(lock)


def test_a_survey_finds_records_and_removes_what_dead_creates_left(tmp_path: Path) -> None:
    whole, half, other = str(uuid.uuid4()), str(uuid.uuid4()), tmp_path / "notes"
    _made(str(tmp_path), whole)
    (tmp_path / half).mkdir()
    old = time.time() - 60
    os.utime(tmp_path / half, (old, old))
    other.mkdir()
    found = survey(str(tmp_path))
    assert list(found) == [whole] and found[whole][1] is False
    assert not (tmp_path / half).exists() and other.exists()


def test_a_survey_goes_on_after_something_that_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, whole = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
    _made(str(tmp_path), whole)
    (tmp_path / half).mkdir()
    (tmp_path / half / "lock").touch()

    def refuse(root: str, id: str) -> None:
        raise SetupError(f"cannot remove {root}/{id}", stage="environment")

    monkeypatch.setattr(server_directory, "remove_directory", refuse)
    assert list(survey(str(tmp_path))) == [whole]


def test_a_directory_that_was_just_made_is_left_to_its_maker(tmp_path: Path) -> None:
    id = str(uuid.uuid4())
    (tmp_path / id).mkdir()
    assert survey(str(tmp_path)) == {id: (None, True)}
    assert len(list(tmp_path.iterdir())) == 1


def test_a_removal_can_be_repeated(tmp_path: Path) -> None:
    id = str(uuid.uuid4())
    _made(str(tmp_path), id)
    remove_directory(str(tmp_path), id)
    remove_directory(str(tmp_path), id)
    assert list(tmp_path.iterdir()) == []


def test_sandboxes_can_lie_elsewhere_but_only_in_private(tmp_path: Path) -> None:
    home, elsewhere = str(tmp_path / "state"), tmp_path / "srv"
    assert sandboxes_root(home, "") == f"{home}/sandboxes"
    assert sandboxes_root(home, str(elsewhere)) == str(elsewhere)
    elsewhere.chmod(0o755)
    with pytest.raises(SetupError, match="open to others"):
        sandboxes_root(home, str(elsewhere))


@pytest.mark.parametrize("text", ["", "x", "../..", "{8a0e6a0e-5d35-4b0e-9b1c-9f1b1f0b6a11}", "8A0E6A0E" * 4])
def test_only_one_spelling_is_an_id(text: str) -> None:
    assert not is_id(text)
