"""What git and Mercurial on the host run of what a program could write for real: nothing that it wrote.

Each attack is a shell script that a program runs in a writable workspace, and
a command that the user types on the host afterwards. The control runs the same
script without the wall and sees that the command does execute what it left.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import stockade
from stockade import AsyncSandbox, Policy, PolicyError, Result, Sandbox
from stockade.resolve.resolved import ResolvedPolicy
from support.gits import git, somebody, types
from support.means import need_program

STOCKADE = (sys.executable, "-I", "-m", "stockade")
#: What the default protects besides repositories, and an ordinary directory does not have.
ABSENT = [".envrc", ".vscode", ".claude"]


class Attack(NamedTuple):
    """A script for the program, which leaves a way to `touch $MARK`; and what the user types."""

    script: str
    types: str


GIT = {
    "a hook": Attack(
        'mkdir -p .git/hooks; printf "#!/bin/sh\\ntouch $MARK\\n" > .git/hooks/pre-commit; '
        "chmod +x .git/hooks/pre-commit",
        "git commit --allow-empty -qm x",
    ),
    "commondir": Attack(
        "mkdir -p evil; cp -r .git/. evil; git -C . config --file evil/config core.fsmonitor "
        '"touch $MARK; false"; echo ../evil > .git/commondir',
        "git status",
    ),
    "fsmonitor": Attack('git config core.fsmonitor "touch $MARK; false"', "git status"),
    "hooksPath": Attack(
        'mkdir own; printf "#!/bin/sh\\ntouch $MARK\\n" > own/pre-commit; chmod +x own/pre-commit; '
        "git config core.hooksPath own",
        "git commit --allow-empty -qm x",
    ),
    "an include": Attack(
        'printf "[core]\\nfsmonitor = \\"touch $MARK; false\\"\\n" > inc; git config include.path ../inc',
        "git status",
    ),
    "the configuration of a submodule": Attack(
        'git config --file .git/modules/sub/config core.fsmonitor "touch $MARK; false"', "git status"
    ),
    "a submodule's file that leads elsewhere": Attack(
        'cp -r .git/modules/sub evil; git config --file evil/config core.fsmonitor "touch $MARK; false"; '
        "git config --file evil/config core.worktree ../sub; echo gitdir: ../evil > sub/.git",
        "git -C sub status",
    ),
    "the configuration of a worktree": Attack(
        "git config extensions.worktreeConfig true; "
        'printf "[core]\\nfsmonitor = \\"touch $MARK; false\\"\\n" > .git/worktrees/tree/config.worktree',
        "git -C tree status",
    ),
    "a worktree that shares something else": Attack(
        'cp -r .git evil; git config --file evil/config core.fsmonitor "touch $MARK; false"; '
        "echo ../../../evil > .git/worktrees/tree/commondir",
        "git -C tree status",
    ),
    "a nested repository": Attack(
        'git -C deep/nested config core.fsmonitor "touch $MARK; false"', "git -C deep/nested status"
    ),
    "a bare repository": Attack(
        'git -C deep/bare.git config core.fsmonitor "touch $MARK; false"; '
        'git -C deep/bare.git config alias.st "!touch $MARK"',
        "git -C deep/bare.git st",
    ),
    "another .git in its place": Attack(
        'mv .git old; cp -r old .git; git config core.fsmonitor "touch $MARK; false"', "git status"
    ),
    "the directory above moved away": Attack(
        "mv deep shallow; mkdir deep; cp -r shallow/nested deep/nested; "
        'git -C deep/nested config core.fsmonitor "touch $MARK; false"',
        "git -C deep/nested status",
    ),
    "info/attributes and a filter": Attack(
        'git config filter.x.clean "touch $MARK; cat"; mkdir -p .git/info; '
        'echo "* filter=x" > .git/info/attributes; touch a',
        "git add a",
    ),
}


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No configuration of whoever runs the tests."""
    somebody(tmp_path / "home", monkeypatch)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with a submodule, a worktree, a nested repository and a bare one."""
    place = tmp_path_factory.mktemp("original")
    first, other = place / "first", place / "other"
    who = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    git("init", "-q", str(first), at=place)
    (first / "a").write_text("a\n")
    git("add", "a", at=first)
    git(*who, "commit", "-qm", "first", at=first)
    git("clone", "-q", str(first), str(other), at=place)
    git("-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "sub", at=first)
    git(*who, "commit", "-qm", "second", at=first)
    git("worktree", "add", "-q", "tree", at=first)
    (first / "deep").mkdir()
    git("clone", "-q", str(other), "deep/nested", at=first)
    git("clone", "-q", "--bare", str(other), "deep/bare.git", at=first)
    return first


@pytest.fixture
def project(workspace: Path, original: Path) -> Path:
    shutil.copytree(original, workspace, symlinks=True, dirs_exist_ok=True)
    git("worktree", "repair", "tree", at=workspace)
    return workspace


def rw(project: Path, **clauses: Any) -> Policy:
    return Policy(workspace={"path": str(project), "mode": "rw"}, **{"unprotect": ABSENT, **clauses})


def attack(project: Path, script: str, mark: Path, policy: Policy) -> Result:
    return stockade.run(["sh", "-c", script], policy, env={"MARK": str(mark)}, timeout=60)


BACKENDS = ("native", "bwrap")


HG = {
    "a hook": Attack('printf "[hooks]\\npre-status = touch $MARK\\n" >> .hg/hgrc', "hg status"),
    "what is shared": Attack(
        'cp -r .hg evil; printf "[hooks]\\npre-status = touch $MARK\\n" >> evil/hgrc; '
        "rm -r .hg/store; echo share-safe >> .hg/requires; echo shared >> .hg/requires; "
        "echo $PWD/evil > .hg/sharedpath",
        "hg status",
    ),
}


@pytest.fixture
def mercurial(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    need_program("hg")
    monkeypatch.setenv("HGRCPATH", "")
    types("hg init .; echo a > a; hg add a; hg commit -u me -m first", workspace)
    return workspace


@pytest.mark.parametrize("name", HG)
def test_mercurial_on_the_host_runs_nothing_that_the_program_wrote(
    mercurial: Path, tmp_path: Path, name: str
) -> None:
    attack(mercurial, HG[name].script, mark := tmp_path / "mark", rw(mercurial))
    types(HG[name].types, mercurial)
    assert not mark.exists()


@pytest.mark.parametrize("name", HG)
def test_control_without_the_wall_mercurial_does_run_it(mercurial: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    subprocess.run(
        ["sh", "-c", HG[name].script],
        cwd=mercurial,
        env={**os.environ, "MARK": str(mark)},
        timeout=60,
        check=False,
    )
    types(HG[name].types, mercurial)
    assert mark.exists()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", GIT)
def test_git_on_the_host_runs_nothing_that_the_program_wrote(
    project: Path, tmp_path: Path, name: str, backend: str
) -> None:
    mark = tmp_path / "mark"
    if backend == "bwrap":
        need_program("bwrap")
    attack(project, GIT[name].script, mark, rw(project, backend=backend))
    types(GIT[name].types, project)
    assert not mark.exists()


@pytest.mark.parametrize("name", GIT)
def test_control_without_the_wall_git_does_run_it(project: Path, tmp_path: Path, name: str) -> None:
    mark = tmp_path / "mark"
    environ = {**os.environ, "MARK": str(mark)}
    subprocess.run(
        ["sh", "-c", GIT[name].script], cwd=project, env=environ, check=False, timeout=60, capture_output=True
    )
    types(GIT[name].types, project)
    assert mark.exists()


ELSEWHERE = {
    "a repository": ("git init -q new", "new/.git"),
    "an editor's tasks": ("mkdir .vscode; echo {} > .vscode/tasks.json", ".vscode/tasks.json"),
    "a changed file": ("echo evil >> .envrc", ".envrc"),
    "a directory that was renamed": ("mv editor .vscode", ".vscode/tasks.json"),
    "a file that was renamed": ("mv harmless .envrc", ".envrc"),
    "a time that was set back": ("echo evil >> .envrc; touch -d 2001-01-01 .envrc", ".envrc"),
    "a file that leads to a repository": ("mkdir new; echo gitdir: ../x > new/.git", "new/.git"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_tools_of_the_host_obey_is_listed_when_the_program_has_left_it(
    workspace: Path, name: str
) -> None:
    script, path = ELSEWHERE[name]
    (workspace / "editor").mkdir()
    for file in ("editor/tasks.json", "harmless", ".envrc", ".editorconfig"):
        (workspace / file).write_text("old\n")
    time.sleep(0.05)  # else the files are as new as the run
    result = stockade.run(["sh", "-c", f"{script}; echo x > plain"], rw(workspace))
    assert [one.path for one in result.handoffs] == [str(workspace / path)]
    assert result.handoffs[0].reason


def test_what_was_there_before_is_not_listed(project: Path) -> None:
    (project / ".envrc").write_text("x\n")
    time.sleep(0.05)
    result = stockade.run(["sh", "-c", "echo x > plain; cat .envrc; git status"], rw(project)).check()
    assert result.handoffs == () and result.warnings == ()


def test_a_document_that_is_named_like_what_agents_read_is_not_listed(workspace: Path) -> None:
    script = "mkdir docs; echo x > docs/agents.md; echo x > docs/AGENTS.md"
    result = stockade.run(["sh", "-c", script], rw(workspace)).check()
    assert [one.path for one in result.handoffs] == [f"{workspace}/docs/AGENTS.md"]


def test_a_writable_grant_is_looked_through_in_every_mode(tmp_path: Path, workspace: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for mode in ("overlay", "ro"):
        policy = Policy(workspace={"path": str(workspace), "mode": mode}, write=[str(out)])
        result = stockade.run(["sh", "-c", f"git init -q {out}/{mode}"], policy, on_exit="discard")
        assert [one.path for one in result.handoffs] == [f"{out}/{mode}/.git"]


def test_a_living_sandbox_tells_it_when_it_is_closed(workspace: Path) -> None:
    with Sandbox(rw(workspace)) as box:
        assert box.run(["sh", "-c", "echo x > .envrc"]).handoffs == ()
        box.run(["rm", "-f", "nothing"]).check()
    assert [one.path for one in box.handoffs] == [str(workspace / ".envrc")]


def test_a_search_that_is_cut_is_said(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stockade.runs import handoffs

    monkeypatch.setattr(handoffs, "MOST_ENTRIES", 50)
    script = "for i in $(seq 100); do mkdir d$i; done; echo x > .envrc"
    result = stockade.run(["sh", "-c", script], rw(workspace))
    assert any(str(workspace) in warning and "is not listed" in warning for warning in result.warnings)


@pytest.mark.parametrize("living", [False, True])
def test_an_event_loop_goes_on_while_the_tree_is_looked_through(
    workspace: Path, living: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stockade.runs import handoffs

    search = handoffs.handoffs
    ticks = 0
    during: list[int] = []

    def counted_search(resolved: ResolvedPolicy, *, covered: bool) -> handoffs.Handoffs:
        before = ticks
        found = search(resolved, covered=covered)
        end = time.monotonic() + 10
        while ticks < before + 3 and time.monotonic() < end:
            time.sleep(0.001)
        during.append(ticks - before)
        return found

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        script = ["sh", "-c", "echo x > .envrc"]
        if living:
            async with AsyncSandbox(rw(workspace)) as box:
                await box.run(script)
            found = box.handoffs
        else:
            found = (await stockade.run_async(script, rw(workspace))).handoffs
        ticking.cancel()
        assert [one.path for one in found] == [str(workspace / ".envrc")]
        assert len(during) == 1 and during[0] >= 3

    monkeypatch.setattr(handoffs, "handoffs", counted_search)
    asyncio.run(main())


class TestGrants:
    """Repositories in what `write` grants, inside and outside the workspace."""

    @pytest.fixture
    def other(self, tmp_path: Path) -> Path:
        git("init", "-q", "--template=", str(tmp_path / "other"), at=tmp_path)
        time.sleep(0.05)  # else its files are as new as the run
        return tmp_path / "other"

    def test_one_in_a_grant_is_read_only(self, other: Path, workspace: Path) -> None:
        policy = Policy(workspace=str(workspace), write=[str(other)])
        result = stockade.run(["sh", "-c", f"echo x > {other}/x; echo x >> {other}/.git/config"], policy)
        assert not result.ok and (other / "x").exists() and result.warnings == ()

    def test_one_that_is_granted_by_name_is_writable_and_that_is_said(self, other: Path) -> None:
        policy = Policy(write=[str(other / ".git")])
        result = stockade.run(["sh", "-c", f"echo x >> {other}/.git/config"], policy).check()
        assert "git runs what the program leaves there" in result.warnings[0]
        assert [one.path for one in result.handoffs] == [str(other / ".git" / "config")]

    def test_where_a_linked_worktree_leads_is_read_only_under_any_name(
        self, tmp_path: Path, workspace: Path
    ) -> None:
        store = tmp_path / "stores" / "main"
        store.parent.mkdir()
        git("init", "-q", "--template=", f"--separate-git-dir={store}", str(workspace), at=tmp_path)
        (store / "HEAD.old").write_text("")
        policy = Policy(workspace=str(workspace), write=[str(store.parent)])
        assert not stockade.run(["sh", "-c", f"echo x >> {store}/config"], policy).ok
        assert stockade.run(["sh", "-c", f"echo x >> {store}/../beside"], policy).ok

    def test_a_bare_one_in_a_grant_is_a_cache_that_can_be_written(self, other: Path, workspace: Path) -> None:
        git("init", "-q", "--bare", "--template=", str(other / "cache"), at=other)
        time.sleep(0.05)
        policy = Policy(workspace=str(workspace), write=[str(other)])
        result = stockade.run(["sh", "-c", f"echo x > {other}/cache/config"], policy).check()
        assert [one.path for one in result.handoffs] == [str(other / "cache" / "config")]

    def test_a_child_gets_no_more_of_a_repository_than_its_parent(self, other: Path) -> None:
        from stockade.linux.user import Caller
        from stockade.resolve.child_policy import ChildRefusedError, child
        from stockade.resolve.resolution import resolve

        with resolve(Policy(write=[str(other)]), Caller.current(), str(other.parent / "state")) as parent:
            child({"write": [str(other)]}, parent, "native", {})
            for path in (other / ".git", other / ".git" / "config"):
                with pytest.raises(ChildRefusedError):
                    child({"write": [str(path)]}, parent, "native", {})


def test_a_repository_that_is_a_link_is_refused_by_name(project: Path) -> None:
    (project / ".git").rename(project.parent / "real")
    (project / ".git").symlink_to("../real")
    with pytest.raises(PolicyError, match=r"\.git cannot be protected: it is a link") as caught:
        stockade.run(["true"], rw(project))
    assert "--unprotect .git" in caught.value.hint


def test_the_landlock_backend_refuses_what_it_cannot_keep(project: Path) -> None:
    clauses = {"backend": "landlock", "protect": [], "accept": ["files", "processes", "devices"]}
    with pytest.raises(PolicyError, match=r"\.git is in a writable directory") as caught:
        stockade.run(["true"], rw(project, **clauses))
    assert "--unprotect .git" in caught.value.hint
    names = [".git", "deep/bare.git", "deep/nested/.git", "sub/.git", "tree/.git"]
    assert stockade.run(["true"], rw(project, **clauses | {"unprotect": names})).ok


def test_in_a_repository_that_was_given_up_what_is_new_is_listed(project: Path) -> None:
    (project / ".git" / "hooks" / "post-checkout").write_text("mine\n")
    (project / ".git" / "other").mkdir()
    (project / ".git" / "other" / "pre-push").write_text("old\n")
    time.sleep(0.05)
    policy = rw(project, unprotect=[*ABSENT, ".git"], protect=[])
    script = "echo x > .git/commondir; mkdir .git/modules/new; mv .git/other .git/modules/new/hooks"
    result = stockade.run(["sh", "-c", script], policy).check()
    assert [one.path.removeprefix(f"{project}/.git/") for one in result.handoffs] == [
        "commondir",
        "modules/new/hooks/pre-push",
    ]
    assert "git runs what the program leaves there" in result.warnings[0]


class TestCommandLine:
    """What the user reads, first and in words."""

    FLAGS = ("--unprotect", ".envrc", "--unprotect", ".vscode", "--unprotect", ".claude")

    def run(self, *words: str, at: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*STOCKADE, *words], cwd=at, capture_output=True, text=True, timeout=60, check=False
        )

    def test_the_refusal_says_what_to_type_and_that_works(self, workspace: Path) -> None:
        refused = self.run("run", "--mode", "rw", "--", "true", at=workspace)
        assert refused.returncode == 125
        assert " ".join(self.FLAGS) in refused.stderr
        assert self.run("run", "--mode", "rw", *self.FLAGS, "--", "true", at=workspace).stderr == ""

    def test_what_was_left_is_said_first(self, workspace: Path) -> None:
        script = "git init -q x; echo x > .envrc; exit 3"
        done = self.run("run", "--mode", "rw", *self.FLAGS, "--", "sh", "-c", script, at=workspace)
        lines = done.stderr.splitlines()
        assert done.returncode == 3 and lines[0].startswith("stockade: warning: your tools run or obey")
        assert any(f"{workspace}/x/.git: a repository" in line for line in lines[1:3])
        assert any(f"{workspace}/.envrc: " in line for line in lines[1:3])

    def test_json_has_it(self, workspace: Path) -> None:
        words = ("run", "--json", "--mode", "rw", *self.FLAGS, "--", "sh", "-c", "echo x > .envrc")
        told = json.loads(self.run(*words, at=workspace).stdout)
        assert [one["path"] for one in told["handoffs"]] == [f"{workspace}/.envrc"] and told["warnings"] == []

    @pytest.mark.parametrize("flags", [("--write", ".git"), ("--mode", "rw", *FLAGS, "--unprotect", ".git")])
    def test_a_repository_that_is_given_up_is_warned_of_before_the_command_runs(
        self, project: Path, flags: tuple[str, ...]
    ) -> None:
        done = self.run("run", *flags, "--", "sh", "-c", "echo ran >&2", at=project)
        first, second, *_ = done.stderr.splitlines()
        assert "git runs what the program leaves there" in first and second == "ran"
        assert done.stderr.count("warning") == 1

    def test_a_name_in_the_list_cannot_look_like_a_line_of_ours(self, workspace: Path) -> None:
        script = r'mkdir "$(printf "a\nstockade: all is well")"; cd a*; echo x > .envrc'
        done = self.run("run", "--mode", "rw", *self.FLAGS, "--", "sh", "-c", script, at=workspace)
        assert "\nstockade: all is well" not in done.stderr and ".envrc" in done.stderr


def test_one_that_was_given_up_needs_no_further_names(project: Path) -> None:
    """Its hooks are absent, and so are those of a submodule, whose directory lies in it."""
    for hooks in (".git/hooks", ".git/modules/sub/hooks"):
        shutil.rmtree(project / hooks, ignore_errors=True)
    policy = rw(project, unprotect=[*ABSENT, ".git"], protect=[])
    script = "git commit -qam x --allow-empty && git -C sub commit -qm x --allow-empty"
    who = {f"GIT_{role}_{what}": "a@b" for role in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
    assert stockade.run(["sh", "-c", script], policy, env=who).check().ok
