"""Harbor tasks as items of a loop: each brings its own judge, which the agent neither sees nor changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from stockade.loop.items.load import load_items
from support.loops import make_project, right, run_loop
from unit.loop.test_items import make_task

TEST = """. ./values.sh
if [ "$a" = 1 ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


def test_a_task_is_judged_by_its_own_tests_which_the_agent_does_not_see(
    project: Path, tmp_path: Path
) -> None:
    task = make_task(tmp_path / "tasks" / "set-a", **{"instruction.md": "Set a.", "tests/test.sh": TEST})
    agent = f"ls {task}/tests && exit 9; {right('a')}"
    done = run_loop(project, agent, load_items(str(task.parent)), verify="", judge=(), report="none")
    assert done.end is not None and done.end.exit_code == 0, done.reasons("set-a")
    assert done.outcomes("set-a") == ["passed"] and "a=1" in (project / "values.sh").read_text()


def test_an_agent_that_edits_the_tests_of_a_task_in_the_project_does_not_pass(project: Path) -> None:
    task = make_task(project / "tasks" / "set-a", **{"instruction.md": "Set a.", "tests/test.sh": TEST})
    cheat = "echo 'echo 1 > /logs/verifier/reward.txt' > tasks/set-a/tests/test.sh; echo x > other.txt"
    items = load_items(str(task.parent))
    done = run_loop(project, cheat, items, verify="", judge=(), report="none", attempts=1)
    assert done.outcomes("set-a") == ["rejected"] and not (project / "other.txt").exists()
    honest = run_loop(project, right("a"), items, verify="", judge=(), report="none", attempts=1)
    assert honest.outcomes("set-a") == ["passed"]
