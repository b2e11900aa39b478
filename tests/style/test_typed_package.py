"""The types of the installed wheel, as mypy and pyright see them in a user's project."""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from support.means import need, need_program
from support.paths import ROOT
from support.wheel import PIP, call

FIXTURES = ROOT / "tests" / "fixtures" / "typed"
EXAMPLES = ROOT / "examples" / "typed"
WRONG = FIXTURES / "wrong_calls.py"

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def python(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel and msgspec, whose classes ours derive from."""
    directory = tmp_path_factory.mktemp("typed")
    venv = directory / "venv"
    made = call([sys.executable, "-m", "venv", "--without-pip", str(venv)])
    assert made.returncode == 0, made.stdout
    (wheel,) = dist.glob("*.whl")
    installed = call(
        [*PIP, "--python", str(venv / "bin/python"), "install", "--no-deps", "--no-index", str(wheel)]
    )
    assert installed.returncode == 0, installed.stdout
    spec = importlib.util.find_spec("msgspec")
    assert spec is not None and spec.origin is not None
    own = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    shutil.copytree(Path(spec.origin).parent, own / "msgspec")
    return venv / "bin" / "python"


@pytest.fixture(params=["mypy", "pyright"])
def checker(request: pytest.FixtureRequest, python: Path, tmp_path: Path) -> list[str]:
    """The command of a type checker, which sees the wheel and not the sources."""
    if request.param == "mypy":
        cache = ["--cache-dir", str(tmp_path / "cache"), "--config-file", ""]
        return [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), *cache]
    need(importlib.util.find_spec("pyright") is not None, "the Python package pyright is not installed")
    need_program("node")
    return [sys.executable, "-m", "pyright", "--pythonpath", str(python), "--project"]


def copy(source: Path, directory: Path) -> str:
    """Copy a project away from our sources, which a checker would find first."""
    shutil.copytree(source, directory / "project", ignore=shutil.ignore_patterns("__pycache__"))
    return str(directory / "project")


def marked(output: str, file: str) -> set[int]:
    """The lines for which a checker reports an error."""
    return {int(line) for line in re.findall(rf"{file}:(\d+)\b.*error", output)}


def test_an_example_project_passes(checker: list[str], tmp_path: Path) -> None:
    done = call([*checker, copy(EXAMPLES, tmp_path)])
    assert done.returncode == 0, done.stdout


def test_what_calls_return_is_known_and_what_is_wrong_is_refused(checker: list[str], tmp_path: Path) -> None:
    done = call([*checker, copy(FIXTURES, tmp_path)])
    wanted = {number for number, line in enumerate(WRONG.read_text().splitlines(), 1) if "# wrong" in line}
    assert len(wanted) > 5
    assert marked(done.stdout, "wrong_calls.py") == wanted, done.stdout
    assert marked(done.stdout, "public_types.py") == set(), done.stdout
