"""A virtual environment in the root of a project shows the program its Python, and nothing of the project."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy
from stockade.linux.user import Caller
from stockade.resolve.toolchain.installs import VENV_PARTS
from support.installs import SYSTEM_PATH
from support.means import need

PYTHON = "/usr/bin/python3"
SECRET = "a password of the project"

APPLICATION = """
import stockade
from helper import answer

@stockade.sandboxed(stockade.Policy())
def inside():
    return answer()

if __name__ == "__main__":
    print(inside())
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with `python -m venv .` in it; its environment is the active one."""
    need(os.access(PYTHON, os.X_OK), f"{PYTHON} is not installed")
    project = tmp_path / "project"
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(project)], check=True, timeout=60)
    (packages,) = (project / "lib").glob("python3*/site-packages")
    (packages / "frobnicate.py").write_text("print('frobnicated')\n")
    for name in (".env", "settings.py", "etc/secret", "src/secret", ".git/config"):
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(SECRET)
    monkeypatch.setattr(Caller, "from_python", False)
    monkeypatch.setenv("VIRTUAL_ENV", str(project))
    monkeypatch.setenv("PATH", f"{project}/bin:{SYSTEM_PATH}")
    return project


@pytest.mark.parametrize("command", ["sh", "python3"])
def test_the_project_around_an_environment_is_not_shown(project: Path, workspace: Path, command: str) -> None:
    code = (
        f"cd {project}; ls -A; cat .env settings.py etc/secret src/secret .git/config; python3 -m frobnicate"
    )
    words = ["-c", code] if command == "sh" else ["-c", f"import os; os.system({code!r})"]
    ran = stockade.run([command, *words], Policy(workspace=str(workspace)), on_exit="discard")
    assert SECRET not in ran.text and "frobnicated" in ran.text, ran.stderr
    assert set(ran.text.split()) <= {"frobnicated", *VENV_PARTS}


def test_a_function_still_gets_the_modules_of_its_project(project: Path) -> None:
    (project / "helper.py").write_text("def answer():\n    return 42\n")
    (project / "app.py").write_text(APPLICATION)
    places = [place for place in sys.path if place.endswith("-packages")]
    places.append(os.path.dirname(os.path.dirname(stockade.__file__)))
    ran = subprocess.run(
        [f"{project}/bin/python3", "app.py"], check=False, cwd=project, capture_output=True, text=True,
        timeout=120, env={**os.environ, "PYTHONPATH": ":".join(places)},
    )  # fmt: skip
    assert ran.stdout.strip() == "42", ran.stderr
