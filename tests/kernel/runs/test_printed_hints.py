"""What a program printed last decides what is looked for, and the hint says what was found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import stockade
from stockade import Policy
from support.installs import SYSTEM_PATH
from support.means import need
from support.screen import STOCKADE, seen

PYTHON = "/usr/bin/python3"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    need(os.access(PYTHON, os.X_OK), f"{PYTHON} is not installed")
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    return tmp_path / "home"


def venv(place: Path, module: str = "") -> Path:
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(place)], check=True, timeout=60)
    (packages,) = (place / "lib").glob("python3*/site-packages")
    if module:
        (packages / f"{module}.py").write_text("")
    return packages


def hint(workspace: Path, *command: str) -> str:
    return stockade.run(command, Policy(workspace=str(workspace)), on_exit="discard", advise=True).hint


def test_a_missing_module_names_the_python_that_ran(home: Path, workspace: Path) -> None:
    for words in (["-c", "import nowhere_at_all"], ["-m", "nowhere_at_all"]):
        assert f"the Python inside is {PYTHON}" in hint(workspace, PYTHON, *words)
    assert hint(workspace, PYTHON, "-c", "raise SystemExit(1)") == ""


def test_a_module_of_the_projects_environment_is_found_there(home: Path, workspace: Path) -> None:
    venv(workspace / ".venv", "frobnicate")
    found = hint(workspace, PYTHON, "-c", "import frobnicate.part")
    assert f"{workspace}/.venv has a module frobnicate: run {workspace}/.venv/bin/python3" in found


def test_a_module_of_the_users_own_packages_is_found_there(home: Path, workspace: Path) -> None:
    version = subprocess.run(
        [PYTHON, "-c", "import sys; print('python%d.%d' % sys.version_info[:2])"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    packages = home / ".local/lib" / version / "site-packages"
    packages.mkdir(parents=True)
    (packages / "frobnicate.py").write_text("")
    assert f"`--read {packages}`" in hint(workspace, PYTHON, "-c", "import frobnicate")
    policy = Policy(workspace=str(workspace), read=[str(packages)])
    assert stockade.run([PYTHON, "-c", "import frobnicate"], policy, on_exit="discard").ok


def test_a_module_that_a_pth_file_leads_to_is_found_there(
    home: Path, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "editable/frobnicate").mkdir(parents=True)
    (venv(tmp_path / "env") / "__editable__.pth").write_text(f"{tmp_path}/editable\n")
    found = hint(workspace, f"{tmp_path}/env/bin/python3", "-c", "import frobnicate")
    assert f"`--read {tmp_path}/editable`" in found and "__editable__.pth" in found


FAILED_PIP = """#!/bin/sh
echo "Could not install packages due to an OSError: [Errno 30] Read-only file system: '/x'" >&2
exit 1
"""


def test_a_pip_that_may_not_write_gets_an_environment_in_the_workspace(home: Path, workspace: Path) -> None:
    (workspace / "pip").write_text(FAILED_PIP)
    (workspace / "pip").chmod(0o755)
    found = hint(workspace, "./pip", "install", "six")
    assert "read-only because it is not in the workspace" in found
    assert "`sh -c 'python3 -m venv .venv && .venv/bin/pip install ...'`" in found
    venv(workspace / ".venv")
    assert "`sh -c '.venv/bin/pip install ...'`" in hint(workspace, "./pip", "install", "six")


def test_a_hint_reveals_no_place_of_secrets(home: Path, workspace: Path, tmp_path: Path) -> None:
    (home / ".ssh/frobnicate").mkdir(parents=True)
    (venv(tmp_path / "env") / "a.pth").write_text(f"{home}/.ssh\n")
    found = hint(workspace, f"{tmp_path}/env/bin/python3", "-c", "import frobnicate")
    assert found and ".ssh" not in found


def test_a_hint_repeats_nothing_that_the_program_made_up(home: Path, workspace: Path) -> None:
    text = r"No module named \x1b[31mevil; rm -rf ~"
    found = hint(workspace, PYTHON, "-c", f"import sys; sys.exit({text!r})")
    assert "evil" not in found and "\x1b" not in found


def test_the_hint_comes_on_a_terminal_too(home: Path, workspace: Path) -> None:
    code, screen = seen(
        [STOCKADE, "run", "--", PYTHON, "-c", "import nowhere_at_all"], columns=200, cwd=workspace
    )
    assert code == 1 and f"hint: the Python inside is {PYTHON}" in screen


def test_a_directory_that_cannot_be_renamed_gets_what_to_type(home: Path, workspace: Path) -> None:
    (workspace / "old").mkdir()
    assert "git add -A OLD NEW" in hint(workspace, PYTHON, "-c", "import os; os.rename('old', 'new')")
