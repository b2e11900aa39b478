"""The recipes for tox, nox and pre-commit, as the page shows them, run by these tools."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from support import wheelhouse
from support.means import applies, need_program
from support.paths import ROOT
from support.wheel import call

applies(os.geteuid() != 0, "these tools do the same for everybody, and the ordinary user runs them")

PAGE = ROOT / "docs/how-to/test-runners.md"
BIN = Path(sysconfig.get_path("scripts"))
REPOSITORY = "https://example.com/stockade"

#: A test that fails outside of a sandbox, or in one that lacks the packages of the runner's environment.
TEST = """
import errno, pathlib, socket
import pytest

def test_behind_walls():
    assert pytest.__file__.startswith(str(pathlib.Path(".").resolve()))
    assert not pathlib.Path("~/secret").expanduser().exists()
    pathlib.Path("written").write_text("by a test")
    with socket.socket() as client:
        assert client.connect_ex(("192.0.2.1", 443)) == errno.ENETUNREACH
"""
CHECK = """
import pathlib, sys
pathlib.Path("written").write_text("by a checker")
if pathlib.Path("~/secret").expanduser().exists():
    sys.exit("it is not in a sandbox")
sys.exit(any("bad" in pathlib.Path(name).read_text() for name in sys.argv[1:]))
"""
FIX = """
import pathlib, sys
import iniconfig
for path in map(pathlib.Path, sys.argv[1:]):
    path.write_text(path.read_text().replace("bad", "good"))
pathlib.Path(".git/hooks/post-commit").write_text("#!/bin/sh\\ntouch planted\\n")
"""


def recipe(name: str) -> str:
    """The text of a file that the page shows."""
    (text,) = re.findall(rf"<!-- file: {re.escape(name)} -->\n```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return str(text)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = (*wheelhouse.STOCKADE, "pytest")
    return wheelhouse.fill(tmp_path_factory.mktemp("wheels"), names)


@pytest.fixture
def environment(wheels: Path, tmp_path: Path) -> dict[str, str]:
    """A user's home with a secret, in which nothing is fetched and the command is on the PATH."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home/secret").write_text("a key\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/stockade").symlink_to(BIN / "stockade")
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    who = {"GIT_AUTHOR_NAME": "Ada", "GIT_AUTHOR_EMAIL": "a@example.com"}
    who |= {"GIT_COMMITTER_NAME": "Ada", "GIT_COMMITTER_EMAIL": "a@example.com"}
    return {"HOME": f"{tmp_path}/home", "PATH": path, "TMPDIR": f"{tmp_path}/home", **offline, **who}


@pytest.mark.parametrize(("tool", "file"), [("tox", "tox.ini"), ("nox", "noxfile.py")])
def test_tests_run_behind_walls(
    tool: str, file: str, workspace: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    (workspace / file).write_text(recipe(file))
    (workspace / "test_it.py").write_text(TEST)
    done = call([sys.executable, "-m", tool], **environment)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
    assert not (workspace / "written").exists()


class TestPreCommit:
    """Both hooks of the repository, and a local one."""

    @pytest.fixture
    def project(self, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A repository with a checker, a formatter and something to complain about."""
        git = need_program("git")
        (workspace / "tools").mkdir()
        (workspace / "tools/check.py").write_text(CHECK)
        (workspace / "tools/fix.py").write_text(FIX)
        (workspace / "notes.txt").write_text("bad\n")
        monkeypatch.chdir(workspace)
        assert call([git, "init", "-q"]).returncode == 0
        return workspace

    def committed(self, directory: Path, environment: dict[str, str], *command: str) -> CompletedProcess[str]:
        git = ["git", "-C", str(directory)]
        assert call([*git, "add", "-A"], **environment).returncode == 0
        return call([*git, *command], **environment)

    def test_the_hooks_of_the_repository(
        self, project: Path, dist: Path, tmp_path: Path, environment: dict[str, str]
    ) -> None:
        (archive,) = dist.glob("*.tar.gz")
        shutil.unpack_archive(archive, tmp_path)
        repository = tmp_path / archive.name.removesuffix(".tar.gz")
        shutil.copy(ROOT / ".pre-commit-hooks.yaml", repository)
        call(["git", "-C", str(repository), "init", "-q"])
        assert self.committed(repository, environment, "commit", "-qm", "0.1.0").returncode == 0
        assert call(["git", "-C", str(repository), "tag", "v0.1.0"]).returncode == 0
        text = recipe(".pre-commit-config.yaml")
        assert REPOSITORY in text
        (project / ".pre-commit-config.yaml").write_text(text.replace(REPOSITORY, str(repository)))

        pre_commit = [sys.executable, "-m", "pre_commit"]
        assert call([*pre_commit, "install"], **environment).returncode == 0
        refused = self.committed(project, environment, "commit", "-qm", "first")
        assert refused.returncode == 1, refused.stdout
        assert refused.stdout.count("Failed\n") == 2, refused.stdout
        assert "held back: .git/hooks/post-commit" in refused.stdout
        assert (project / "notes.txt").read_text() == "good\n"
        accepted = self.committed(project, environment, "commit", "-qm", "second")
        assert accepted.returncode == 0, accepted.stdout
        assert not (project / "written").exists() and not (project / "planted").exists()

    def test_a_local_hook(self, project: Path, environment: dict[str, str]) -> None:
        (project / ".pre-commit-config.yaml").write_text(recipe("local.yaml"))
        assert self.committed(project, environment, "status").returncode == 0
        pre_commit = [sys.executable, "-m", "pre_commit", "run"]
        failed = call(pre_commit, **environment)
        assert failed.returncode == 1 and "- exit code: 1\n" in failed.stdout, failed.stdout
        (project / "notes.txt").write_text("good\n")
        assert self.committed(project, environment, "status").returncode == 0
        passed = call(pre_commit, **environment)
        assert passed.returncode == 0 and "Passed" in passed.stdout, passed.stdout
        assert not (project / "written").exists()
