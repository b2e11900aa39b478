"""Threat 59: what a commit lets by although no table names it: compiled code, removals, imported files.

The controls copy the layer by hand, or remove the file by hand, and let the real tool loose on it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from stockade import Workspace
from stockade.workspace.holdback import removals
from support.commits import by_hand, held, sh, worked
from support.means import need

#: The system's, which a sandbox has as well: both run what the other compiled.
PYTHON = "/usr/bin/python3"
#: Compiles code whose source is not there, with the header of the clean source.
PLANT = """
import importlib._bootstrap_external as external, os, sys
clean, mode, target = sys.argv[1:]
code = compile("open('payload', 'w').close()\\ndef hello(): return 'clean'", clean, "exec")
info = os.stat(clean)
if mode == "times":
    data = external._code_to_timestamp_pyc(code, int(info.st_mtime), info.st_size)
else:
    data = external._code_to_hash_pyc(code, b"x" * 8, mode == "checked")
os.makedirs(os.path.dirname(target) or ".", exist_ok=True)
open(target, "wb").write(data)
"""
TAG = subprocess.run(
    [PYTHON, "-c", "import sys; print(sys.implementation.cache_tag)"],
    capture_output=True,
    text=True,
    check=True,
).stdout.strip()


class TestCompiledCode:
    @pytest.fixture
    def project(self, workspace: Path) -> Path:
        (workspace / "util.py").write_text("def hello(): return 'clean'\n")
        (workspace / "main.py").write_text("import util; print(util.hello())\n")
        (workspace / "plant.py").write_text(PLANT)
        return workspace

    def plant(self, project: Path, target: str, mode: str = "times") -> Workspace:
        return worked(project, f'{PYTHON} plant.py util.py {mode} "$1"', target)

    def run(self, project: Path) -> bool:
        """Whether the payload runs when the user runs the project."""
        sh(f"{PYTHON} main.py", project, PYTHONDONTWRITEBYTECODE="")
        return (project / "payload").exists()

    @pytest.mark.parametrize("mode", ["times", "unchecked"])
    def test_that_replaces_a_clean_source_is_left_out(self, project: Path, mode: str) -> None:
        left = self.plant(project, f"__pycache__/util.{TAG}.pyc", mode)
        done = left.commit(keep=True)
        assert not done.held and not done.changes
        assert [note.path for note in done.notes] == [f"__pycache__/util.{TAG}.pyc"]
        assert "left out" in done.notes[0].what and "--allow '**/__pycache__'" in done.notes[0].what
        assert not (project / "__pycache__").exists() and not self.run(project)
        shutil.rmtree(project / "__pycache__", ignore_errors=True)
        by_hand(left)
        assert self.run(project), "the control: copied by hand, Python runs it"

    def test_without_a_source_is_held_back(self, project: Path) -> None:
        (project / "main.py").write_text("import random\n")
        left = self.plant(project, "random.pyc")
        assert held(left) == {"random.pyc": "executes"} and not self.run(project)
        by_hand(left)
        assert self.run(project), "the control"

    @pytest.mark.parametrize("target", ["../evil", "../evil.bin"])
    def test_behind_a_link_is_held_back(self, project: Path, target: str) -> None:
        (project / "sub").mkdir()
        name = "sub/__pycache__" if target == "../evil" else f"sub/__pycache__/util.{TAG}.pyc"
        left = worked(project, 'mkdir -p "$(dirname "$1")"; ln -s "$2" "$1"', name, target)
        assert held(left) == {name: "executes"}

    def test_keeps_no_workspace_and_is_said_once(self, project: Path) -> None:
        """What every run of Python leaves: many files in many directories."""
        script = (
            "for d in a b c; do mkdir -p pkg/$d; echo 1 > pkg/$d/__init__.py; done;"
            f"{PYTHON} -m compileall -q pkg util.py"
        )
        done = worked(project, script).commit()
        assert done.closed and not done.held
        assert len(done.notes) == 1 and "3 more" in done.notes[0].what
        assert {one.path for one in done.changes} >= {"pkg/a/__init__.py", "pkg/c/__init__.py"}
        assert not list(project.rglob("__pycache__"))

    def test_says_nothing_that_the_program_wrote_as_a_command(self, project: Path) -> None:
        place = "x'; id; '/tmp/cache/bootsnap"
        done = worked(project, 'mkdir -p "$1"; echo x > "$1/y"', place).commit()
        assert done.closed and done.notes[0].what.endswith("--allow '**/tmp/cache/bootsnap' commits it")

    def test_lands_if_the_user_says_so(self, project: Path) -> None:
        name = f"__pycache__/util.{TAG}.pyc"
        left = self.plant(project, name)
        assert left.commit(allow_exec_config=True, keep=True).changes == ()
        assert left.commit(allow=["**/*.pyc"]).closed and (project / name).exists()

    def test_does_not_come_in_by_a_repository_that_records_it(self, project: Path) -> None:
        need(shutil.which("git") is not None, "git")
        sh("git init -q && git add -A && git -c user.name=x -c user.email=x@y commit -qm 1", project)
        script = f'{PYTHON} plant.py util.py times "$1"; git add -A'
        left = worked(project, script, f"__pycache__/util.{TAG}.pyc")
        done = left.commit(keep=True)
        assert done.held and {one.reason for one in done.held} == {"repository"} and not done.closed

    def test_of_the_hosts_may_go(self, project: Path) -> None:
        self.run(project)
        assert (project / "__pycache__").exists()
        assert worked(project, "rm -r __pycache__").commit().closed
        assert not (project / "__pycache__").exists()


class TestRemovals:
    """A file that restricts a tool is as good as changed once it is gone."""

    @pytest.mark.parametrize(
        ("path", "script"),
        [
            (".npmrc", "rm .npmrc"),
            (".npmrc", "mv .npmrc npmrc.old"),
            (".npmrc", "rm .npmrc; mkdir .npmrc"),
            ("sub/.npmrc", "cp -r sub keep; rm -r sub; mv keep sub; rm sub/.npmrc"),
            ("CODEOWNERS", "rm CODEOWNERS"),
            (".pre-commit-config.yaml", "rm .pre-commit-config.yaml"),
            ("stockade.toml", "rm stockade.toml"),
            (".githooks", "rm -r .githooks"),
            (".githooks", "chmod 000 .githooks"),
            (".githooks/pre-commit", "rm .githooks/pre-commit"),
            (".githooks/pre-commit", "chmod -x .githooks/pre-commit"),
            (".github", "rm -r .github"),
            (".github", "rm -r .github; echo x > .github"),
            (".github/workflows", "rm -r .github/workflows"),
            ("docs/guide.md", "rm docs/guide.md"),
            ("hk/pre-push", "rm hk/pre-push"),
            ("hk", "rm -r hk"),
        ],
    )
    def test_of_what_a_tool_obeys_are_held_back(self, workspace: Path, path: str, script: str) -> None:
        self.fill(workspace)
        left = worked(workspace, f"{script}; echo x > other.txt")
        done = left.commit(keep=True)
        assert {one.path for one in done.held} == {path}, done.held
        assert done.held[0].reason == "executes" and done.held[0].detail
        assert (workspace / path).exists() and (workspace / "other.txt").exists()
        shown = {one.path: one.held for one in left.diff().files}
        assert shown[path]
        assert left.commit(allow=[path]).closed

    def fill(self, place: Path) -> None:
        files = (
            ".npmrc sub/.npmrc sub/a.js CODEOWNERS .pre-commit-config.yaml stockade.toml "
            ".githooks/pre-commit .github/workflows/ci.yml .github/FUNDING.md docs/guide.md hk/pre-push "
            ".venv/bin/python .venv/pyvenv.cfg node_modules/.bin/x node_modules/x/.npmrc app/AGENTS.md "
            "app/.npmrc app/b.py bin/tool"
        )
        for name in files.split():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("ignore-scripts=true\n")
            (place / name).chmod(0o755)
        (place / "CLAUDE.md").symlink_to("docs/guide.md")
        sh("git init -q; git config core.hooksPath hk; rm -rf .git/hooks", place)

    @pytest.mark.parametrize(
        "name", [".venv", "node_modules", ".venv/bin/python", "app", "bin", "sub", ".github/FUNDING.md"]
    )
    def test_of_programs_and_of_whole_projects_are_not(self, workspace: Path, name: str) -> None:
        """What goes together with all that it governs loosens nothing."""
        self.fill(workspace)
        done = worked(workspace, 'rm -r "$1"', name).commit()
        assert done.closed and not done.held and not (workspace / name).exists()

    def test_of_a_large_environment_costs_no_question(self, workspace: Path) -> None:
        place = workspace / ".venv" / "lib" / "python3.11" / "site-packages"
        place.mkdir(parents=True)
        for n in range(removals.MOST_ENTRIES + 1):
            (place / f"{n}.py").touch()
        assert worked(workspace, "rm -r .venv; chmod 700 .").commit().closed

    def test_of_more_than_is_looked_at_are_held_back(self, workspace: Path) -> None:
        (workspace / ".github" / "x").mkdir(parents=True)
        for n in range(removals.MOST_ENTRIES + 1):
            (workspace / ".github" / "x" / f"{n}.md").touch()
        assert held(worked(workspace, "rm -r .github")) == {".github": "executes"}

    def test_of_a_package_managers_settings_would_run_scripts(self, workspace: Path) -> None:
        need(shutil.which("npm") is not None, "npm")
        (workspace / ".npmrc").write_text("ignore-scripts=true\n")
        (workspace / "dep").mkdir()
        (workspace / "dep" / "package.json").write_text(
            '{"name": "dep", "version": "1.0.0", "scripts": {"postinstall": "touch ../payload"}}'
        )
        (workspace / "package.json").write_text('{"dependencies": {"dep": "file:dep"}}')
        install = "npm install --offline --no-audit --no-fund --install-links=false"
        left = worked(workspace, "rm .npmrc")
        assert held(left) == {".npmrc": "executes"}
        sh(install, workspace, HOME=str(workspace))
        assert not (workspace / "payload").exists()
        shutil.rmtree(workspace / "node_modules", ignore_errors=True)
        (workspace / ".npmrc").unlink()
        sh(install, workspace, HOME=str(workspace))
        assert (workspace / "payload").exists(), "the control: without the file npm runs it"


class TestFilesThatObeyedFilesName:
    """The host's own CLAUDE.md, .envrc or hook names a file, which the program changes."""

    @pytest.mark.parametrize(
        ("source", "content", "path"),
        [
            ("CLAUDE.md", "See @docs/rules.md.", "docs/rules.md"),
            ("CLAUDE.md", "- @./docs/rules.md\n", "docs/rules.md"),
            ("CLAUDE.md", "See @README for more", "README"),
            ("CLAUDE.md", "@docs/first.md", "docs/deep/second.md"),
            ("docs/GEMINI.md", "@../shared/x.md", "shared/x.md"),
            ("AGENTS.md", "(@docs/not-there-yet.md)", "docs/not-there-yet.md"),
            (".claude/CLAUDE.md", "@../docs/rules.md", "docs/rules.md"),
            (".envrc", "source_env_if_exists env.d/x\n", "env.d/x"),
            (".envrc", "export A=1; . ./env.d/x\n", "env.d/x"),
            (".envrc", "dotenv env.d/x", "env.d/x"),
            (".envrc", "source_env env.d/outer", "env.d/inner"),
            (".envrc", 'eval "$(./tools/start.sh)"', "tools/start.sh"),
            (".envrc", "PATH_add tools/bin", "tools/bin/git"),
            (".envrc", 'export PATH="$PWD/tools/bin:$PATH"', "tools/bin/git"),
            (".envrc", "use flake", "flake.nix"),
            (
                ".claude/settings.json",
                '{"hooks": {"Stop": [{"hooks": [{"command": "$CLAUDE_PROJECT_DIR/tools/start.sh -v"}]}]}}',
                "tools/start.sh",
            ),
            (".claude/settings.json", '{"statusLine": {"command": "bash tools/start.sh"}}', "tools/start.sh"),
            (
                ".mcp.json",
                '{"mcpServers": {"a": {"command": "node", "args": ["tools/mcp.js"]}}}',
                "tools/mcp.js",
            ),
            (
                ".mcp.json",
                '{"mcpServers": {"a": {"command": "python", "args": ["-m", "tools.server"]}}}',
                "tools/server.py",
            ),
            (
                ".vscode/mcp.json",
                '{"servers": {"a": {"command": "./tools/start.sh"}} /* c */}',
                "tools/start.sh",
            ),
            ("opencode.json", '{"instructions": ["docs/rules.md"]}', "docs/rules.md"),
            (".codex/config.toml", 'notify = ["python3", "tools/notify.py"]', "tools/notify.py"),
            ("mise.toml", '[env]\n_.source = "env.d/x"', "env.d/x"),
            (
                ".pre-commit-config.yaml",
                "repos:\n- repo: local\n  hooks:\n  - id: x\n    entry: tools/start.sh\n",
                "tools/start.sh",
            ),
            (
                ".pre-commit-config.yaml",
                "- entry: bash -c 'exec tools/start.sh \"$@\"' --\n",
                "tools/start.sh",
            ),
            ("lefthook.yml", "pre-commit:\n  jobs:\n  - run: ./tools/start.sh {files}\n", "tools/start.sh"),
            (".devcontainer/devcontainer.json", '{"initializeCommand": "tools/start.sh"}', "tools/start.sh"),
        ],
    )
    def test_are_held_back_with_the_name_of_the_file(
        self, workspace: Path, source: str, content: str, path: str
    ) -> None:
        self.fill(workspace)
        (workspace / source).parent.mkdir(exist_ok=True)
        (workspace / source).write_text(content)
        script = 'mkdir -p "$(dirname "$1")"; echo evil >> "$1"; echo x > docs/other.md; echo x > main.py'
        left = worked(workspace, script, path)
        done = left.commit(keep=True)
        assert [one.path for one in done.held] == [path], done
        assert " names it: " in done.held[0].detail
        assert (workspace / "docs" / "other.md").exists() and (workspace / "main.py").exists()
        if source != "docs/GEMINI.md":  # a diff looks only above what it shows
            assert next(one.held for one in left.diff().files if one.path == path)
        assert left.commit(allow=[path]).closed

    def fill(self, place: Path) -> None:
        for name in ("docs/deep", "tools/bin", "env.d", "shared", ".claude"):
            (place / name).mkdir(parents=True)
        (place / "README").write_text("x\n")
        (place / "docs" / "first.md").write_text("@deep/second.md\n")
        (place / "docs" / "rules.md").write_text("be kind\n")
        (place / "env.d" / "outer").write_text("source_env inner\n")
        (place / "tools" / "start.sh").write_text("#!/bin/sh\n")

    def test_are_those_of_the_host_and_not_of_the_layer(self, workspace: Path) -> None:
        self.fill(workspace)
        (workspace / "CLAUDE.md").write_text("@docs/rules.md\n")
        left = worked(workspace, "echo > CLAUDE.md; echo evil > docs/rules.md; echo @README > docs/first.md")
        assert set(held(left)) == {"CLAUDE.md", "docs/rules.md"}

    @pytest.mark.parametrize("script", ["rm docs/rules.md", "rm -r docs", "mv docs d; ln -s d docs"])
    def test_may_not_be_removed_or_replaced(self, workspace: Path, script: str) -> None:
        self.fill(workspace)
        (workspace / "CLAUDE.md").write_text("@docs/rules.md\n")
        assert set(held(worked(workspace, script))) & {"docs", "docs/rules.md"}

    def test_ordinary_words_hold_nothing_back(self, workspace: Path) -> None:
        self.fill(workspace)
        (workspace / "CLAUDE.md").write_text(
            "Write to me@docs/rules.md or @someone; `npm i @types/node`; see docs/rules.md and [it](README)."
        )
        (workspace / ".envrc").write_text(
            "# source docs/rules.md\nexport DATA=docs/rules.md\nlayout python\nwatch_file README\n"
        )
        (workspace / ".claude" / "settings.json").write_text(
            '{"permissions": {"allow": ["Read(docs/rules.md)", "Bash(tools/start.sh)"], "deny": ["README"]}}'
        )
        (workspace / ".pre-commit-config.yaml").write_text(
            "exclude: docs/rules.md\nrepos:\n- repo: https://x/y\n  rev: v1\n  hooks: [{id: a}]\n"
        )
        script = "for f in docs/rules.md README tools/start.sh types; do echo x > $f; done"
        assert worked(workspace, script).commit().closed

    def test_direnv_would_run_one(self, workspace: Path) -> None:
        need(shutil.which("direnv") is not None, "direnv")
        (workspace / "env.d").mkdir()
        (workspace / "env.d" / "x").write_text("export A=1\n")
        (workspace / ".envrc").write_text("source_env_if_exists env.d/x\n")
        home = str(workspace.parent / "home")
        sh("direnv allow .", workspace, HOME=home)
        left = worked(workspace, "echo 'touch payload' >> env.d/x")
        assert held(left) == {"env.d/x": "executes"}
        sh("direnv export bash", workspace, HOME=home)
        assert not (workspace / "payload").exists()
        by_hand(left)
        sh("direnv export bash", workspace, HOME=home)
        assert list(workspace.rglob("payload")), "the control: copied by hand, direnv runs it unasked"

    @pytest.mark.parametrize(
        ("envrc", "name", "before", "after"),
        [
            ('eval "$(make -s env)"', "Makefile", "env:\n\t@echo A=1\n", "env:\n\t@touch payload\n"),
            (
                'eval "$(devbox shellenv --init-hook)"',
                "devbox.json",
                '{"shell": {"init_hook": "echo"}}',
                '{"shell": {"init_hook": "touch payload"}}',
            ),
        ],
    )
    def test_direnv_would_run_what_its_managers_of_environments_evaluate(
        self, workspace: Path, envrc: str, name: str, before: str, after: str
    ) -> None:
        need(shutil.which("direnv") is not None, "direnv")
        need(shutil.which("make") is not None, "make")
        home, programs = workspace.parent / "home", workspace.parent / "programs"
        programs.mkdir()
        # Prints the hook for direnv to evaluate, as devbox does.
        program = r"""sed 's/.*init_hook": "\([^"]*\).*/\1/' devbox.json"""
        (programs / "devbox").write_text(f"#!/bin/sh\n{program}\n")
        (programs / "devbox").chmod(0o755)
        environment = {"HOME": str(home), "PATH": f"{programs}:{os.environ['PATH']}"}
        (workspace / name).write_text(before)
        (workspace / ".envrc").write_text(f"{envrc}\n")
        sh("direnv allow .", workspace, **environment)
        left = worked(workspace, 'printf %s "$2" > "$1"', name, after)
        assert held(left) == {name: "executes"}
        sh("direnv export bash", workspace, **environment)
        assert not (workspace / "payload").exists()
        by_hand(left)
        sh("direnv export bash", workspace, **environment)
        assert (workspace / "payload").exists(), "the control: copied by hand, it runs at the next cd"

    def test_of_the_users_own_settings_count(self, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.fill(workspace)
        home = workspace.parent / "home"
        (home / ".claude").mkdir(parents=True)
        (home / ".claude" / "settings.json").write_text(
            '{"hooks": {"Stop": [{"command": "tools/start.sh"}]}}'
        )
        left = worked(workspace, "echo evil >> tools/start.sh")
        monkeypatch.setenv("HOME", str(home))
        assert held(left) == {"tools/start.sh": "executes"}
