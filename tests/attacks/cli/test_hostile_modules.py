"""Modules that a program left in a project are not loaded by the command that raises its walls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.cli import STOCKADE

#: Modules of Python and of others that the command loads, and those that Python loads at its start.
NAMES = ("msgspec", "tomllib", "argparse", "shutil", "sitecustomize", "usercustomize")
LEAVE = "open({mark!r}, 'a').write(__name__)\nraise ImportError(__name__)\n"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with such modules in it; each leaves a mark when it is loaded."""
    place = tmp_path / "project"
    place.mkdir()
    for name in NAMES:
        (place / f"{name}.py").write_text(LEAVE.format(mark=str(tmp_path / "mark")))
    return place


def loaded(project: Path, *command: str, **env: str) -> bool:
    """Whether the command, started in the project, loads one of its modules."""
    done = subprocess.run(
        command, cwd=project, capture_output=True, text=True, env=os.environ | env, check=False
    )
    mark = project.parent / "mark"
    found = mark.exists()
    mark.unlink(missing_ok=True)
    assert found or done.returncode == 0, done.stderr
    return found


@pytest.mark.parametrize(
    "words", [("profiles",), ("run", "--", "true"), ("plan", "--", "true")], ids=" ".join
)
def test_those_of_the_current_directory_are_not(project: Path, words: tuple[str, ...]) -> None:
    assert loaded(project, sys.executable, "-m", "msgspec")
    assert not loaded(project, STOCKADE, *words)
    assert not loaded(project, sys.executable, "-m", "stockade", *words)


def test_an_isolated_start_ignores_what_the_environment_names(project: Path) -> None:
    """A plain start obeys PYTHONPATH before any line of ours is run, as every Python program does."""
    hostile = {"PYTHONPATH": str(project)}
    assert loaded(project, STOCKADE, "profiles", **hostile)
    assert not loaded(project, sys.executable, "-I", "-m", "stockade", "profiles", **hostile)
    assert not loaded(project, sys.executable, "-I", "-m", "stockade", "run", "--", "true", **hostile)
