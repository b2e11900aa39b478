"""What lies above the user's directory shows more than that directory only if the user has agreed to it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stockade.errors import PolicyError
from stockade.resolve import trust
from stockade.resolve.discovery import discover, find_project
from support.means import need_program

POLICY = '[workspace]\npath = "."\n'
MARK = {".git/HEAD": "ref: refs/heads/main\n"}


class Downloads:
    """A directory of the user's with files, in which they extract an archive and work in a part of it."""

    def __init__(self, root: Path) -> None:
        self.home, self.top = root / "home", root / "home" / "downloads"
        self.here = self.top / "thing" / "src"
        self.here.mkdir(parents=True)
        (self.top / "taxes.txt").write_text("secret\n")
        self.state = root / "state"

    def extract(self, files: dict[str, str]) -> None:
        """Write the files of an archive, as tar does for the user who owns the directory."""
        for name, text in files.items():
            (self.top / name).parent.mkdir(exist_ok=True)
            (self.top / name).write_text(text)

    def trust(self) -> None:
        project = find_project(str(self.top), str(self.home))
        assert project is not None
        found = project.lookups(str(self.home), str(self.top), {})
        trust.record(project, found, str(self.state))

    def workspace(self) -> str:
        environ = {"STOCKADE_HOME": str(self.state)}
        found = discover(str(self.here), environ, str(self.home), workspace=str(self.here)).policy
        return "" if found.workspace is None else found.workspace.path


@pytest.fixture
def downloads(tmp_path: Path) -> Downloads:
    return Downloads(tmp_path)


ARCHIVES = {
    "a policy": {"stockade.toml": 'workspace = "./"\n'},
    "a policy and git's mark": {"stockade.toml": POLICY, **MARK},
    "a policy of pyproject.toml": {"pyproject.toml": "[tool.stockade]\nworkspace = '.'\n", **MARK},
    "a policy and a worktree's mark": {"stockade.toml": POLICY, ".git": "gitdir: thing/.git\n"},
}


@pytest.mark.parametrize("name", ARCHIVES)
def test_an_archive_does_not_widen_a_run_in_a_part_of_it(downloads: Downloads, name: str) -> None:
    downloads.extract(ARCHIVES[name])
    with pytest.raises(PolicyError, match=f"asks for {downloads.top} as the workspace") as caught:
        downloads.workspace()
    assert "stockade trust" in caught.value.hint and "-w ." in caught.value.hint


def test_a_whole_repository_does_not_either(downloads: Downloads) -> None:
    """An archive can hold every byte of one, so nothing in it tells the user's from another's."""
    need_program("git")
    subprocess.run(["git", "init", "-q", str(downloads.top)], check=True)
    downloads.extract(ARCHIVES["a policy"])
    with pytest.raises(PolicyError, match="as the workspace"):
        downloads.workspace()


def test_the_users_trust_widens_it(downloads: Downloads) -> None:
    downloads.extract(ARCHIVES["a policy and git's mark"])
    downloads.trust()
    assert downloads.workspace() == str(downloads.top)


def test_the_agreed_directory_outlasts_a_change_of_the_file(downloads: Downloads) -> None:
    downloads.extract({"stockade.toml": POLICY})
    downloads.trust()
    downloads.extract({"stockade.toml": f"{POLICY}[limits]\nwall = '5s'\n"})
    assert downloads.workspace() == str(downloads.top)
    downloads.extract({"stockade.toml": f"net = 'open'\n{POLICY}"})
    with pytest.raises(PolicyError, match="has changed since you trusted it, and asks for more"):
        downloads.workspace()


def test_trust_in_a_file_without_a_workspace_agrees_to_no_directory(downloads: Downloads) -> None:
    downloads.extract({"stockade.toml": "net = 'open'\n"})
    downloads.trust()
    downloads.extract({"stockade.toml": POLICY})
    with pytest.raises(PolicyError, match="as the workspace"):
        downloads.workspace()


def test_trust_in_another_directory_of_the_file_does_not_count(downloads: Downloads) -> None:
    downloads.extract({"stockade.toml": '[workspace]\npath = "./thing"\n'})
    downloads.trust()
    downloads.extract({"stockade.toml": POLICY})
    with pytest.raises(PolicyError, match="as the workspace"):
        downloads.workspace()
