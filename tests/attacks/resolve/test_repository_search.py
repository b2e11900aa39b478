"""What version control obeys stays read-only, also where the search for it is hard or another policy asks.

An earlier run can prepare the tree that the next run's search goes through;
a delegated child, a project's policy and a ceiling name paths of their own.
In each attack a program tries to write what the host's git executes.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.sandbox.test_delegate import ask
from stockade import Policy, PolicyError, Result
from stockade.errors import SetupError
from stockade.resolve.discovery import discover
from stockade.workspace.version_control import repositories
from support.gits import git, somebody, types
from support.means import applies, need, need_program

#: What the default protects besides repositories, and an ordinary directory does not have.
ABSENT = [".envrc", ".vscode", ".claude"]
WEAK = {"backend": "landlock", "protect": [], "accept": ["files", "processes", "devices"]}
#: Appends to a configuration what makes `git status` touch $MARK.
FSMONITOR = 'printf "[core]\\nfsmonitor = \\"touch $MARK; false\\"\\n" >> '
HOOK = 'printf "#!/bin/sh\\ntouch $MARK\\n" > '


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody(tmp_path / "home", monkeypatch)


@pytest.fixture(params=["native", "bwrap"])
def backend(request: pytest.FixtureRequest) -> str:
    if request.param == "bwrap":
        need_program("bwrap")
    return str(request.param)


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    return tmp_path / "mark"


def rw(place: Path, **clauses: Any) -> Policy:
    return Policy(workspace={"path": str(place), "mode": "rw"}, **{"unprotect": ABSENT, **clauses})


def run(script: str, policy: Policy, mark: Path) -> Result:
    return stockade.run(["sh", "-c", script], policy, env={"MARK": str(mark)}, timeout=120)


def init(place: Path, *words: str) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    git("init", "-q", "--template=", *words, ".", at=place)
    return place


def separate(place: Path) -> None:
    """A repository whose .git is a file that leads to another directory."""
    (place / "meta").mkdir(parents=True)
    init(place, f"--separate-git-dir={place}/meta/g")


class TestWhatAnEarlierRunPrepares:
    def test_the_names_of_a_bare_one_beside_it_do_not_hide_a_repository(
        self, tmp_path: Path, workspace: Path, backend: str, mark: Path
    ) -> None:
        """For git the .git counts; and whatever lies below may have others."""
        project = init(tmp_path / "projects" / "proj")
        nested = init(project / "refs" / "nested")
        policy = Policy(workspace=str(workspace), write=[str(project.parent)], backend=backend)
        run(f"cd {project}; mkdir -p objects refs; echo x > HEAD", policy, mark).check()
        for place in (project, nested):
            assert not run(f"{FSMONITOR} {place}/.git/config", policy, mark).ok
            types("git status", place)
        assert not mark.exists()

    def test_in_the_workspace_neither_and_the_rest_stays_writable(
        self, workspace: Path, backend: str, mark: Path
    ) -> None:
        project = init(workspace / "proj")
        policy = rw(workspace, backend=backend)
        run("cd proj; mkdir objects refs; echo x > HEAD", policy, mark).check()
        assert not run(f"{FSMONITOR} proj/.git/config", policy, mark).ok
        run("echo x > proj/file", policy, mark).check()
        types("git status", project)
        assert not mark.exists()

    def test_the_repository_at_the_top_is_found_behind_any_number_of_files(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch, mark: Path
    ) -> None:
        init(workspace)
        monkeypatch.setattr(repositories, "MOST_ENTRIES", 0)
        # With a weaker wall the run starts although the search was cut.
        assert not run(f"{FSMONITOR} .git/config", rw(workspace, accept=["protect"]), mark).ok
        types("git status", workspace)
        assert not mark.exists()

    @pytest.mark.parametrize("bound", ["MOST_DIRECTORIES", "MOST_ENTRIES", "MOST_BYTES"])
    def test_a_search_that_does_not_fit_is_refused(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch, bound: str, mark: Path
    ) -> None:
        for number in range(30):
            (workspace / f"directory-{number}").mkdir()
        init(workspace / "directory-7" / "deep")
        script = f"{FSMONITOR} directory-7/deep/.git/config"
        assert not run(script, rw(workspace), mark).ok
        monkeypatch.setattr(repositories, bound, 20)
        with pytest.raises(PolicyError, match="the search for repositories") as caught:
            run(script, rw(workspace), mark)
        assert "accept" in caught.value.hint and "overlay" in caught.value.hint
        assert run("true", rw(workspace, accept=["protect"]), mark).ok

    @pytest.mark.parametrize("mode", ["000", "111", "333"])
    def test_a_directory_that_was_closed_is_refused_or_looked_into(
        self, workspace: Path, backend: str, mark: Path, mode: str
    ) -> None:
        lib = init(workspace / "vendor" / "lib")
        policy = rw(workspace, backend=backend)
        run(f"chmod {mode} vendor", policy, mark).check()
        script = f"chmod 755 vendor; {FSMONITOR} vendor/lib/.git/config"
        try:
            if os.getuid() == 0:
                with contextlib.suppress(SetupError):  # bubblewrap has no capability to enter it
                    assert not run(script, policy, mark).ok
            else:
                with pytest.raises(PolicyError, match="vendor could not be searched: Permission denied"):
                    run(script, policy, mark)
        finally:
            (workspace / "vendor").chmod(0o755)
        types("git status", lib)
        assert not mark.exists()

    def test_a_directory_that_is_closed_to_every_program_of_ours_is_no_reason(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of another user: what stands in for one is a directory of the system's."""
        applies(os.getuid() != 0, "root reads every directory")
        closed = next((path for path in ("/root", "/etc/ssl/private") if not os.access(path, os.X_OK)), "")
        need(bool(closed), "no directory of another user's is closed here")
        assert repositories.search([closed]).cut == ""

    def test_names_deeper_than_any_path_are_no_reason(self, workspace: Path, mark: Path) -> None:
        name = "n" * 250
        script = f"for i in $(seq 20); do mkdir {name} && cd {name}; done; touch file"
        try:
            run(script, rw(workspace), mark).check()
            run("true", rw(workspace), mark).check()
        finally:
            types(f"rm -rf {name}", workspace)

    def test_twelve_thousand_repositories_are_refused_in_seconds(self, workspace: Path, mark: Path) -> None:
        for number in range(12_000):
            os.makedirs(workspace / str(number) / ".git")
        start = time.monotonic()
        with pytest.raises(PolicyError, match="repositories, more than"):
            run("true", rw(workspace), mark)
        assert time.monotonic() - start < 20


class TestWhatAChildGets:
    """A delegated child writes nothing of what its parent may only read."""

    def test_of_what_the_parents_repositories_lead_to(
        self, workspace: Path, backend: str, mark: Path
    ) -> None:
        separate(workspace)
        git("init", "-q", "--template=", "--bare", "mirrors/v.git", at=workspace)
        git("config", "core.hooksPath", "tools/hk", at=workspace)
        for name in ("tools/hk", "tools/beside"):
            (workspace / name).mkdir(parents=True)
        policy = rw(workspace, backend=backend, delegate=True)
        attacks = {
            "meta": f"{FSMONITOR} {workspace}/meta/g/config",
            "mirrors": f"{FSMONITOR} {workspace}/mirrors/v.git/config",
            "mirrors/v.git": f"{FSMONITOR} {workspace}/mirrors/v.git/config",
            "tools": f"{HOOK} {workspace}/tools/hk/pre-commit",
            "tools/hk": f"{HOOK} {workspace}/tools/hk/pre-commit",
            "meta/g": f"{FSMONITOR} {workspace}/meta/g/config",
        }
        requests = [
            {"command": ["sh", "-c", script], "policy": {"write": [f"{workspace}/{name}"]}}
            for name, script in attacks.items()
        ]
        beside = {"write": [f"{workspace}/tools/beside"]}
        good = {"command": ["touch", f"{workspace}/tools/beside/x"], "policy": beside}
        answers, _ = ask(policy, *requests, good)
        for answer, name in zip(answers, attacks, strict=False):
            assert answer.get("exit_code") != 0, name
        assert answers[-1].get("exit_code") == 0, answers[-1]
        types("git status; git commit --allow-empty -qm x; git -C mirrors/v.git status", workspace)
        assert not mark.exists() and "fsmonitor" not in (workspace / "meta/g/config").read_text()
        assert not (workspace / "tools/hk/pre-commit").exists()

    def test_what_was_given_up_for_the_parent_is_for_the_child(self, workspace: Path) -> None:
        init(workspace)
        policy = rw(workspace, protect=[], unprotect=[".git"], delegate=True)
        command = ["sh", "-c", f"echo '#' >> {workspace}/.git/config"]
        (answer,), _ = ask(policy, {"command": command, "policy": {"write": [str(workspace)]}})
        assert answer.get("exit_code") == 0, answer


class TestAGrantGivesUpNothingByItself:
    """`write` of a path that the host's configuration makes version control run or obey."""

    @pytest.fixture
    def project(self, tmp_path: Path) -> Path:
        """A repository, what its configuration leads to, and one beside it with hooks elsewhere."""
        place = tmp_path / "src" / "p"
        separate(place)
        git("config", "core.hooksPath", "tools/hk", at=place)
        git("config", "include.path", f"{place}/cfg/extra", at=place)
        git("init", "-q", "--template=", "--bare", "v.git", at=place)
        beside = init(tmp_path / "src" / "beside")
        git("config", "core.hooksPath", str(tmp_path / "src" / "shared" / "hk"), at=beside)
        for path in (place / "tools/hk", place / "cfg", place / "out", tmp_path / "src/shared/hk"):
            path.mkdir(parents=True)
        (place / "cfg/extra").touch()
        (place / "tools/hk/pre-commit").touch(mode=0o755)
        return place

    OBEYED = (
        "tools/hk",
        "tools/hk/pre-commit",
        "cfg/extra",
        "meta/g",
        "meta/g/config",
        "meta/g/hooks",
        "v.git",
        "v.git/config",
    )

    @pytest.mark.parametrize("name", OBEYED)
    @pytest.mark.parametrize("mode", ["rw", "overlay"])
    def test_it_is_refused_until_unprotect_names_it(self, project: Path, name: str, mode: str) -> None:
        if name.endswith("hooks"):
            (project / name).mkdir()
        workspace = {"path": str(project), "mode": mode}
        clauses: dict[str, Any] = {"workspace": workspace, "write": [str(project / name)], "protect": []}
        with pytest.raises(PolicyError, match="version control runs or obeys files in") as caught:
            stockade.run(["true"], Policy(**clauses))
        flag = caught.value.hint.rpartition("--unprotect ")[2]
        assert name.startswith(flag)
        assert stockade.run(["true"], Policy(unprotect=[flag], **clauses)).ok

    def test_outside_the_workspace_an_absolute_path_gives_it_up(self, project: Path, workspace: Path) -> None:
        clauses: dict[str, Any] = {"workspace": str(workspace), "write": [str(project / "tools/hk")]}
        with pytest.raises(PolicyError) as caught:
            stockade.run(["true"], Policy(**clauses))
        flag = caught.value.hint.rpartition("--unprotect ")[2]
        script = f"echo x > {project}/tools/hk/pre-commit"
        assert stockade.run(["sh", "-c", script], Policy(unprotect=[flag], **clauses)).check().ok

    @pytest.mark.parametrize("name", [*OBEYED, "../shared", "../shared/hk", "tools", "../beside/.git"])
    @pytest.mark.parametrize("own", ["write", "workspace"])
    def test_a_project_that_is_not_trusted_cannot_name_it(
        self, project: Path, tmp_path: Path, name: str, own: str
    ) -> None:
        """Nor what would be found only from a repository that its policy does not write to."""
        if name.endswith("hooks"):
            (project / name).mkdir()
        config = tmp_path / "home/.config/stockade/config.toml"
        config.parent.mkdir(parents=True)
        src = project.parent
        clause = f'write = ["{src}"]' if own == "write" else f'workspace = {{path = "{src}", mode = "rw"}}'
        config.write_text(f"protect = []\n{clause}\n")
        narrow = '[workspace]\nmode = "ro"\n' if own == "workspace" else ""
        policies = [f'write = ["./{name}"]\n{extra}' for extra in {"", narrow}]
        for policy in policies:
            (project / "stockade.toml").write_text(policy)
            try:
                found = discover(str(project), dict(os.environ), str(tmp_path / "home"))
                script = f"echo x >> {project / 'tools/hk/pre-commit'}; echo x >> {src}/shared/hk/pre-commit"
                stockade.run(["sh", "-c", script], found.policy)
            except PolicyError:
                assert name != "tools"
        assert (project / "tools/hk/pre-commit").read_text() == "" and not list(src.glob("shared/hk/*"))
        (project / "stockade.toml").write_text('write = ["./out"]\n')
        assert discover(str(project), dict(os.environ), str(tmp_path / "home")).policy.write

    def test_the_same_letters_in_another_workspace_unprotect_something_else(self) -> None:
        other = rw(Path("/p"), unprotect=[".git"])
        mine = rw(Path("/p/vendor"), unprotect=[".git"])
        assert mine.excess(other) == ['unprotect = "/p/vendor/.git"']
        same = Policy(write=["/p"], unprotect=["/p/.git"], protect=[])
        assert same.within(rw(Path("/p"), unprotect=[".git"], protect=[]))


class TestWhatIsAbsent:
    def lead(self, place: Path) -> None:
        init(place)
        git("config", "core.hooksPath", "hk", at=place)
        git("config", "include.path", f"{place}/local.cfg", at=place)

    def test_in_a_grant_it_is_refused_as_in_the_workspace(
        self, tmp_path: Path, workspace: Path, backend: str
    ) -> None:
        project = tmp_path / "projects" / "proj"
        self.lead(project)
        clauses: dict[str, Any] = {"workspace": str(workspace), "write": [str(project.parent)]}
        with pytest.raises(PolicyError, match=f"{project}/hk, {project}/local.cfg") as caught:
            stockade.run(["true"], Policy(backend=backend, **clauses))
        assert f"--unprotect {project}/hk --unprotect {project}/local.cfg" in caught.value.hint
        given_up = [f"{project}/hk", f"{project}/local.cfg"]
        assert stockade.run(["true"], Policy(backend=backend, unprotect=given_up, **clauses)).ok

    def test_without_a_workspace_too_and_on_landlock(self, tmp_path: Path) -> None:
        project = tmp_path / "projects" / "proj"
        self.lead(project)
        with pytest.raises(PolicyError, match="could create"):
            stockade.run(["true"], Policy(write=[str(project.parent)]))
        given_up = [f"{project}/.git", f"{project}/local.cfg"]
        with pytest.raises(PolicyError, match=f"{project}/hk is in a writable directory"):
            stockade.run(["true"], Policy(write=[str(project.parent)], unprotect=given_up, **WEAK))

    def test_a_git_file_that_leads_to_nothing_is_refused(self, workspace: Path, backend: str) -> None:
        (workspace / ".git").write_text("gitdir: meta/g\n")
        with pytest.raises(PolicyError, match=f"{workspace}/meta/g") as caught:
            stockade.run(["true"], rw(workspace, backend=backend))
        assert "--unprotect meta/g" in caught.value.hint
        assert stockade.run(["true"], rw(workspace, backend=backend, unprotect=[*ABSENT, "meta/g"])).ok

    def test_a_git_file_with_many_empty_lines_leads_as_well(self, tmp_path: Path, mark: Path) -> None:
        separate(project := tmp_path / "projects" / "proj")
        with (project / ".git").open("a") as file:
            file.write("\n" * 20_000)
        policy = Policy(write=[str(project.parent)])
        assert not run(f"{FSMONITOR} {project}/meta/g/config", policy, mark).ok
        types("git status", project)
        assert not mark.exists()


class TestAWorkspaceThatIsARepository:
    @pytest.mark.parametrize("inner", [".", "hooks", "info"])
    @pytest.mark.parametrize("name", ["bare", "nonbare/.git"])
    def test_is_refused_in_mode_rw(
        self, tmp_path: Path, backend: str, name: str, inner: str, mark: Path
    ) -> None:
        place = tmp_path / name
        init(place.parent) if name.endswith(".git") else init(place, "--bare")
        (place / inner).mkdir(exist_ok=True)
        where = (place / inner).resolve()
        with pytest.raises(PolicyError, match="version control runs or obeys files in") as caught:
            run(f"{FSMONITOR} {place}/config", rw(where, backend=backend), mark)
        assert "overlay" in caught.value.hint and f"--unprotect {place}" in caught.value.hint
        assert run("true", rw(where, unprotect=[*ABSENT, str(place)]), mark).ok
        assert run("true", Policy(workspace=str(where)), mark).ok

    def test_on_landlock_as_well(self, tmp_path: Path, mark: Path) -> None:
        place = init(tmp_path / "bare", "--bare")
        with pytest.raises(PolicyError, match="version control runs or obeys files in"):
            run(f"{FSMONITOR} config", rw(place, **WEAK), mark)

    def test_a_worktree_in_a_bare_repository_is_an_ordinary_directory(self, tmp_path: Path) -> None:
        place = init(tmp_path / "first")
        git("commit", "--allow-empty", "-qm", "x", at=place)
        git("clone", "-q", "--bare", "--template=", str(place), str(tmp_path / "bare"), at=tmp_path)
        git("worktree", "add", "-q", "main", at=tmp_path / "bare")
        assert stockade.run(["touch", "file"], rw(tmp_path / "bare" / "main")).check().ok
