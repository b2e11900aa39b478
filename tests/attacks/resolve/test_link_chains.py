"""Links of the host's that lead a tool through several others: replacing one in the middle decides as much.

Each case is a repository whose owner made the links, and a program that puts something else in the place
of one that is neither the first nor the last. The control copies the layer as one would by hand.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import stockade
from stockade import Policy, PolicyError, Workspace
from stockade.linux.path_lookup import names_on_the_way
from support.means import need_program
from support.trees import changed
from support.version_control import home_alone, new_repository, types

STOCKADE = str(Path(sys.executable).with_name("stockade"))
HOOK = 'printf "#!/bin/sh\\ntouch $MARK\\n"'
WATCH = 'printf "[core]\\n\\tfsmonitor = \\"touch $MARK; false\\"\\n"'
EMPTY = "git commit --allow-empty -qm x"
NOTHING = 'printf "#!/bin/sh\\n"'


class Chain(NamedTuple):
    """What the owner made, what the program does, what the user types, and what must be held back."""

    owner: str
    program: str
    types: str
    held: str


CHAINS = {
    "a hook that leads to a link": Chain(
        f"mkdir -p tools .git/hooks; {NOTHING} > tools/check; chmod +x tools/check; ln -s check tools/hook; "
        "ln -s ../../tools/hook .git/hooks/pre-commit",
        f"rm tools/hook; {HOOK} > tools/hook; chmod +x tools/hook",
        EMPTY,
        "tools/hook",
    ),
    "hooks that lead to a link": Chain(
        "mkdir real; touch real/x; ln -s real mid; rm -rf .git/hooks; ln -s ../mid .git/hooks",
        f"rm mid; mkdir mid; {HOOK} > mid/pre-commit; chmod +x mid/pre-commit",
        EMPTY,
        "mid/pre-commit",
    ),
    "hooks that lead to a link, and then to another": Chain(
        "mkdir real; touch real/x; ln -s real mid; rm -rf .git/hooks; ln -s ../mid .git/hooks",
        f"rm mid; mkdir mine; ln -s mine mid; {HOOK} > mine/pre-commit; chmod +x mine/pre-commit",
        EMPTY,
        "mid",
    ),
    "core.hooksPath behind two links": Chain(
        "mkdir -p v1/hooks; touch v1/hooks/x; ln -s v1 release; ln -s release current; "
        "git config core.hooksPath current/hooks",
        f"rm release; mkdir -p w/hooks; ln -s w release; {HOOK} > w/hooks/pre-commit; "
        "chmod +x w/hooks/pre-commit",
        EMPTY,
        "release",
    ),
    "core.hooksPath behind two links, one of them a directory now": Chain(
        "mkdir -p v1/hooks; touch v1/hooks/x; ln -s v1 release; ln -s release current; "
        "git config core.hooksPath current/hooks",
        f"rm release; mkdir -p release/hooks; {HOOK} > release/hooks/pre-commit; "
        "chmod +x release/hooks/pre-commit",
        EMPTY,
        "release/hooks/pre-commit",
    ),
    "an include behind two links": Chain(
        "mkdir conf; touch conf/a; ln -s a conf/b; ln -s b conf/c; git config include.path ../conf/c",
        f"rm conf/b; {WATCH} > conf/b",
        "git status",
        "conf/b",
    ),
    "the repository's own configuration, a link": Chain(
        "mkdir conf; mv .git/config conf/git; ln -s ../conf/git .git/config",
        f"{WATCH} >> conf/git",
        "git status",
        "conf/git",
    ),
    "the repository's own configuration behind two links": Chain(
        "mkdir conf; mv .git/config conf/git; ln -s git conf/link; ln -s ../conf/link .git/config",
        f"cp conf/git conf/new; {WATCH} >> conf/new; mv conf/new conf/link",
        "git status",
        "conf/link",
    ),
    "the user's own configuration": Chain(
        "mkdir dotfiles; touch dotfiles/mine; ln -s $PWD/dotfiles/mine $HOME/.gitconfig",
        f"{WATCH} > dotfiles/mine",
        "git status",
        "dotfiles/mine",
    ),
    "git's directory, behind a link in the words of .git": Chain(
        "mkdir store; mv .git store/g; ln -s store meta; echo 'gitdir: meta/g' > .git",
        f"rm meta; cp -r store meta; {WATCH} >> meta/g/config",
        "git status",
        "meta/g/config",
    ),
}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return home_alone(tmp_path, monkeypatch)


@pytest.fixture
def repository(workspace: Path) -> Path:
    return new_repository(workspace)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


@pytest.mark.parametrize("name", CHAINS)
def test_a_commit_holds_back_what_takes_the_place_of_a_link_in_the_middle(
    repository: Path, mark: Path, name: str
) -> None:
    case = CHAINS[name]
    types(case.owner, repository)
    workspace = changed(repository, f"export MARK={mark}; echo more > plain; {case.program}")
    shown = {one.path for one in workspace.diff().files if one.held}
    done = workspace.commit()
    assert case.held in {one.path for one in done.held}
    assert case.held in shown
    assert (repository / "plain").exists()
    types(case.types, repository, MARK=str(mark))
    assert not mark.exists()


def test_a_link_on_the_way_to_hooks_stays_one(repository: Path) -> None:
    """An empty directory in its place would switch the hooks off."""
    types(
        "mkdir -p v1/hooks; touch v1/hooks/x; ln -s v1 now; git config core.hooksPath now/hooks", repository
    )
    done = changed(repository, "rm now; mkdir -p now/hooks; echo x > now/other").commit()
    assert {one.path for one in done.held} >= {"now", "now/other"}
    assert (repository / "now").is_symlink()


@pytest.mark.parametrize("name", CHAINS)
def test_control_without_a_wall_git_runs_it(repository: Path, mark: Path, name: str) -> None:
    case = CHAINS[name]
    types(case.owner, repository)
    types(case.program, repository, MARK=str(mark))
    types(case.types, repository, MARK=str(mark))
    assert mark.exists()


def rw(project: Path, *more: str, **clauses: object) -> Policy:
    names = [".envrc", ".vscode", ".claude", *more]
    return Policy(workspace={"path": str(project), "mode": "rw"}, unprotect=names, **clauses)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["native", "bwrap"])
@pytest.mark.parametrize("name", CHAINS)
def test_in_mode_rw_the_program_cannot_replace_it(
    repository: Path, mark: Path, name: str, backend: str
) -> None:
    need_program("bwrap")
    case = CHAINS[name]
    types(case.owner, repository)
    script = ["sh", "-c", f"export MARK={mark}; {case.program}"]
    try:
        stockade.run(script, rw(repository, backend=backend), timeout=60)
    except PolicyError as error:
        assert f"{repository}/" in str(error)
    types(case.types, repository, MARK=str(mark))
    assert not mark.exists()


@pytest.mark.parametrize("name", CHAINS)
def test_the_landlock_backend_refuses_what_it_cannot_keep(repository: Path, name: str) -> None:
    """Also where the program may write the repository itself."""
    case = CHAINS[name]
    types(case.owner, repository)
    clauses = {"backend": "landlock", "protect": [], "accept": ["files", "processes", "devices"]}
    with pytest.raises(PolicyError, match="is in a writable directory"):
        stockade.run(["true"], rw(repository, ".git", **clauses))


def test_a_link_in_the_middle_is_given_up_by_name(repository: Path) -> None:
    case = CHAINS["a hook that leads to a link"]
    types(case.owner, repository)
    with pytest.raises(PolicyError, match="is a link or lies behind one") as caught:
        stockade.run(["true"], rw(repository))
    assert "--unprotect tools/hook" in caught.value.hint
    result = stockade.run(["sh", "-c", "echo x >> tools/check"], rw(repository, "tools/hook"))
    assert not result.ok, "what the link leads to stays read-only"


class TestOtherNames:
    def test_an_agents_instructions_behind_two_links(self, workspace: Path) -> None:
        types("mkdir docs; echo x > docs/b.md; ln -s b.md docs/a.md; ln -s docs/a.md CLAUDE.md", workspace)
        done = changed(workspace, "rm docs/a.md; echo evil > docs/a.md; echo more > docs/c.md").commit()
        assert [one.path for one in done.held] == ["docs/a.md"]
        assert "CLAUDE.md leads to it" in done.held[0].detail

    def test_a_directory_of_tools_behind_two_links(self, workspace: Path) -> None:
        types("mkdir -p v1/claude; touch v1/claude/x; ln -s v1 now; ln -s now/claude .claude", workspace)
        script = "rm now; mkdir -p now/claude; echo {} > now/claude/settings.json; echo x > now/plain"
        done = changed(workspace, script).commit()
        assert [one.path for one in done.held] == ["now/claude/settings.json"]

    def test_a_link_in_the_place_of_a_directory_on_the_way(self, workspace: Path) -> None:
        types("mkdir docs; echo x > docs/guide.md; ln -s docs/guide.md CLAUDE.md", workspace)
        done = changed(workspace, "mv docs old; mkdir other; echo evil > other/guide.md; ln -s other docs")
        assert "docs" in {one.path for one in done.commit().held}
        assert (workspace / "CLAUDE.md").read_text() == "x\n"

    def test_a_link_above_the_workspace(self, workspace: Path) -> None:
        types("git init -q .; mkdir docs; echo x > docs/guide.md; ln -s docs/guide.md AGENTS.md", workspace)
        done = changed(workspace / "docs", "echo evil > guide.md; echo x > plain.md").commit()
        assert [one.path for one in done.held] == ["guide.md"]

    def test_a_link_deep_in_a_tools_directory(self, workspace: Path) -> None:
        script = "mkdir -p .claude/skills/x/scripts tools; echo x > tools/run.sh; "
        script += "ln -s ../../../../tools/run.sh .claude/skills/x/scripts/run.sh"
        types(script, workspace)
        done = changed(workspace, "echo evil > tools/run.sh").commit()
        assert [one.path for one in done.held] == ["tools/run.sh"]


class TestPolicies:
    def test_a_policy_behind_two_links(self, workspace: Path) -> None:
        types("mkdir conf; ln -s conf/p.toml policy.toml; ln -s real.toml conf/p.toml", workspace)
        (workspace / "conf" / "real.toml").write_text('workspace = "."\nlimits = {wall = "20s"}\n')
        script = 'rm conf/p.toml; echo "net = \\"open\\"" > conf/p.toml; echo x > plain'
        self._commit(workspace, "-p", "policy.toml", "--", "sh", "-c", script)
        assert "open" not in (workspace / "policy.toml").read_text()

    def test_the_users_own_policy_behind_two_links(self, workspace: Path, home: Path) -> None:
        (home / ".config" / "stockade").mkdir(parents=True)
        types("mkdir st; ln -s real.toml st/config.toml", workspace)
        (workspace / "st" / "real.toml").write_text('limits = {wall = "20s"}\n')
        config = home / ".config" / "stockade" / "config.toml"
        config.symlink_to(workspace / "st" / "config.toml")
        script = 'rm st/config.toml; echo "net = \\"open\\"" > st/config.toml; echo x > plain'
        self._commit(workspace, "-w", ".", "--", "sh", "-c", script)
        assert "open" not in config.read_text()

    def test_the_users_own_directory_of_policies_behind_two_links(self, workspace: Path, home: Path) -> None:
        (home / ".config").mkdir()
        types("mkdir v1; ln -s v1 now", workspace)
        (workspace / "v1" / "config.toml").write_text('limits = {wall = "20s"}\n')
        (home / ".config" / "stockade").symlink_to(workspace / "now")
        script = 'rm now; mkdir now; echo "net = \\"open\\"" > now/config.toml; echo x > plain'
        self._commit(workspace, "-w", ".", "--", "sh", "-c", script)
        assert "open" not in (home / ".config" / "stockade" / "config.toml").read_text()

    @staticmethod
    def _commit(at: Path, *words: str) -> None:
        for command in (["run", *words], ["diff"], ["commit"]):
            subprocess.run([STOCKADE, *command], cwd=at, capture_output=True, check=False, timeout=60)
        assert (at / "plain").exists(), "the rest is committed"


class TestNamesOnTheWay:
    def test_every_link_with_what_follows_it(self, tmp_path: Path) -> None:
        top = Path(os.path.realpath(tmp_path))
        types("mkdir -p v1/hooks; ln -s v1 release; ln -s release current; ln -s ../v1/none v1/gone", top)
        assert names_on_the_way(f"{top}/current/hooks") == (
            f"{top}/current/hooks",
            f"{top}/release/hooks",
            f"{top}/v1/hooks",
        )
        assert names_on_the_way(f"{top}/current/gone") == (
            f"{top}/current/gone",
            f"{top}/release/gone",
            f"{top}/v1/gone",
            f"{top}/v1/none",
        )

    def test_links_in_a_circle_come_to_an_end(self, tmp_path: Path) -> None:
        top = Path(os.path.realpath(tmp_path))
        types("ln -s b a; ln -s a b", top)
        assert set(names_on_the_way(f"{top}/a")) == {f"{top}/a", f"{top}/b"}


def test_a_workspace_is_opened_by_its_real_name(workspace: Path) -> None:
    """So that names on the way are compared with it."""
    assert Workspace.open(changed(workspace, "echo x > x").id).path == os.path.realpath(workspace)
