"""Where a command starts: in the directory where the user is, whatever chose the workspace."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from stockade.runs.register import register
from support.cli import STOCKADE, stockade_command
from support.kept import until
from support.screens import stockade

BASH = {"SHELL": "/bin/bash", "PS1": "", "INPUTRC": "/dev/null"}


@pytest.fixture
def sub(workspace: Path) -> Path:
    """A directory below the workspace's top."""
    (workspace / "sub" / "deep").mkdir(parents=True)
    return workspace / "sub"


def run(*arguments: str, cwd: Path) -> tuple[int, str, str]:
    done = stockade_command("run", *arguments, cwd=cwd)
    return done.returncode, done.stdout.strip(), done.stderr


def init(project: Path) -> None:
    done = stockade_command("init", cwd=project)
    assert done.returncode == 0, done.stderr


class TestAPolicyMadeByInit:
    @pytest.mark.parametrize("mode", ["overlay", "ro"])
    def test_works_from_a_subdirectory(self, workspace: Path, sub: Path, mode: str) -> None:
        init(workspace)
        (workspace / "top.txt").write_text("top\n")
        code, out, err = run("--mode", mode, "--", "sh", "-c", "pwd; cat ../top.txt", cwd=sub)
        assert (code, out) == (0, f"{sub}\ntop"), err
        assert f"stockade: the workspace is {workspace}, by {workspace}/stockade.toml\n" == err

    def test_writes_where_the_user_is_in_rw_mode(self, workspace: Path, sub: Path) -> None:
        (workspace / "stockade.toml").write_text(
            'unprotect = [".git/hooks", ".git/config", ".envrc", ".vscode", ".claude"]\n'
            '[workspace]\npath = "."\n'
        )
        assert stockade_command("trust", "--yes", cwd=workspace).returncode == 0
        code, _, err = run("--mode", "rw", "--", "touch", "made", cwd=sub)
        assert code == 0, err
        assert (sub / "made").exists() and not (workspace / "made").exists()

    def test_keeps_and_continues_one_workspace_for_all_its_directories(
        self, workspace: Path, sub: Path
    ) -> None:
        init(workspace)
        assert run("--", "sh", "-c", "echo 1 > out", cwd=sub)[0] == 0
        code, out, err = run("-w", "@", "--", "cat", "sub/out", cwd=workspace)
        assert (code, out) == (0, "1"), err
        assert run("-w", "@", "--", "cat", "../out", cwd=sub / "deep")[:2] == (0, "1")

    def test_hides_what_it_denies_there(self, workspace: Path, sub: Path) -> None:
        (sub / ".env").write_text("SECRET=1\n")
        init(workspace)
        code, out, _ = run("--", "cat", ".env", cwd=sub)
        assert code != 0 and "SECRET" not in out

    def test_may_change_within_the_users_own_policy(self, workspace: Path, sub: Path) -> None:
        init(workspace)
        written = (workspace / "stockade.toml").read_text()
        (workspace / "stockade.toml").write_text(f"# changed\n{written}")
        assert run("--", "pwd", cwd=sub)[:2] == (0, str(sub))
        (workspace / "stockade.toml").write_text(f"net = 'open'\n{written}")
        code, _, err = run("--", "pwd", cwd=sub)
        assert code == 125 and "has changed since you trusted it" in err

    def test_is_not_trusted_beyond_the_users_own_policy(
        self, workspace: Path, sub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        own = tmp_path / "config" / "stockade" / "config.toml"
        own.parent.mkdir(parents=True)
        own.write_text('[limits]\nwall = "5s"\n')
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        init(workspace)
        code, _, err = run("--", "pwd", cwd=workspace)
        assert code == 125 and "limits.wall" in err


class TestAProjectsFile:
    def test_needs_trust_to_show_more_than_where_the_user_is(self, workspace: Path, sub: Path) -> None:
        (workspace / "stockade.toml").write_text('[workspace]\npath = "."\n')
        code, _, err = run("--", "pwd", cwd=sub)
        assert code == 125
        assert f"asks for {workspace} as the workspace, and you are in {sub}" in err
        assert f"stockade trust {workspace}/stockade.toml" in err and "-w ." in err
        assert run("-w", ".", "--", "pwd", cwd=sub)[:2] == (0, str(sub))
        assert stockade_command("trust", "--yes", cwd=workspace).returncode == 0
        assert run("--", "pwd", cwd=sub)[:2] == (0, str(sub))

    def test_grants_count_from_its_own_directory(self, workspace: Path, sub: Path, tmp_path: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "data" / "x").write_text("shown\n")
        (workspace / "stockade.toml").write_text('read = ["../data"]\n[workspace]\npath = "."\n')
        assert stockade_command("trust", "--yes", cwd=workspace).returncode == 0
        code, out, err = run("--", "cat", str(tmp_path / "data" / "x"), cwd=sub)
        assert (code, out) == (0, "shown"), err

    def test_named_with_p_works_from_anywhere(self, workspace: Path, sub: Path) -> None:
        (workspace / "policy.toml").write_text('[workspace]\npath = "."\n')
        assert run("-p", "../policy.toml", "--", "pwd", cwd=sub)[:2] == (0, str(sub))
        assert run("-p", f"{workspace}/policy.toml", "--", "pwd", cwd=Path("/"))[:2] == (0, str(workspace))


class TestWhereTheUserIs:
    def test_the_command_starts_there_in_a_workspace_above(self, workspace: Path, sub: Path) -> None:
        assert run("-w", "..", "--", "pwd", cwd=sub) == (0, str(sub), "")
        assert run("-w", str(sub), "--", "pwd", cwd=workspace)[:2] == (0, str(sub))

    def test_links_on_the_way_do_not_matter(self, workspace: Path, sub: Path, tmp_path: Path) -> None:
        init(workspace)
        (tmp_path / "alias").symlink_to(workspace)
        script = f"cd {tmp_path}/alias/sub && {STOCKADE} run -- pwd && {STOCKADE} run -w .. -- pwd"
        done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout == f"{sub}\n{sub}\n", done.stderr

    def test_a_variable_does_not_decide_it(self, workspace: Path, sub: Path) -> None:
        init(workspace)
        done = stockade_command("run", "--", "pwd", cwd=sub, env={"PWD": str(workspace)})
        assert done.stdout == f"{sub}\n"

    def test_a_directory_that_was_removed_is_an_error_with_advice(self, workspace: Path) -> None:
        gone = workspace / "gone"
        lines = "\n".join(
            f"{STOCKADE} {words}"
            for words in ("run -- pwd", "run --mode ro -- pwd", "shell", f"run -w {workspace} -- pwd")
        )
        script = f"mkdir {gone} && cd {gone} && rmdir {gone}\n{lines}"
        done = subprocess.run(
            ["sh", "-c", script],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.stdout == f"{workspace}\n", done.stderr
        assert done.stderr.count("error: the current directory was removed") == 3
        assert "-w DIRECTORY" in done.stderr

    def test_a_directory_that_the_policy_hides_is_refused(self, workspace: Path, sub: Path) -> None:
        code, _, err = run("-w", "..", "--deny", "sub", "--", "pwd", cwd=sub)
        assert code == 125
        assert f'the directory {sub} is hidden by deny = "sub"' in err and "--cwd DIRECTORY" in err

    def test_a_directory_that_the_continued_workspace_lost_is_refused(
        self, workspace: Path, sub: Path
    ) -> None:
        assert run("-w", "..", "--", "rmdir", "deep", cwd=sub)[0] == 0
        code, _, err = run("-w", "@", "--", "pwd", cwd=sub / "deep")
        assert code == 125
        assert f"the workspace has no directory {sub}/deep: an earlier run in it removed" in err
        assert run("-w", "@", "--cwd", "..", "--", "pwd", cwd=sub / "deep")[0] == 125
        assert run("-w", "@", "--cwd", str(sub), "--", "pwd", cwd=sub / "deep")[:2] == (0, str(sub))

    def test_a_program_named_relative_to_it_is_found(self, workspace: Path, sub: Path) -> None:
        tool = sub / "tool"
        tool.write_text("#!/bin/sh\necho ran in $PWD\n")
        tool.chmod(0o755)
        assert run("-w", "..", "--", "./tool", cwd=sub)[:2] == (0, f"ran in {sub}")


class TestTheOption:
    def test_a_relative_name_counts_from_where_the_command_would_start(
        self, workspace: Path, sub: Path
    ) -> None:
        assert run("--cwd", "sub", "--", "pwd", cwd=workspace) == (0, str(sub), "")
        assert run("-w", "..", "--cwd", "deep", "--", "pwd", cwd=sub)[:2] == (0, f"{sub}/deep")
        assert run("-w", "..", "--cwd", "..", "--", "pwd", cwd=sub)[:2] == (0, str(workspace))
        assert run("-w", str(workspace), "--cwd", "sub", "--", "pwd", cwd=Path("/"))[:2] == (0, str(sub))

    def test_any_directory_of_the_sandbox_will_do(self, workspace: Path) -> None:
        assert run("--cwd", "/tmp", "--", "pwd", cwd=workspace)[:2] == (0, "/tmp")
        assert run("--cwd", "/usr/lib", "--", "pwd", cwd=workspace)[:2] == (0, "/usr/lib")

    def test_a_link_inside_leads_where_it_leads_inside(self, workspace: Path, tmp_path: Path) -> None:
        (tmp_path / "outside").mkdir()
        (workspace / "out").symlink_to(tmp_path / "outside")
        (workspace / "in").symlink_to("/tmp")
        assert run("--cwd", "in", "--", "pwd", "-P", cwd=workspace)[:2] == (0, "/tmp")
        assert run("--cwd", "out", "--", "pwd", cwd=workspace)[0] == 125

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nope", "has no directory"),
            ("file", "Not a directory"),
            ("", "--cwd '': is empty"),
            ("../state", "has no directory"),
        ],
    )
    def test_a_directory_that_is_not_there_is_refused(self, workspace: Path, name: str, message: str) -> None:
        (workspace / "file").touch()
        code, out, err = run(f"--cwd={name}", "--", "pwd", cwd=workspace)
        assert (code, out) == (125, "") and message in err

    def test_a_directory_of_the_host_that_is_not_shown_gets_a_hint(
        self, workspace: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "data").mkdir()
        code, _, err = run("--cwd", str(tmp_path / "data"), "--", "pwd", cwd=workspace)
        assert code == 125 and f"--read {tmp_path}/data" in err
        assert run("--read", f"{tmp_path}/data", "--cwd", f"{tmp_path}/data", "--", "pwd", cwd=workspace)[
            :2
        ] == (0, f"{tmp_path}/data")

    def test_the_plan_says_where_the_command_would_start(self, workspace: Path, sub: Path) -> None:
        done = stockade_command("plan", "-w", "..", "--", "pwd", cwd=sub)
        assert f"\nthen execute in {sub}: pwd\n" in done.stdout


@pytest.mark.parametrize("keep", [(), ("--keep",)])
def test_a_shell_starts_where_the_user_is(workspace: Path, sub: Path, keep: tuple[str, ...]) -> None:
    with stockade(sub, "shell", "-w", "..", *keep, environment=BASH) as terminal:
        terminal.type("echo in $(pwd)=\nexit\n")
        terminal.until(f"in {sub}=".encode())  # the screen may break the line
        assert terminal.code() == 0
    with stockade(workspace, "shell", "--cwd", "sub/deep", *keep, environment=BASH) as terminal:
        terminal.type("echo in $(basename $(pwd))=\nexit\n")
        terminal.until("in deep=")
        assert terminal.code() == 0
    until(lambda: not register.living(os.environ["STOCKADE_HOME"]))
