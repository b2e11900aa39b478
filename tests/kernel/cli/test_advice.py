"""What an error or a hint advises is right: each is what a user typed, read and typed next."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import stockade
from stockade import NotFoundError, Policy, Workspace
from support.cli import STOCKADE, stockade_command
from support.means import need_program
from support.screen import seen
from support.trees import changed

Done = subprocess.CompletedProcess[str]
Call = Callable[..., Done]


@pytest.fixture
def call(workspace: Path) -> Call:
    """`stockade` with these arguments in the workspace."""

    def start(*arguments: str) -> Done:
        return stockade_command(*arguments, cwd=workspace)

    return start


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own policy, to be written."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "stockade").mkdir(parents=True)
    return tmp_path / "config" / "stockade" / "config.toml"


class TestHiddenFiles:
    @pytest.mark.parametrize("word", ["certs/a.pem", "./certs/a.pem"])
    def test_the_clause_is_named(self, workspace: Path, call: Call, word: str) -> None:
        (workspace / "certs").mkdir()
        (workspace / "certs" / "a.pem").write_text("secret\n")
        for more in ([], ["--read", "certs"]):
            done = call("run", "--deny", "**/*.pem", *more, "--", "cat", word)
            assert 'certs/a.pem is hidden by deny = "**/*.pem"' in done.stderr
            assert "--read" not in done.stderr

    def test_also_without_a_slash(self, workspace: Path, call: Call) -> None:
        (workspace / ".env").write_text("secret\n")
        done = call("run", "--deny", ".env", "--", "cat", ".env")
        assert "hint: " in done.stderr and '.env is hidden by deny = ".env"' in done.stderr

    def test_a_hidden_command_too(self, workspace: Path, call: Call) -> None:
        (workspace / "tool").write_text("#!/bin/sh\n")
        (workspace / "tool").chmod(0o755)
        done = call("run", "--deny", "tool", "--", "./tool")
        assert 'hidden by deny = "tool"' in done.stderr

    def test_nobody_is_told_to_show_a_directory_of_all_homes(self, call: Call) -> None:
        done = call("run", "--", "ls", "/boot", "/mnt/x/..")
        assert "`--read /boot`" not in done.stderr and "`--read /boot/NAME`" in done.stderr


class TestGitInModeRw:
    def test_is_told_how_to_commit(self, workspace: Path, call: Call) -> None:
        need_program("git")
        subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
        (workspace / "a").write_text("1\n")
        free = [word for name in (".envrc", ".vscode", ".claude") for word in ("--unprotect", name)]
        for command in (["git", "add", "a"], ["sh", "-c", "git add a"]):
            done = call("run", "--mode", "rw", *free, "--", *command)
            if "could create these protected paths" in done.stderr:
                free = done.stderr.partition("if it may, add ")[2].partition(";")[0].split()
                done = call("run", "--mode", "rw", *free, "--", *command)
            assert done.returncode == 128, done.stderr
            assert "cannot change .git: `--unprotect .git` allows it" in done.stderr
        done = call("run", "--mode", "rw", *free, "--unprotect", ".git", "--", "git", "add", "a")
        assert done.returncode == 0 and "in mode rw the program cannot" not in done.stderr


class TestPlaces:
    """An error that is found when the policy meets the machine names the file and the line."""

    @pytest.mark.parametrize(
        ("text", "line"),
        [
            ('net = []\ndeny = ["**/.env"]\n', 2),
            ('read = [\n  "/usr",\n  "/srv/no/such",\n]\n', 3),
            ('exec = ["/srv/no/such/*"]\n', 1),
        ],
    )
    def test_of_the_users_own_policy(self, config: Path, call: Call, text: str, line: int) -> None:
        config.write_text(text)
        for command in ("run", "plan"):
            done = call(command, "--", "true")
            assert done.returncode == 125 and f"error: {config}:{line}: " in done.stderr, done.stderr

    @pytest.mark.parametrize("directory", ["short", "x" * 100])
    def test_of_the_projects(self, workspace: Path, directory: str) -> None:
        place = workspace / directory
        place.mkdir()
        (place / "pyproject.toml").write_text('[tool.stockade]\ndeny = ["keys/**/*.pem"]\n')
        done = stockade_command("run", "--", "true", cwd=place)
        assert f"error: {place}/pyproject.toml:2: deny = " in done.stderr

    def test_a_flag_has_none(self, config: Path, call: Call) -> None:
        config.write_text('deny = ["**/.env?"]\n')
        done = call("run", "--deny", "**/x.pem", "--", "true")
        assert done.returncode == 125 and 'error: deny = "**/x.pem": matches nothing' in done.stderr


class TestSuggestions:
    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ('mode = "rw"\n', "did you mean workspace.mode?"),
            ('memory = "1G"\n', "did you mean limits.memory?"),
            ("limts = {}\n", "did you mean limits?"),
            ('read = ["/a"]\nread = ["/b"]\n', "write each key and each table once"),
            ("read = [/a]\n", "write text in quotes"),
        ],
    )
    def test_in_a_policy(self, workspace: Path, call: Call, text: str, told: str) -> None:
        (workspace / "stockade.toml").write_text(text)
        done = call("run", "--", "true")
        assert done.returncode == 125 and told in done.stderr, done.stderr

    def test_of_an_option(self, call: Call) -> None:
        done = call("run", "--hold-back", "x", "--", "true")
        assert "`hold_back = ...` in stockade.toml" in done.stderr
        assert "did you mean --timeout?" in call("run", "--timeot", "1", "--", "true").stderr
        assert "did you mean --limit?" in call("run", "--limits", "cpu=1", "--", "true").stderr
        assert "--unprotect" not in call("run", "--protect", "x", "--", "true").stderr

    def test_of_the_network(self, call: Call) -> None:
        done = call("run", "--net", "any", "--", "true")
        assert done.returncode == 125 and "--net any: " in done.stderr
        assert "write '*' for every public host, --net open" in done.stderr

    def test_of_the_mode(self, workspace: Path, call: Call) -> None:
        (workspace / ".env").touch()
        done = call("run", "--mode", "rw", "--deny", ".env", "--", "true")
        assert done.returncode == 125 and "`--mode overlay`" in done.stderr

    def test_of_a_receipt(self, call: Call) -> None:
        done = call("run", "--receipt", "/nonexist/r.json", "--", "true")
        assert done.returncode == 125
        assert "--receipt /nonexist/r.json: cannot open the directory /nonexist" in done.stderr
        assert "mkdir -p /nonexist" in done.stderr


class TestWordsWithoutEffect:
    def test_are_told(self, call: Call, config: Path) -> None:
        config.write_text('pass_env = ["STOCKADE_OTHER"]\n')
        done = call("run", "--pass-env", "STOCKADE_NO_SUCH", "--unprotect", "nosuch", "--", "true")
        assert done.returncode == 0
        assert "warning: --pass-env STOCKADE_NO_SUCH: your environment has no such variable" in done.stderr
        assert "warning: --unprotect nosuch: the policy does not protect it" in done.stderr
        assert "STOCKADE_OTHER" not in done.stderr
        assert "pass_env = STOCKADE_OTHER" in call("run", "-v", "--", "true").stderr

    def test_others_are_not(self, call: Call) -> None:
        words = [
            "--pass-env",
            "PATH",
            "--unprotect",
            ".git",
            "--unprotect",
            "sub/.git",
            "--unprotect",
            ".envrc",
        ]
        done = call("run", *words, "--unprotect", ".vscode", "--", "true")
        assert "no such variable" not in done.stderr and "does not protect" not in done.stderr

    def test_a_name_to_hide_that_does_not_exist_is_said(self, call: Call, workspace: Path) -> None:
        (workspace / ".env").touch()
        done = call("run", "--deny", ".env,svc", "--deny", ".env", "--deny", "*.pem?", "--", "true")
        assert done.returncode == 0
        assert (
            "warning: --deny .env,svc: no such file exists now; Stockade hides it if it appears"
            in done.stderr
        )
        assert "--deny .env:" not in done.stderr and "*.pem" not in done.stderr

    @pytest.mark.parametrize("option", ["--commit", "--keep"])
    def test_changes_are_not_kept_where_there_is_no_workspace(
        self, call: Call, workspace: Path, monkeypatch: pytest.MonkeyPatch, option: str
    ) -> None:
        monkeypatch.setenv("HOME", str(workspace))
        done = call("run", option, "--", "touch", "kept")
        assert done.returncode == 125 and f"{option}: this run has no workspace" in done.stderr
        assert "-w DIRECTORY" in done.stderr


class TestInit:
    def test_secrets_are_hidden_at_any_depth(self, workspace: Path, call: Call) -> None:
        (workspace / "sub").mkdir()
        (workspace / "sub" / ".env").write_text("secret\n")
        assert call("init").returncode == 0
        assert "secret" not in call("run", "--", "sh", "-c", "cat sub/.env; echo x > .env; cat .env").stdout
        os.unlink(workspace / "sub" / ".env")
        assert call("run", "--", "true").returncode == 0

    @pytest.mark.parametrize("flags", [[], ["--force"]])
    def test_a_policy_in_pyproject_stays_the_only_one(
        self, workspace: Path, call: Call, flags: list[str]
    ) -> None:
        (workspace / "pyproject.toml").write_text("[tool.stockade]\nnet = []\n")
        done = call("init", *flags)
        assert done.returncode == 125 and "[tool.stockade] in " in done.stderr
        assert "--force" not in done.stderr and not (workspace / "stockade.toml").exists()
        assert call("run", "--", "true").returncode == 0

    def test_force_replaces_a_file_that_is_broken(self, workspace: Path, call: Call) -> None:
        (workspace / "stockade.toml").write_text("nonsense")
        assert call("init").returncode == 125
        assert call("init", "--force").returncode == 0 and call("run", "--", "true").returncode == 0


class TestPython:
    def test_a_path_that_is_forced_must_have_changed(self, workspace: Path) -> None:
        left = changed(workspace, "echo x > new")
        with pytest.raises(NotFoundError, match="'zz' has not changed"):
            left.commit(force=["zz"])
        assert Workspace.open(left.id).commit(force=["new"]).closed

    def test_a_policy_is_still_one(self, workspace: Path) -> None:
        assert stockade.run(["true"], Policy(workspace=str(workspace))).ok


class TestTrust:
    @pytest.fixture
    def project(self, workspace: Path) -> Path:
        (workspace / "stockade.toml").write_text('net = "open"\n')
        return workspace

    def test_a_change_since_is_said(self, project: Path, call: Call) -> None:
        assert "has changed since" not in call("run", "--", "true").stderr
        assert call("trust").returncode == 0 and call("run", "--", "true").returncode == 0
        (project / "stockade.toml").write_text('net = "open"\nread = ["/usr"]\n')
        done = call("run", "--", "true")
        assert done.returncode == 125 and "has changed since you trusted it, and asks for more" in done.stderr

    @pytest.mark.parametrize(
        ("answer", "flags", "code"), [(b"n\n", [], 1), (b"\n", [], 1), (b"y\n", [], 0), (b"", ["--yes"], 0)]
    )
    def test_a_terminal_is_asked(
        self, project: Path, call: Call, answer: bytes, flags: list[str], code: int
    ) -> None:
        got, screen = seen([STOCKADE, "trust", *flags], typed=answer, cwd=project)
        assert got == code and ("Trust this policy" in screen) == (not flags), screen
        assert call("run", "--", "true").returncode == (125 if code else 0)

    def test_a_profile_is_summarised(self, workspace: Path, call: Call) -> None:
        (workspace / "stockade.toml").write_text('profile = "dev"\nnet = "open"\n')
        done = call("run", "--", "true")
        assert done.returncode == 125 and len(done.stderr.splitlines()) < 8
        assert 'profile = "dev": strict, and your toolchains' in done.stderr
        assert "(`stockade profiles dev`)" in done.stderr
        assert 'net = "open": the host\'s network' in done.stderr

    def test_mode_rw_is_one_thing(self, workspace: Path, call: Call) -> None:
        (workspace / "stockade.toml").write_text('[workspace]\nmode = "rw"\n')
        done = call("run", "--", "true")
        assert done.returncode == 125 and "write" in done.stderr and "sockets" not in done.stderr


def test_a_signal_of_the_filters_own_may_be_a_programs(call: Call) -> None:
    done = call("run", "--", "sh", "-c", "kill -SYS $$")
    assert done.returncode == 126 and "or a program sent it that signal" in done.stderr
