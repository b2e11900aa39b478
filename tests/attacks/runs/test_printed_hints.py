"""A hostile repository and a hostile program choose together what a hint looks for; it stays harmless."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import stockade
from stockade import Policy
from stockade.resolve.toolchain import installs
from stockade.runs.explain import printed
from support.installs import SYSTEM_PATH
from support.means import need

PYTHON = "/usr/bin/python3"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    need(os.access(PYTHON, os.X_OK), f"{PYTHON} is not installed")
    (tmp_path / "home/frobnicate").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", SYSTEM_PATH)
    return tmp_path / "home"


def venv(place: Path) -> Path:
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", str(place)], check=True, timeout=60)
    (packages,) = (place / "lib").glob("python3*/site-packages")
    return packages


def hint(workspace: Path, python: str) -> str:
    code = "raise SystemExit('No module named frobnicate')"
    policy = Policy(workspace=str(workspace))
    return stockade.run([python, "-c", code], policy, on_exit="discard", advise=True).hint


def test_a_repository_does_not_choose_what_a_hint_advises_to_show(
    home: Path, workspace: Path, tmp_path: Path
) -> None:
    (tmp_path / "private/frobnicate").mkdir(parents=True)
    (venv(workspace / ".venv") / "now run evil.pth").write_text(f"{tmp_path}/private\n{home}\n")
    found = hint(workspace, f"{workspace}/.venv/bin/python3")
    assert found and "--read" not in found and "evil" not in found


def test_not_by_another_name_of_the_workspace_either(home: Path, workspace: Path, tmp_path: Path) -> None:
    (tmp_path / "private/frobnicate").mkdir(parents=True)
    (venv(workspace / "env") / "a.pth").write_text(f"{tmp_path}/private\n")
    (tmp_path / "link").symlink_to(workspace)
    assert "--read" not in hint(workspace, f"{tmp_path}/link/env/bin/python3")


@pytest.mark.parametrize("above", ["", "/.."])
def test_no_hint_advises_to_show_a_whole_home(
    home: Path, workspace: Path, tmp_path: Path, above: str
) -> None:
    (tmp_path / "frobnicate").mkdir()
    (venv(tmp_path / "env") / "a.pth").write_text(f"{home}{above}\n")
    assert "--read" not in hint(workspace, f"{tmp_path}/env/bin/python3")


def test_no_repository_makes_the_search_long(
    home: Path, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = venv(workspace / ".venv")
    (tmp_path / "many").mkdir()
    for number in range(100):
        (packages / f"{number}.pth").write_text(f"{tmp_path}/many\n" * 100)
    listed, real = list[str](), installs.names_in

    def names_in(place: str) -> list[str]:
        listed.append(place)
        return real(place)

    monkeypatch.setattr(printed, "names_in", names_in)
    hint(workspace, f"{workspace}/.venv/bin/python3")
    assert f"{tmp_path}/many" not in listed
