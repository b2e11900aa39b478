"""The programs in `examples` do what they say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.paths import ROOT

TYPED = ROOT / "examples" / "typed"
SAYS = {
    "grader.py": ["2 of 2:", "failed, division by zero:", "[0, 1, 4, 9]"],
    "jobs.py": ["['one'] ['1', '2'] hello"],
    "review.py": ["added notes/todo.txt", "committed: notes notes/todo.txt", "missing: True"],
}


@pytest.mark.parametrize("name", sorted(path.name for path in TYPED.glob("*.py")))
def test_a_typed_example_runs(name: str, workspace: Path) -> None:
    done = subprocess.run(
        [sys.executable, TYPED / name, workspace], cwd=workspace, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in SAYS[name]:
        assert words in done.stdout
