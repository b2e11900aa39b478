"""What a program leaves for tools of the host where it writes for real is listed, however they find it.

Where the backend lays no mount over repositories, what was changed in them is listed first. Files that links
of the user's lead to are listed, and what decides which policy the next run has.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

import stockade
from stockade import Policy, PolicyError, Result, Sandbox
from stockade.resolve.discovery import find_project
from stockade.runs import handoffs, obeyed_links
from support.gits import git, somebody, types

STOCKADE = (sys.executable, "-P", "-m", "stockade")
ABSENT = [".envrc", ".vscode", ".claude"]
WEAK = {"backend": "landlock", "accept": ["files", "processes", "devices", "protect"], "unprotect": []}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody(tmp_path / "home", monkeypatch)


def rw(place: Path, **clauses: Any) -> Policy:
    return Policy(workspace={"path": str(place), "mode": "rw"}, **{"unprotect": ABSENT, **clauses})


def run(script: str, policy: Policy) -> Result:
    time.sleep(0.05)  # else the files of the test are as new as the run
    return stockade.run(["sh", "-c", script], policy, timeout=60)


def listed(result: Result, place: Path) -> list[str]:
    return [one.path.removeprefix(f"{place}/") for one in result.handoffs]


def put(place: Path, *names: str, text: str = "mine\n") -> None:
    for name in names:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)


def test_what_runs_only_at_the_next_command_is_not_listed(workspace: Path) -> None:
    names = ("Makefile", "package.json", "conftest.py", "random.py", "__pycache__/a.cpython-311.pyc")
    script = f"mkdir __pycache__; touch {' '.join(names)} AGENTS.md"
    assert listed(run(script, rw(workspace)).check(), workspace) == ["AGENTS.md"]


class TestWithoutMounts:
    """The landlock backend with `protect` accepted: repositories are writable, and that is said."""

    EVIL = 'printf "[core]\\n\\tfsmonitor = touch $PWD/PWNED; false\\n"'
    ATTACKS: ClassVar = {
        "the configuration": (f"{EVIL} >> .git/config", ".git/config"),
        "commondir": ("mkdir evil; echo ../evil > .git/commondir", ".git/commondir"),
        "a hook": ("echo x > .git/hooks/pre-commit", ".git/hooks/pre-commit"),
        "what core.hooksPath names": ("echo x >> own/pre-commit", "own/pre-commit"),
        "old hooks in place of the others": ("mv .git/hooks old; mv spare .git/hooks", ".git/hooks/pre-push"),
        "another repository in its place": ("rm -r .git; mv other .git", ".git"),
        "a bare repository": ("echo x >> deep/bare.git/config", "deep/bare.git/config"),
        "a worktree's file": ("echo gitdir: ../evil > tree/.git", "tree/.git"),
    }

    @pytest.fixture
    def project(self, workspace: Path) -> Path:
        git("init", "-q", str(workspace), at=workspace)
        git("init", "-q", "--bare", "deep/bare.git", at=workspace)
        git("init", "-q", "elsewhere", at=workspace)
        (workspace / "elsewhere/.git").rename(workspace / "other")
        git("config", "core.hooksPath", "own", at=workspace)
        put(workspace, "own/pre-commit", "spare/pre-push")
        put(workspace, "tree/.git", text="gitdir: ../.git\n")
        return workspace

    @pytest.mark.parametrize("name", ATTACKS)
    def test_what_was_changed_in_a_repository_is_listed_in_words(self, project: Path, name: str) -> None:
        script, path = self.ATTACKS[name]
        result = run(script, rw(project, **WEAK)).check()
        assert listed(result, project) == [path]
        assert result.handoffs[0].reason

    def test_control_git_obeys_it(self, project: Path) -> None:
        run(self.ATTACKS["the configuration"][0], rw(project, **WEAK)).check()
        types("git status", project)
        assert (project / "PWNED").exists()

    def test_what_was_not_changed_is_not_listed(self, project: Path) -> None:
        result = run("cat .git/config; echo x > .git/index; echo x > plain", rw(project, **WEAK)).check()
        assert result.handoffs == ()

    def test_a_living_sandbox_lists_it_when_it_is_closed(self, project: Path) -> None:
        time.sleep(0.05)
        with Sandbox(rw(project, **WEAK)) as box:
            box.run(["sh", "-c", "echo x >> .git/config"]).check()
        assert [one.path for one in box.handoffs] == [f"{project}/.git/config"]

    def test_it_comes_first_however_much_lies_beside_it(
        self, project: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(handoffs, "MOST_LISTED", 10)
        monkeypatch.setattr(handoffs, "MOST_ENTRIES", 100)
        script = "for i in $(seq 90); do echo x > AGENTS.$i.md; mkdir a$i; echo x > a$i/.envrc; done"
        result = run(f"{script}; {self.EVIL} >> .git/config", rw(project, **WEAK)).check()
        assert listed(result, project)[0] == ".git/config"
        assert any("is not listed" in one for one in result.warnings)

    def test_where_mounts_are_laid_over_it_nothing_is_said(self, project: Path) -> None:
        put(project, ".envrc", ".vscode/x", ".claude/x", "tree/own/x")
        policy = rw(project, accept=["protect"], unprotect=[])
        result = run("echo x >> .git/config || true; echo x > plain", policy)
        assert result.ok and result.handoffs == () and result.warnings == ()

    def test_the_policy_that_the_run_has_is_listed_too(self, project: Path) -> None:
        put(project, "ci/mine.toml")
        result = run("echo x >> ci/mine.toml", rw(project, **WEAK, protect=["ci/mine.toml"])).check()
        assert listed(result, project) == ["ci/mine.toml"]
        assert "protects" in result.handoffs[0].reason
        result = run("rm -r ci", rw(project, **WEAK, protect=["ci/mine.toml"])).check()
        assert listed(result, project) == ["ci/mine.toml"] and "removed" in result.handoffs[0].reason

    def test_the_command_line_warns_before_and_lists_afterwards(self, project: Path, tmp_path: Path) -> None:
        accept = '["files", "processes", "devices", "protect"]'
        policy = (
            f'accept = {accept}\nbackend = "landlock"\nworkspace = {{ path = "{project}", mode = "rw" }}\n'
        )
        put(tmp_path, "ll.toml", text=policy)
        script = "echo ran >&2; echo x >> .git/config"
        words = ["run", "-p", str(tmp_path / "ll.toml"), "--", "sh", "-c", script]
        time.sleep(0.05)
        done = subprocess.run(
            [*STOCKADE, *words], cwd=project, capture_output=True, text=True, timeout=60, check=False
        )
        first, second, third, fourth = done.stderr.splitlines()
        assert "warning: " in first and "landlock" in first and ".git" in first and second == "ran"
        assert "your tools run or obey" in third and f"{project}/.git/config: git runs" in fourth


class TestLinks:
    """Links of the user's lead tools to files of any name."""

    LINKS: ClassVar = {
        "a file": ("CLAUDE.md -> docs/g.md", "echo evil > docs/g.md", ["docs/g.md"]),
        "a directory": (".cursor -> cfg", "echo evil > cfg/rules", ["cfg/rules"]),
        "what is not there yet": ("CLAUDE.md -> docs/new.md", "echo evil > docs/new.md", ["docs/new.md"]),
        "a link in the middle": (
            "CLAUDE.md -> middle; middle -> docs/g.md",
            "ln -sfn cfg/x middle",
            ["middle"],
        ),
        "a directory on the way": ("CLAUDE.md -> docs/g.md", "mv docs d; ln -s cfg docs", ["docs"]),
        "a link further down": ("sub/AGENTS.md -> ../docs/g.md", "echo evil > docs/g.md", ["docs/g.md"]),
        "a directory that was renamed": (".cursor -> cfg", "rm -r cfg; mv old cfg", ["cfg/rules"]),
        "a policy": ("sub/stockade.toml -> ../docs/p", "echo x > docs/p", ["docs/p"]),
        "a policy among others": (
            "sub/pyproject.toml -> ../docs/p",
            "echo '[tool.stockade]' > docs/p",
            ["docs/p"],
        ),
    }

    def tree(self, workspace: Path, links: str) -> None:
        put(workspace, "docs/g.md", "cfg/x", "sub/x", "old/rules")
        for one in links.split("; "):
            name, _, target = one.partition(" -> ")
            (workspace / name).symlink_to(target)

    @pytest.mark.parametrize("name", LINKS)
    def test_what_a_link_of_the_users_leads_to_is_listed(self, workspace: Path, name: str) -> None:
        links, script, paths = self.LINKS[name]
        self.tree(workspace, links)
        result = run(f"{script}; echo x > docs/other; echo x > plain", rw(workspace)).check()
        assert listed(result, workspace) == paths
        assert "leads to it" in result.handoffs[0].reason

    @pytest.mark.parametrize("name", LINKS)
    def test_control_without_the_links_nothing_is(self, workspace: Path, name: str) -> None:
        _, script, _ = self.LINKS[name]
        put(workspace, "docs/g.md", "cfg/x", "sub/x", "old/rules")
        assert listed(run(script, rw(workspace)), workspace) == []

    def test_a_link_from_one_writable_directory_into_another(self, tmp_path: Path, workspace: Path) -> None:
        put(tmp_path / "out", "g.md")
        (workspace / "CLAUDE.md").symlink_to("../out/g.md")
        result = run(f"echo x > {tmp_path}/out/g.md", rw(workspace, write=[str(tmp_path / "out")])).check()
        assert [one.path for one in result.handoffs] == [f"{tmp_path}/out/g.md"]

    def test_a_link_above_the_directory_in_the_same_repository(self, workspace: Path) -> None:
        git("init", "-q", str(workspace), at=workspace)
        put(workspace, "inner/docs/g.md")
        (workspace / "CLAUDE.md").symlink_to("inner/docs/g.md")
        policy = Policy(workspace=str(workspace), write=[f"{workspace}/inner"])
        assert listed(run("echo x > inner/docs/g.md", policy).check(), workspace) == ["inner/docs/g.md"]

    def test_more_links_than_are_followed_are_said(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(obeyed_links, "MOST_LINKS", 5)
        self.tree(workspace, "CLAUDE.md -> docs/g.md")
        script = "mkdir .cursor; for i in $(seq 20); do ln -s ../plain .cursor/$i; done; echo x > docs/g.md"
        result = run(script, rw(workspace)).check()
        assert "docs/g.md" in listed(result, workspace), "the user's own links come first"
        assert any("links" in one and "not listed" in one for one in result.warnings)

    def test_links_and_files_without_number_take_no_time_without_end(self, workspace: Path) -> None:
        (workspace / "d").mkdir()
        for number in range(900):
            (workspace / f"s{number}").mkdir()
            (workspace / f"s{number}/.github").symlink_to("../d")
        script = "for i in $(seq 3000); do : > d/$i; done"
        began = time.monotonic()
        result = run(script, rw(workspace)).check()
        assert time.monotonic() - began < 15
        assert any("links" in one and "not listed" in one for one in result.warnings)


class TestNextPolicy:
    """What decides the policy of the next run in a directory."""

    TABLE = '[tool.stockade]\nnet = "open"\n'
    CHANGES: ClassVar = {
        "a new table": ("printf '[tool.stockade]\\n' > pyproject.toml", ["pyproject.toml"]),
        "a changed table": ("echo >> own/pyproject.toml", ["own/pyproject.toml"]),
        "a table that is gone": ("echo > own/pyproject.toml", ["own/pyproject.toml"]),
        "a file that is gone": ("rm own/pyproject.toml", ["own/pyproject.toml"]),
        "another directory in its place": (
            "mv policed x; mkdir policed",
            ["policed/stockade.toml", "x/stockade.toml"],
        ),
        "a new policy": ("mkdir new; : > new/stockade.toml", ["new/stockade.toml"]),
        "one in a package": ("mkdir vendor; : > vendor/stockade.toml", ["vendor/stockade.toml"]),
        "what cannot be read": ("truncate -s 2M pyproject.toml", ["pyproject.toml"]),
        "the mode of the workspace": ("chmod o+w .", [""]),
        "the mode of a directory with a policy": ("chmod o+w policed", ["policed"]),
        "the mode of a directory with a table": ("chmod o+w own", ["own"]),
    }

    @pytest.fixture
    def project(self, workspace: Path) -> Path:
        workspace.chmod(0o755)
        put(workspace, "policed/stockade.toml", "own/pyproject.toml", text=self.TABLE)
        put(workspace, "plain/pyproject.toml", text='[project]\nname = "x"\n')
        return workspace

    @pytest.mark.parametrize("name", CHANGES)
    def test_it_is_listed(self, project: Path, name: str) -> None:
        script, paths = self.CHANGES[name]
        result = run(script, rw(project)).check()
        assert sorted(listed(result, project.parent)) == [
            f"{project.name}/{path}".rstrip("/") for path in paths
        ]
        assert all("Stockade" in one.reason for one in result.handoffs)

    def test_the_projects_other_files_and_modes_are_not(self, project: Path) -> None:
        script = (
            "echo >> plain/pyproject.toml; mkdir new; echo '[project]' > new/pyproject.toml; "
            "chmod o+w plain new; : > policed/x; chmod 755 . policed"
        )
        assert run(script, rw(project)).check().handoffs == ()

    def test_control_stockade_takes_no_policy_from_a_directory_that_everybody_can_write_to(
        self, project: Path
    ) -> None:
        put(project, "policed/stockade.toml", text='net = "open"\n')
        assert find_project(f"{project}/policed", "/nowhere") is not None
        run("chmod o+w policed", rw(project)).check()
        with pytest.raises(PolicyError, match="everybody can write"):
            find_project(f"{project}/policed", "/nowhere")

    def test_pipes_and_files_without_end_are_not_waited_for(self, project: Path) -> None:
        script = (
            "mkfifo pyproject.toml; for i in $(seq 50); do mkdir p$i; truncate -s 1M p$i/pyproject.toml; done"
        )
        began = time.monotonic()
        result = run(script, rw(project)).check()
        assert time.monotonic() - began < 10
        assert f"{project}/pyproject.toml" in {one.path for one in result.handoffs}
