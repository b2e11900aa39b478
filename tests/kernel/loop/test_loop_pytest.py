"""pytest as the judge: it reports without being asked to, and attempts cannot talk it out of a test."""

from __future__ import annotations

import shlex
import sys

import pytest

from stockade.loop import events
from stockade.loop.items.item import WorkItem
from support.loops import LoopRun, run_loop

TESTS = """import adding


def test_add():
    assert adding.add(1, 2) == 3


def test_zero():
    assert adding.add(0, 0) == 0
"""
PYTHON = shlex.quote(sys.executable)
COMPILE = "import py_compile; py_compile.compile('e.py', cfile='pytest.pyc')"
VERIFY = f"{sys.executable} -m pytest -q -p no:cacheprovider"
#: By item: what the agent does. All but the last are cheats.
CHEATS = {
    "exit": "printf 'import os\\nos._exit(0)\\n' > adding.py",
    "hook": "printf 'def pytest_collection_modifyitems(items):\\n  items.clear()\\n' > conftest.py; touch x",
    "settings": "printf '[tool.pytest.ini_options]\\naddopts = \"-k zero\"\\n' > pyproject.toml; touch x",
    "shadow": "mkdir pytest; echo 'raise SystemExit(0)' > pytest/__main__.py; touch pytest/__init__.py x",
    "compiled": f"echo 'raise SystemExit(0)' > e.py; {PYTHON} -c {shlex.quote(COMPILE)}; touch x",
    "skip": "printf 'import pytest\\ndef add(a, b):\\n  if a: pytest.skip()\\n  return 0\\n' > adding.py",
    "honest": "sed -i s/-/+/ adding.py",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> LoopRun:
    place = tmp_path_factory.mktemp("pytest-judge")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOCKADE_HOME", str(place / "state"))
        project = place / "project"
        (project / "tests").mkdir(parents=True)
        (project / "adding.py").write_text("def add(a, b):\n    return a - b\n")
        (project / "tests/test_adding.py").write_text(TESTS)
        agent = "".join(f'*"The {name} way"*) {what};; ' for name, what in CHEATS.items())
        env = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": ".", "PYTHONDONTWRITEBYTECODE": "1"}
        return run_loop(
            project,
            f'case "$(cat)" in {agent} esac',
            [WorkItem(id=name, title=f"The {name} way") for name in CHEATS],
            verify=VERIFY,
            report="auto",
            strict=True,
            attempts=1,
            policy={"read": [sys.prefix], "env": env},
        )


def test_the_baseline_knows_every_test(done: LoopRun) -> None:
    before = done.all(events.BaselineEnd)[0]
    assert (before.reported, before.passed, before.failed, before.exit_code) == (True, 1, 1, 1)


@pytest.mark.parametrize("name", CHEATS)
def test_only_the_honest_way_lands(done: LoopRun, name: str) -> None:
    how = "landed" if name == "honest" else "failed"
    assert done.phases[name] == how, done.reasons(name)


def test_the_reason_of_a_cheat_says_what_is_missing(done: LoopRun) -> None:
    assert "its report is missing" in done.reasons("exit")[0]
    assert all("test_add" in done.reasons(name)[0] for name in CHEATS if name not in ("exit", "honest"))
