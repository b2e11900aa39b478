"""A policy above the user's directory shows more than that directory only if it is the user's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stockade.errors import PolicyError
from stockade.resolve.discovery import discover

ANOTHER = os.getuid() + 1


class SharedDirectory:
    """A directory for a team, with a repository's mark and a policy, and a directory of the user in it."""

    def __init__(self, root: Path) -> None:
        self.home, self.team = root / "home", root / "team"
        self.mine = self.team / "mine" / "project"
        self.mine.mkdir(parents=True)
        self.home.mkdir()
        (self.team / ".git").mkdir()
        (self.team / ".git/HEAD").write_text("ref: refs/heads/main\n")
        (self.team / "stockade.toml").write_text('workspace = "."\n')
        self.environ = {"STOCKADE_HOME": str(root / "state")}

    def workspace(self) -> str:
        found = discover(str(self.mine), self.environ, str(self.home), workspace=str(self.mine)).policy
        return "" if found.workspace is None else found.workspace.path


@pytest.fixture
def shared(tmp_path: Path) -> SharedDirectory:
    return SharedDirectory(tmp_path)


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a path to another user: for real as root, and otherwise by what `lstat` says about it."""
    if os.geteuid() == 0:
        os.chown(path, ANOTHER, ANOTHER)
        return
    real = os.lstat

    def lstat(name: str) -> os.stat_result:
        info = real(name)
        fields = list(info)
        fields[4] = ANOTHER if name == str(path) else info.st_uid
        return os.stat_result(fields)

    monkeypatch.setattr(os, "lstat", lstat)


def test_the_users_own_repository_is_the_workspace(shared: SharedDirectory) -> None:
    assert shared.workspace() == str(shared.team)


@pytest.mark.parametrize("name", ["", ".git", "stockade.toml"])
def test_another_user_who_wrote_it_above_shows_nothing_more(
    shared: SharedDirectory, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_away(shared.team / name, monkeypatch)
    with pytest.raises(PolicyError, match=f"asks for {shared.team} as the workspace") as caught:
        shared.workspace()
    assert "-w ." in caught.value.hint
