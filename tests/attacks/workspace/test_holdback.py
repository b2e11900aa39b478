"""Threat 59: files by which a program of the host later runs or obeys what the sandbox left.

The controls copy the layer by hand and let the real tool loose on it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Workspace
from stockade.resolve.discovery import discover
from support.commits import by_hand, held, sh, worked
from support.means import need

STOCKADE = str(Path(sys.executable).with_name("stockade"))
FIXTURES = Path(__file__).parents[2] / "fixtures" / "holdback"
GIT = "git -c user.name=x -c user.email=x@example.org -c core.fsmonitor=false"


class TestPublishedEscapes:
    def test_a_repository_in_the_repository_with_hooks_of_its_own(self, workspace: Path) -> None:
        """CVE-2026-26268: the agent's git, or the user's, runs them."""
        payload = workspace / "payload"
        script = (
            "mkdir -p lib/objects lib/refs lib/hooks; echo 'ref: refs/heads/x' > lib/HEAD;"
            "printf '[core]\\n\\trepositoryformatversion = 0\\n\\tbare = false\\n\\tworktree = %s\\n"
            '\\tfsmonitor = "touch %s #"\\n\''
            f" {workspace}/lib {payload} > lib/config;"
            "echo 'touch payload' > lib/hooks/post-checkout; chmod +x lib/hooks/post-checkout"
        )
        left = worked(workspace, script)
        assert set(held(left)) == {"lib/HEAD", "lib/config", "lib/hooks/post-checkout"}
        sh("git -C lib status; git -C lib checkout -b y", workspace)
        assert not payload.exists()
        by_hand(left)
        sh("git -C lib status", workspace)
        assert payload.exists(), "the control: copied by hand, git runs it"

    @pytest.mark.parametrize(
        "path",
        [
            ".claude/settings.json", ".claude/settings.local.json", "sub/.claude/settings.json",
            ".Claude/Settings.json", ".cursor/hooks.json", ".claude/hooks/start.sh", ".codex/hooks.json",
        ],
    )  # fmt: skip
    def test_hooks_in_an_agents_settings(self, workspace: Path, path: str) -> None:
        """CVE-2026-48124: another agent on the host runs them when its next session starts."""
        left = worked(workspace, 'mkdir -p "$(dirname "$1")"; echo {} > "$1"', path)
        assert held(left) == {path: "executes"}
        assert not (workspace / path).exists()

    def test_the_program_chooses_where_its_changes_land(self, workspace: Path, tmp_path: Path) -> None:
        """CVE-2026-50548: by the directory that it works in, and by files that a shell starts with."""
        outside = tmp_path / "outside"
        outside.mkdir()
        payload = workspace / "payload"
        script = (
            f"ln -s {outside} out; mkdir -p real/.local/bin; cd real; for name in .profile .bash_profile"
            f' .bashrc .zshenv .local/bin/git; do echo "touch {payload}" > "$name"; done;'
            "chmod +x .local/bin/git; cd ../out 2>/dev/null && echo x > planted || true"
        )
        left = worked(workspace, script)
        assert set(held(left)) == {
            f"real/{name}" for name in (".profile", ".bash_profile", ".bashrc", ".zshenv", ".local/bin/git")
        }
        sh(
            "bash -lc 'git --version'",
            workspace,
            HOME=f"{workspace}/real",
            PATH=f"real/.local/bin:{os.defpath}",
        )
        assert not payload.exists() and os.listdir(outside) == []
        by_hand(left)
        sh("bash -lc true", workspace, HOME=f"{workspace}/real")
        assert payload.exists(), "the control: copied by hand, a login shell runs it"

    def test_an_environment_of_python_whose_interpreter_is_a_script(self, workspace: Path) -> None:
        """GHSA-p9g2-cr55-cw9c: an editor starts what it takes for the project's interpreter."""
        payload = workspace / "payload"
        script = (
            f"mkdir -p .venv/bin .venv/lib; printf '#!/bin/sh\\ntouch {payload}\\n' > .venv/bin/python;"
            "chmod +x .venv/bin/python; ln -s python .venv/bin/python3; echo home=/tmp > .venv/pyvenv.cfg"
        )
        left = worked(workspace, script)
        assert set(held(left)) == {".venv/bin/python", ".venv/bin/python3", ".venv/pyvenv.cfg"}
        sh(".venv/bin/python3 -c 'import sys'", workspace)
        assert not payload.exists()
        by_hand(left)
        sh(".venv/bin/python3 -c 'import sys'", workspace)
        assert payload.exists(), "the control"

    def test_an_environment_that_is_led_elsewhere(self, workspace: Path) -> None:
        """The same by its configuration alone: the interpreter is the host's own."""
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", workspace / ".venv"], check=True)
        left = worked(workspace, "echo include-system-site-packages = true >> .venv/pyvenv.cfg")
        assert held(left) == {".venv/pyvenv.cfg": "executes"}

    @pytest.mark.parametrize("name", ["commondir", "config", "config.worktree", "modules/x/config"])
    def test_a_repositorys_metadata_that_leads_elsewhere(self, workspace: Path, name: str) -> None:
        """The Week of Sandbox Escapes: the host's git reads its configuration where the program says."""
        subprocess.run(["git", "init", "-q", workspace], check=True)
        payload = workspace / "payload"
        script = (
            "mkdir -p .git/modules/x evil;"
            f"printf '[core]\\n\\tfsmonitor = \"touch {payload} #\"\\n' > evil/config;"
            'cp -r .git/objects .git/refs evil; if test "$1" = commondir; then echo ../evil > .git/commondir;'
            'else cp evil/config ".git/$1"; fi'
        )
        left = worked(workspace, script, name)
        assert held(left)[f".git/{name}"] == "executes"
        sh("git status", workspace)
        assert not payload.exists()
        if name in ("commondir", "config"):
            by_hand(left)
            sh("git status", workspace)
            assert payload.exists(), "the control: copied by hand, git runs it"


def test_every_name_that_a_tool_obeys_stays_and_every_other_one_lands(workspace: Path) -> None:
    obeyed = (FIXTURES / "obeyed.txt").read_text().split()
    (workspace / "obeyed").write_text("".join(f"d{n}/{path}\n" for n, path in enumerate(obeyed)))
    others = [*(FIXTURES / "runs.txt").read_text().split(), *(FIXTURES / "ordinary.txt").read_text().split()]
    (workspace / "others").write_text("\n".join(others) + "\n")
    for name in (".git", ".hg", ".jj", ".sl"):
        (workspace / name).mkdir()  # a new repository would stay back as a whole
    script = 'cat obeyed others | while read -r path; do mkdir -p "${path%/*}"; echo x > "$path"; done'
    left = worked(workspace, script.replace('mkdir -p "${path%/*}"', 'mkdir -p "./$(dirname "$path")"'))
    shown = left.diff()
    done = left.commit(keep=True)
    held = [one for one in done.held if one.reason != "repository"]
    assert {one.path for one in held} == {f"d{n}/{path}" for n, path in enumerate(obeyed)}
    assert {one.reason for one in held} == {"executes"} and all(one.detail for one in done.held)
    assert not any(name.startswith("d") and name[1:].isdigit() for name in os.listdir(workspace))
    runs = set((FIXTURES / "runs.txt").read_text().split())
    assert {one.path for one in done.runs} == runs and all(one.what for one in done.runs)
    assert all((workspace / path).read_text() == "x\n" for path in others)
    # What is shown comes in the same order: what is held back, what runs next, the rest.
    ranks = [0 if one.held else 1 if one.runs else 2 for one in shown.files]
    assert ranks == sorted(ranks) and ranks.count(0) == len(done.held) and ranks.count(1) == len(runs)


class TestLinksOfTheHosts:
    """The tool's own name is a link of the user's, and the program changes what it leads to."""

    @pytest.mark.parametrize(
        ("link", "target", "path"),
        [
            ("CLAUDE.md", "docs/guide.md", "docs/guide.md"),
            ("docs/AGENTS.md", "new.md", "docs/new.md"),
            (".vscode", "meta/editor", "meta/editor/tasks.json"),
            (".github", "meta", "meta/workflows/ci.yml"),
            (".claude/settings.json", "../conf/claude.json", "conf/claude.json"),
            (".zed", "to-meta/zed", "meta/zed/tasks.json"),
        ],
    )
    def test_lead_a_tool_to_it(self, workspace: Path, link: str, target: str, path: str) -> None:
        (workspace / "docs").mkdir()
        (workspace / "docs" / "guide.md").write_text("mine\n")
        (workspace / "meta").mkdir()
        (workspace / "to-meta").symlink_to("meta")
        (workspace / link).parent.mkdir(exist_ok=True)
        (workspace / link).symlink_to(target)
        script = 'mkdir -p meta "$(dirname "$1")"; echo evil > "$1"; echo > sub.txt; echo > meta/x.txt'
        left = worked(workspace, script, path)
        done = left.commit(keep=True)
        assert [one.path for one in done.held] == [path] and "leads to it: " in done.held[0].detail
        assert (workspace / "sub.txt").exists() and (workspace / "meta" / "x.txt").exists()
        assert left.commit(allow=[path]).closed

    def test_that_lead_elsewhere_hold_nothing_back(self, workspace: Path, tmp_path: Path) -> None:
        (workspace / "CLAUDE.md").symlink_to("/etc/hostname")
        (workspace / "README").symlink_to("notes.md")
        (workspace / ".vscode").symlink_to(".vscode")
        assert worked(workspace, "echo x > notes.md; mkdir etc; echo x > etc/hostname").commit().closed


class TestARepositoryStaysWithItsFiles:
    @pytest.fixture
    def repository(self, workspace: Path) -> Path:
        (workspace / "a.py").write_text("1\n")
        (workspace / "AGENTS.md").write_text("be kind\n")
        (workspace / ".gitignore").write_text(".venv\n")
        sh(f"git init -q; git add -A; {GIT} commit -qm first", workspace)
        return workspace

    def status(self, place: Path) -> str:
        git = ["git", "--no-optional-locks", "-C", str(place), "status", "--porcelain"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout

    def log(self, place: Path) -> list[str]:
        git = ["git", "-C", str(place), "log", "--format=%s"]
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.split()

    @pytest.mark.parametrize("name", ["AGENTS.md", "sub/.envrc"])
    def test_a_commit_that_names_one_that_is_held_back(self, repository: Path, name: str) -> None:
        script = f'mkdir -p sub; echo evil >> "$1"; echo 2 > a.py; git add -A; {GIT} commit -qm second'
        left = worked(repository, script, name)
        done = left.commit(keep=True)
        reasons = {one.path: one.reason for one in done.held}
        assert reasons.pop(name) == "executes"
        assert reasons and set(reasons.values()) == {"repository"}
        assert all(path.startswith(".git/") for path in reasons) and ".git/index" in reasons
        why = next(one.detail for one in done.held if one.path == ".git/index")
        assert why == f".git names {name}, which is held back: the repository is held back with it"
        assert self.log(repository) == ["first"] and self.status(repository) == " M a.py\n"
        # Together they land, and git finds nothing amiss.
        assert left.commit(allow_exec_config=True).closed
        assert self.log(repository) == ["second", "first"] and self.status(repository) == ""

    @pytest.mark.parametrize(
        ("clauses", "name"),
        [({"deny": ["a.py"]}, "a.py"), ({"deny": ["**/a.*"]}, "a.py"), ({"protect": ["a.py"]}, "a.py")],
    )
    def test_a_commit_that_deletes_what_is_hidden_or_protected(
        self, repository: Path, clauses: dict[str, list[str]], name: str
    ) -> None:
        """`git commit -a` takes a hidden file for a deleted one: the branch would lose it."""
        script = f"rm -f {name}; echo 2 > b.py; git add -A; {GIT} commit -qm second"
        left = worked(repository, script, **clauses)
        done = left.commit(keep=True)
        reasons = {one.path: one.detail for one in done.held}
        assert "no longer names a.py, which the policy hides or protects" in reasons[".git/index"]
        assert self.log(repository) == ["first"] and self.status(repository) == "?? b.py\n"

    def test_a_commit_that_does_not_lands_without_it(self, repository: Path) -> None:
        script = (
            f"mkdir -p .venv/bin; echo x > .venv/bin/tool; echo 2 > a.py; git add -A; {GIT} commit -qm second"
        )
        left = worked(repository, script)
        assert held(left) == {".venv/bin/tool": "executes"}
        assert self.log(repository) == ["second", "first"] and self.status(repository) == ""

    def test_a_file_that_was_changed_and_not_recorded_keeps_no_repository(self, repository: Path) -> None:
        left = worked(repository, f"echo evil >> AGENTS.md; echo 2 > a.py; {GIT} commit -qm second a.py")
        assert held(left) == {"AGENTS.md": "executes"}
        assert self.log(repository) == ["second", "first"] and self.status(repository) == ""

    def test_one_that_the_program_made_stays_back(self, workspace: Path, tmp_path: Path) -> None:
        """A relative core.hooksPath of the user's counts from its top: files beside it would be hooks."""
        (workspace / "api").mkdir()
        script = """
            cd api; mkdir -p .git/objects .git/refs dev/hooks; echo "ref: refs/heads/master" > .git/HEAD
            printf '#!/bin/sh\\ntouch %s\\n' "$1" > dev/hooks/pre-commit; chmod +x dev/hooks/pre-commit
        """
        mark = tmp_path / "ran"
        config = tmp_path / "config"
        config.write_text("[core]\n\thooksPath = dev/hooks\n")
        command = f"cd api && {GIT} commit -q --allow-empty -m x"
        left = worked(workspace, script, str(mark))
        done = left.commit(keep=True)
        assert "api/dev/hooks/pre-commit" in [change.path for change in done.changes]
        assert {one.detail for one in done.held} == {
            "api/.git is a new repository, and your settings may run files in api"
        }
        assert not (workspace / "api/.git").exists() and not mark.exists()
        # The control: where the user takes it over, the hook runs.
        assert left.commit(allow=["api/.git"]).closed
        sh(command, workspace, GIT_CONFIG_GLOBAL=str(config))
        assert mark.exists()

    def test_the_user_may_part_them(self, repository: Path) -> None:
        left = worked(repository, f"echo evil >> AGENTS.md; git add -A; {GIT} commit -qm second")
        done = left.commit(allow=[".git"], keep=True)
        assert [one.path for one in done.held] == ["AGENTS.md"] and self.log(repository) == [
            "second",
            "first",
        ]

    def test_and_does_not_let_in_what_git_obeys_by_that(self, repository: Path) -> None:
        script = "echo x > .git/commondir; mkdir -p .git/modules/m sub; echo x > .git/modules/m/config"
        left = worked(repository, f"{script}; echo gitdir > sub/.git")
        done = left.commit(allow=[".git", "sub/.git"], keep=True)
        assert {one.path for one in done.held} == {".git/commondir", ".git/modules/m/config", "sub/.git"}
        assert left.commit(allow=[".git/modules/m"], keep=True).changes
        assert (repository / ".git" / "modules" / "m" / "config").exists()

    def test_naming_paths_does_not(self, repository: Path) -> None:
        left = worked(
            repository, f"echo evil >> AGENTS.md; echo 2 > a.py; git add -A; {GIT} commit -qm second"
        )
        done = left.commit([".git", "a.py"], keep=True)
        assert {one.reason for one in done.held} == {"repository"} and self.log(repository) == ["first"]

    @pytest.mark.parametrize(
        "index", ["DIRC", "x AGENTS.md", "DIRC\\0\\0\\0\\4x", "DIRC\\0\\0\\0\\2\\377\\377\\377\\377AGENTS.md"]
    )
    def test_an_index_that_cannot_be_read_names_everything(self, repository: Path, index: str) -> None:
        left = worked(repository, f"echo evil >> AGENTS.md; printf '{index}' > .git/index")
        assert held(left) == {"AGENTS.md": "executes", ".git/index": "repository"}

    def test_mercurials_list_counts_too(self, workspace: Path) -> None:
        left = worked(
            workspace, "mkdir .hg; echo xAGENTS.md > .hg/dirstate; echo 1 > .hg/other; echo > AGENTS.md"
        )
        assert set(held(left)) == {"AGENTS.md", ".hg/dirstate", ".hg/other", ".hg"}


class TestThePolicysPatterns:
    SCRIPT = (
        "mkdir -p deploy .vscode .zed; "
        "for f in deploy/x .vscode/tasks.json .zed/x y.sql; do echo x > $f; done"
    )

    def test_are_known_to_a_later_commit(self, workspace: Path) -> None:
        left = worked(workspace, self.SCRIPT, hold_back=["deploy", "*.sql"], allow_commit=[".vscode"])
        done = Workspace.open(left.id).commit(keep=True)
        assert {one.path: one.detail for one in done.held} == {
            "deploy/x": "the policy holds it back: deploy",
            "y.sql": "the policy holds it back: *.sql",
            ".zed/x": next(one.detail for one in done.held if one.path == ".zed/x"),
        }
        assert (workspace / ".vscode" / "tasks.json").exists()
        assert left.commit(allow=["deploy", "*.sql", ".zed"]).closed

    def test_allow_nothing_that_is_protected(self, workspace: Path) -> None:
        left = worked(workspace, self.SCRIPT, protect=[".vscode"], allow_commit=[".vscode", ".zed"])
        done = left.commit(allow=[".vscode"], keep=True)
        assert {one.reason for one in done.held} == {"protected"}
        assert {one.path for one in done.held} == {".vscode", ".vscode/tasks.json"}

    def test_of_several_runs_hold_what_any_of_them_was_to(self, workspace: Path) -> None:
        left = worked(workspace, self.SCRIPT, allow_commit=[".vscode", ".zed"])
        policy = Policy(workspace=str(workspace), protect=[], hold_back=["deploy"], allow_commit=[".zed"])
        assert stockade.run(["true"], policy, resume=left.id).ok
        assert set(held(Workspace.open(left.id))) == {"deploy/x", ".vscode/tasks.json"}

    def test_of_merged_workspaces_too(self, workspace: Path) -> None:
        one = worked(workspace, "echo x > a.sql; mkdir .zed; echo x > .zed/x", allow_commit=[".zed"])
        other = worked(workspace, "echo x > b.sql", hold_back=["*.sql"])
        one.merge(other)
        assert set(held(Workspace.open(one.id))) == {"a.sql", "b.sql", ".zed/x"}

    def test_of_a_project_nobody_trusts_may_hold_more_back_and_allow_nothing(self, workspace: Path) -> None:
        home = workspace.parent / "home"
        (home / ".config" / "stockade").mkdir(parents=True)
        (home / ".config" / "stockade" / "config.toml").write_text('hold_back = ["mine"]\n')
        file = workspace / "stockade.toml"
        file.write_text('workspace = "."\nhold_back = ["theirs"]\n')
        environ = {"HOME": str(home), "STOCKADE_HOME": str(workspace.parent / "state")}
        found = discover(str(workspace), environ, str(home), workspace=str(workspace))
        assert found.policy.hold_back == ("mine", "theirs")
        file.write_text('workspace = "."\nallow_commit = [".vscode"]\n')
        with pytest.raises(PolicyError, match=r"allow_commit = \"\.vscode\""):
            discover(str(workspace), environ, str(home), workspace=str(workspace))


class TestTheCommands:
    def call(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([STOCKADE, *words], capture_output=True, text=True, check=False)

    def test_show_what_is_held_back_first_and_then_what_runs_next(self, workspace: Path) -> None:
        left = worked(workspace, "for f in a.txt Makefile .npmrc z.txt; do echo x > $f; done")
        shown = self.call("diff", left.id).stdout
        places = [
            shown.index(name) for name in (".npmrc", "held back: the package", "Makefile", "runs at your")
        ]
        assert places == sorted(places) and shown.index("a.txt") > places[-1]
        assert self.call("diff", "--name-only", left.id).stdout.split() == [
            ".npmrc",
            "Makefile",
            "a.txt",
            "z.txt",
        ]
        files = json.loads(self.call("diff", "--json", left.id).stdout)["files"]
        assert [(one["path"], bool(one["held"]), bool(one["runs"])) for one in files] == [
            (".npmrc", True, False), ("Makefile", False, True), ("a.txt", False, False),
            ("z.txt", False, False),
        ]  # fmt: skip
        stat = self.call("diff", "--stat", left.id).stdout.splitlines()
        assert stat[0].endswith("held back") and stat[1].endswith("runs at your next command")

    def test_commit_says_both_and_takes_a_pattern(self, workspace: Path) -> None:
        left = worked(workspace, "for f in Makefile .npmrc .envrc; do echo x > $f; done")
        done = self.call("commit", left.id, "--allow", ".npmrc")
        assert done.returncode == 1
        assert "held back: .envrc: direnv loads it when a shell enters the directory" in done.stderr
        assert "runs at your next command: Makefile: make" in done.stderr
        assert (workspace / ".npmrc").exists() and not (workspace / ".envrc").exists()
        done = self.call("commit", left.id, "--allow", "../x")
        assert done.returncode == 125 and "is not in the workspace" in done.stderr
        again = json.loads(self.call("commit", left.id, "--json", "--allow-exec-config").stdout)
        assert again["ok"] and again["held"] == [] and again["runs"] == []

    def test_a_patch_of_both_classes_still_applies(self, workspace: Path) -> None:
        need(shutil.which("git") is not None, "git")
        left = worked(workspace, "mkdir -p s; for f in Makefile .npmrc s/a s/.envrc; do echo x > $f; done")
        patch = self.call("diff", "--patch", left.id).stdout
        subprocess.run(["git", "apply"], input=patch, text=True, cwd=workspace, check=True)
        assert (workspace / "s" / ".envrc").read_text() == "x\n"
