"""`stockade learn` on programs as people use them: the policy that it writes lets the same command pass."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stockade import Policy
from support.means import need_program
from support.network import Internet


class Project:
    """A directory in the small internet, with its command line."""

    def __init__(self, internet: Internet, directory: Path, policy: Path) -> None:
        self.internet = internet
        self.directory = directory
        self.policy = policy

    def learn(self, *command: str, options: tuple[str, ...] = (), **more: Any) -> dict[str, Any]:
        """Learn a policy for a command that succeeds, and return what `--json` prints."""
        words = ["learn", "--json", "-o", str(self.policy), *options, "--", *command]
        done = self.internet.stockade(*words, cwd=self.directory, timeout=110, **more)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["settled"], found
        return found

    def run(self, *command: str, **more: Any) -> dict[str, Any]:
        """Run the same command under the policy that was learned."""
        result = self.internet.run(command, (), "-p", str(self.policy), cwd=self.directory, **more)
        assert result["exit_code"] == 0 and result["denials"] == [], result
        return result

    @property
    def clauses(self) -> dict[str, Any]:
        """The policy file, which has no secret and nothing of a home in it."""
        table = tomllib.loads(self.policy.read_text())
        Policy.load(str(self.policy))
        return table


@pytest.fixture
def project(internet: Internet, workspace: Path, tmp_path: Path) -> Project:
    return Project(internet, workspace, tmp_path / "policy.toml")


def test_git(project: Project) -> None:
    need_program("git")
    project.internet.outside(["git", "init", "-q"], cwd=project.directory)
    (project.directory / "file").write_text("x")
    command = ("sh", "-c", "git add file && git -c user.name=a -c user.email=a@b commit -qm first && git log")
    found = project.learn(*command)
    assert "/usr/bin/git" in project.clauses["exec"] and "net" not in project.clauses
    assert "first" in project.run(*command)["stdout"]
    again = project.learn(*command, options=("--merge",))
    assert again["added"] == {}, "a second time there is nothing to add"
    assert found["text"] == project.policy.read_text()


def test_pip(project: Project, packages: None) -> None:
    command = (
        sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--index-url",
        "https://pypi.good.example/simple/", "--target", "site", "first",
    )  # fmt: skip
    project.learn(*command)
    assert project.clauses["net"] == ["pypi.good.example:443"]
    project.run(*command)


def test_npm(project: Project, registry: None) -> None:
    need_program("npm")
    command = ("npm", "install", "--silent", "--no-audit", "--no-fund", "--registry", "https://npm.good.example/", "thing")  # fmt: skip  # noqa: E501
    project.learn(*command)
    assert project.clauses["net"] == ["npm.good.example:443"]
    assert not any(".npmrc" in path for path in project.clauses.get("read", ()))
    project.run(*command)


def test_gcc_and_make(project: Project) -> None:
    for program in ("make", "gcc"):
        need_program(program)
    (project.directory / "a.c").write_text(
        '#include <stdio.h>\nint main(void) { return puts("built") < 0; }\n'
    )
    (project.directory / "Makefile").write_text("all: a\n\t./a\na: a.c\n\tgcc -o a a.c\n")
    project.learn("make")
    assert "exec" not in project.clauses, "the project executes what it builds"
    assert "built" in project.run("make")["stdout"]


def test_pytest(project: Project, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "numbers").write_text("42")
    (project.directory / "test_one.py").write_text(
        f"import pathlib\ndef test_one():\n    assert pathlib.Path('{data}/numbers').read_text() == '42'\n"
    )
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    project.learn(*command, options=("--env=PYTEST_DISABLE_PLUGIN_AUTOLOAD=1",))
    assert str(data / "numbers") in project.clauses["read"]
    assert "1 passed" in project.run(*command)["stdout"]
