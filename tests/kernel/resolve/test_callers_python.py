"""`python3` inside is the caller's own: one rule for runs, sandboxes, interpreters, shells and functions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from support import bubblewraps
from support.cli import stockade_command
from support.installs import SYSTEM_PATH
from support.means import need

PREFIX = "import sys; print(sys.prefix)"
SYSTEM_PYTHON = "/usr/bin/python3"


@pytest.fixture(autouse=True)
def nothing_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests run in a virtual environment that nobody has activated."""
    need(sys.prefix != sys.base_prefix, "the tests do not run in a virtual environment")
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)


def made_venv(place: Path, *modules: str) -> Path:
    """A real virtual environment of the system's Python, with modules in it."""
    need(os.access(SYSTEM_PYTHON, os.X_OK), f"{SYSTEM_PYTHON} is not installed")
    subprocess.run([SYSTEM_PYTHON, "-m", "venv", "--without-pip", str(place)], check=True, timeout=60)
    (packages,) = (place / "lib").glob("python3*/site-packages")
    for name in modules:
        (packages / f"{name}.py").write_text(f"where = {str(place)!r}\nprint(where)\n")
    return place


def script(venv: Path, name: str) -> None:
    """A program that pip would install: its first line names the environment's Python."""
    (venv / "bin" / name).write_text(f"#!{venv}/bin/python3\nimport sys; print(sys.argv[0], sys.prefix)\n")
    (venv / "bin" / name).chmod(0o755)


@stockade.sandboxed(Policy())
def prefix_inside() -> str:
    return sys.prefix


def test_run_starts_the_python_of_the_supervisor() -> None:
    assert stockade.run(["python3", "-c", PREFIX]).text.strip() == sys.prefix


def test_a_living_sandbox_starts_the_python_of_the_supervisor() -> None:
    with Sandbox() as box:
        assert box.run(["python3", "-c", PREFIX]).text.strip() == sys.prefix


def test_an_interpreter_is_the_python_of_the_supervisor() -> None:
    with Sandbox() as box, box.python() as python:
        assert python.run("import sys; sys.prefix").value == sys.prefix


def test_a_shell_finds_the_python_of_the_supervisor() -> None:
    with Sandbox() as box, box.shell() as shell:
        assert shell.run(f"python3 -c '{PREFIX}'").text.strip() == sys.prefix


@pytest.mark.parametrize("command", [["sh", "-c"], ["env", "sh", "-c"]])
def test_a_program_that_starts_others_finds_the_python_of_the_supervisor(command: list[str]) -> None:
    assert stockade.run([*command, f"python3 -c '{PREFIX}'"]).text.strip() == sys.prefix


def test_a_function_runs_in_the_same_python() -> None:
    assert prefix_inside() == sys.prefix


def test_the_caller_can_decide_otherwise() -> None:
    paths = {"PATH": "/usr/bin:/bin"}
    for policy in (Policy(toolchain=False), Policy(env=paths)):
        assert stockade.run(["python3", "-c", PREFIX], policy).text.strip() != sys.prefix
    assert stockade.run([SYSTEM_PYTHON, "-c", PREFIX]).text.strip() == "/usr"


def test_a_program_of_the_system_is_shown_no_environment() -> None:
    assert stockade.run(["ls", sys.prefix]).exit_code == 2


def test_the_command_line_does_not_use_the_python_that_it_runs_on(workspace: Path) -> None:
    found = stockade_command("run", "--", "python3", "-c", PREFIX, cwd=workspace)
    assert found.stdout.strip() == "/usr", found.stderr


@pytest.mark.parametrize("command", [["python3", "-c", PREFIX], ["sh", "-c", f"python3 -c '{PREFIX}'"]])
def test_the_command_line_uses_the_active_environment(
    workspace: Path, tmp_path: Path, command: list[str]
) -> None:
    venv = made_venv(tmp_path / "active")
    found = stockade_command("run", "--", *command, cwd=workspace, env={"VIRTUAL_ENV": str(venv)})
    assert found.stdout.strip() == str(venv), found.stderr


def test_a_program_that_only_the_projects_environment_has_is_found_there(workspace: Path) -> None:
    script(made_venv(workspace / ".venv"), "check-it")
    for words in (["check-it"], ["sh", "-c", "check-it"]):
        found = stockade_command("run", "--discard", "--", *words, cwd=workspace)
        assert found.stdout == f"{workspace}/.venv/bin/check-it {workspace}/.venv\n", found.stderr
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        assert box.run(["check-it"]).ok


def test_a_projects_environment_does_not_come_before_what_you_have(workspace: Path) -> None:
    """Else a repository could put its own program in the place of yours, with everything you grant to it."""
    venv = made_venv(workspace / ".venv")
    for name in ("ls", "env"):
        script(venv, name)
    for words in (["ls"], ["env", "ls"], ["sh", "-c", "ls; true"]):
        found = stockade_command("run", "--discard", "--", *words, cwd=workspace)
        assert str(venv) not in found.stdout, found.stdout
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        assert box.run(["python3", "-c", PREFIX]).text.strip() == sys.prefix


def test_a_projects_environment_is_left_alone_without_a_toolchain(workspace: Path) -> None:
    script(made_venv(workspace / ".venv"), "check-it")
    found = stockade_command("run", "--no-toolchain", "--", "check-it", cwd=workspace)
    assert found.returncode == 127


def test_a_backend_that_cannot_show_it_runs_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for it: bubblewrap 0.8 cannot show a directory without the sockets in it."""
    bubblewraps.use(bubblewraps.program(bubblewraps.OLD), monkeypatch)
    with Sandbox(Policy(backend="bwrap")) as box:
        assert box.run(["sh", "-c", "echo works"]).text == "works\n"
    bubblewraps.use(bubblewraps.program(bubblewraps.NEW), monkeypatch)
    with Sandbox(Policy(backend="bwrap")) as box:
        assert box.run(["python3", "-c", PREFIX]).text.strip() == sys.prefix
