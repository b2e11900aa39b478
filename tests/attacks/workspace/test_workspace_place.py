"""A workspace that lies where a tool looks, or in which there is more than is looked through.

A project may choose its workspace, and a user may stand in any directory: what a tool obeys is decided by
the whole path, not by the part of it below the workspace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError
from stockade.workspace.holdback.aliases import outer_names
from stockade.workspace.version_control import hook_paths as hooks
from support.means import need_program
from support.trees import changed
from support.version_control import home_alone, new_repository, types

STOCKADE = str(Path(sys.executable).with_name("stockade"))
GIT = "git -c user.name=x -c user.email=x@example.org -c protocol.file.allow=always"
HOOK = "#!/bin/sh\ntouch {mark}\n"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_alone(tmp_path, monkeypatch)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.fixture
def repository(workspace: Path) -> Path:
    return new_repository(workspace)


def held(place: Path, script: str) -> dict[str, str]:
    return {one.path: one.detail for one in changed(place, script).commit().held}


class TestPlace:
    def test_a_project_that_chooses_the_hooks_of_a_submodule(self, repository: Path, mark: Path) -> None:
        types(f"git init -q ../other; {GIT} -C ../other commit -qm x --allow-empty", repository)
        types(f"{GIT} submodule add ../other sub", repository)
        inner = repository / ".git/modules/sub/hooks"
        inner.mkdir(exist_ok=True)
        (repository / "stockade.toml").write_text('[workspace]\npath = ".git/modules/sub/hooks"\n')
        script = f"printf '{HOOK.format(mark=mark)}' > pre-commit; chmod +x pre-commit"
        # Also where the user agreed to the project's choice.
        subprocess.run([STOCKADE, "trust", "stockade.toml"], cwd=repository, check=True, capture_output=True)
        done = subprocess.run(
            [STOCKADE, "run", "--commit", "--", "sh", "-c", script],
            cwd=repository,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert "held back: pre-commit" in done.stderr
        types(f"{GIT} -C sub commit --allow-empty -qm y", repository)
        assert not mark.exists()
        (inner / "pre-commit").write_text(HOOK.format(mark=mark))
        (inner / "pre-commit").chmod(0o755)
        types(f"{GIT} -C sub commit --allow-empty -qm y", repository)
        assert mark.exists(), "the control"

    @pytest.mark.parametrize(
        ("place", "name"),
        [
            (".git/hooks", "pre-commit"),
            (".git", "config"),
            ("nest/.git/hooks", "pre-commit"),
            (".husky", "pre-commit"),
            (".venv/bin", "python"),
            ("venv/bin", "tool"),
            (".github", "workflows/ci.yml"),
            (".github/workflows", "ci.yml"),
            (".claude", "settings.json"),
            (".Claude", "settings.json"),
            (".cursor", "hooks.json"),
            ("pkg/gradle/wrapper", "gradle-wrapper.properties"),
            ("node_modules/.bin", "tsc"),
            (".vscode", "tasks.json"),
        ],
    )
    def test_the_name_of_the_workspace_counts(self, repository: Path, place: str, name: str) -> None:
        inner = repository / place
        inner.mkdir(parents=True, exist_ok=True)
        assert list(held(inner, f'mkdir -p "$(dirname {name})"; echo evil >> {name}')) == [name]
        assert not (inner / name).exists() or "evil" not in (inner / name).read_text()

    def test_a_repository_by_another_name(self, repository: Path) -> None:
        types(
            "mkdir meta; git init -q --separate-git-dir=$PWD/meta/g work; mkdir -p meta/g/hooks", repository
        )
        assert list(held(repository / "meta/g/hooks", "echo x > pre-commit")) == ["pre-commit"]
        assert list(held(repository / "meta/g", "echo x >> config; echo x > notes")) == ["config"]

    def test_in_a_directory_that_is_called_like_one_for_packages(self, tmp_path: Path) -> None:
        """Packages that a project uses are not the project, but a project may lie anywhere."""
        place = tmp_path / "vendor" / "project" / ".husky"
        place.mkdir(parents=True)
        assert list(held(place, "echo x > pre-commit")) == ["pre-commit"]

    def test_what_runs_at_the_next_command_is_shown_by_the_whole_path_too(self, repository: Path) -> None:
        (repository / "docs").mkdir()
        done = changed(repository / "docs", "echo x > conf.py; echo x > other.py").commit()
        assert [one.path for one in done.runs] == ["conf.py"]

    def test_the_diff_says_the_same(self, repository: Path) -> None:
        (repository / ".husky").mkdir()
        workspace = changed(repository / ".husky", "echo x > pre-commit")
        assert [one.path for one in workspace.diff().files if one.held] == ["pre-commit"]

    @pytest.mark.parametrize("backend", ["native", "bwrap"])
    def test_in_mode_rw_it_is_listed(self, repository: Path, backend: str) -> None:
        need_program("bwrap")
        (repository / ".husky").mkdir()
        policy = Policy(
            workspace={"path": str(repository / ".husky"), "mode": "rw"}, protect=[], backend=backend
        )
        result = stockade.run(["sh", "-c", "echo x > pre-commit"], policy)
        assert [one.path for one in result.handoffs] == [f"{repository}/.husky/pre-commit"]

    def test_worktrees_of_agents_are_the_projects(self, repository: Path) -> None:
        """Agents make them in directories of their own."""
        types("mkdir -p .claude/worktrees; git worktree add -q .claude/worktrees/x", repository)
        place = repository / ".claude/worktrees/x"
        assert (place / ".git").is_file()
        assert held(place, "echo x > source.py; mkdir src; echo x > src/b.py") == {}
        (place / ".husky").mkdir()
        assert list(held(place / ".husky", "echo x > pre-commit")) == ["pre-commit"]

    def test_a_file_that_says_it_is_a_worktree_is_not_enough(self, repository: Path) -> None:
        place = repository / ".claude"
        (place / "fake/worktrees/x").mkdir(parents=True)
        (place / ".git").write_text("gitdir: fake/worktrees/x\n")
        assert "settings.json" in held(place, "echo x > settings.json")

    def test_the_name_of_a_project_is_not_what_a_tool_looks_for(self, tmp_path: Path) -> None:
        place = tmp_path / "githooks"
        place.mkdir()
        types("git init -q .", place)
        assert held(place, "echo x > source.py") == {}
        assert outer_names(str(place)) == ()


class TestMoreThanIsLookedThrough:
    @pytest.fixture
    def hooked(self, repository: Path) -> Path:
        types("git config core.hooksPath tools/hk; mkdir -p tools/hk; touch tools/hk/pre-commit", repository)
        return repository

    def test_many_repositories_below_do_not_displace_the_one_above(self, hooked: Path, mark: Path) -> None:
        types("for i in $(seq 150); do mkdir -p d$i/.git; done", hooked)
        script = f"printf '{HOOK.format(mark=mark)}' > tools/hk/pre-commit; chmod +x tools/hk/pre-commit; "
        workspace = changed(hooked, f"{script} for i in $(seq 150); do echo x > d$i/new; done")
        shown = [one.path for one in workspace.diff().files if one.held]
        assert shown == [one.path for one in workspace.commit().held] == ["tools/hk/pre-commit"]
        types(f"{GIT} commit --allow-empty -qm x", hooked)
        assert not mark.exists()

    @pytest.mark.parametrize("backend", ["native", "bwrap"])
    def test_nor_in_mode_rw(self, hooked: Path, mark: Path, backend: str) -> None:
        need_program("bwrap")
        for number in range(150):
            (hooked / f"d{number}/.git").mkdir(parents=True)
        policy = Policy(
            workspace={"path": str(hooked), "mode": "rw"},
            unprotect=[".envrc", ".vscode", ".claude"],
            backend=backend,
        )
        script = f"printf '{HOOK.format(mark=mark)}' > tools/hk/pre-commit"
        assert b"Read-only" in stockade.run(["sh", "-c", script], policy).stderr

    def test_what_is_committed_is_never_more_than_the_diff_held(self, hooked: Path) -> None:
        """A repository beside the change that leads to it is found by the commit at least."""
        types("git init -q side; git -C side config core.hooksPath ../lib", hooked)
        workspace = changed(hooked, "mkdir lib; echo x > lib/pre-commit")
        shown = {one.path for one in workspace.diff().files if one.held}
        found = {one.path for one in workspace.commit().held}
        assert shown <= found == {"lib/pre-commit"}

    @pytest.mark.parametrize(
        ("bound", "most"),
        [
            ("MOST_DIRECTORIES", 3),
            ("MOST_ENTRIES", 5),
            ("MOST_NAMES", 10),
            ("MOST_REPOSITORIES", 2),
            ("MOST_FILES", 1),
            ("MOST_BYTES", 10),
            ("MOST_HOOKS", 2),
            ("LONGEST_COMMAND", 5),
        ],
    )
    def test_past_a_bound_everything_is_held_back(
        self, hooked: Path, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
    ) -> None:
        """With lower bounds, because a tree past the real ones takes long to make."""
        types(
            "git config alias.x '!echo long'; touch tools/hk/a tools/hk/b; git init -q s; git init -q t",
            hooked,
        )
        workspace = changed(hooked, "mkdir -p x/y; echo x > x/y/z; echo x > plain")
        monkeypatch.setattr(hooks, bound, most)
        done = workspace.commit(keep=True)
        assert {one.path for one in done.held} == {"x/y/z", "plain"}
        assert all("version control may run it" in one.detail for one in done.held)
        assert not workspace.commit(allow_exec_config=True).held

    def test_and_a_writable_directory_is_refused(self, hooked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hooks, "MOST_BYTES", 10)
        policy = Policy(
            workspace={"path": str(hooked), "mode": "rw"}, unprotect=[".envrc", ".vscode", ".claude"]
        )
        with pytest.raises(PolicyError, match="cannot keep read-only"):
            stockade.run(["true"], policy)

    def test_samples_do_not_displace_hooks_that_are_links(self, repository: Path) -> None:
        names = ("pre-commit", "pre-push", "commit-msg", "post-merge", "post-checkout")
        links = "; ".join(f"echo > tools/{name}; ln -s ../../tools/{name} .git/hooks/" for name in names)
        types("mkdir .git/hooks; cd .git/hooks; for i in $(seq 9000); do : > $i.sample; done", repository)
        types(f"mkdir tools; {links}", repository)
        changes = "; ".join(f"echo x > tools/{name}" for name in names)
        assert set(held(repository, changes)) == {f"tools/{name}" for name in names}

    def test_a_closed_directory_of_the_callers_is_not_passed_over(self, hooked: Path) -> None:
        if os.geteuid() == 0:
            return  # who enters every directory
        types("mkdir -p vendor/lib; git init -q vendor/lib; chmod 000 vendor", hooked)
        try:
            assert list(held(hooked, "echo x > plain")) == ["plain"]
        finally:
            (hooked / "vendor").chmod(0o755)
