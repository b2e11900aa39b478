"""The Python sources: linted, typed and documented."""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest

from support.paths import PACKAGE, ROOT

PUBLIC = [
    path
    for path in sorted(PACKAGE.rglob("*.py"))
    if not path.name.startswith("_") or path.name == "__init__.py"
]


def run(*command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_ruff_finds_nothing() -> None:
    run("ruff", "check", "--no-cache", ".")


@pytest.mark.timeout(300)
def test_the_types_hold_strictly() -> None:
    run("mypy")


def test_every_public_module_says_what_it_is_for() -> None:
    silent = [path for path in PUBLIC if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []
