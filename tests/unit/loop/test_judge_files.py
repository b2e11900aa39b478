"""Which files are the judge's, and what of them an attempt may decide."""

from __future__ import annotations

import json
import tomllib

import pytest

from stockade.loop.judge.files import judge_matcher, restore_sections, withheld_paths
from stockade.result import Change

BASE = (
    b'[project]\nname = "p"\n\n[tool.pytest.ini_options]\naddopts = "-q"\n\n[tool.ruff]\nline-length = 88\n'
)


@pytest.mark.parametrize(
    ("path", "judges"),
    [
        ("tests", True),
        ("tests/deep/test_a.py", True),
        ("testsuite/a.py", False),
        ("src/a.test.ts", True),
        ("src/deep/a.test.ts", True),
        ("src/a.ts", False),
        ("conftest.py", True),
        ("src/conftest.py", True),
        ("src/my_conftest.py", False),
        ("pytest.ini", True),
        ("Makefile", True),
        ("sub/GNUmakefile", True),
        ("jest.config.mjs", True),
        ("src/__pycache__/conftest.cpython-311.pyc", True),
        ("node_modules/.bin/jest", True),
        (".venv/lib/python3.11/site-packages/evil.pth", True),
        ("pytest/__init__.py", True),
        ("pytest.py", True),
        ("pytest.pyc", True),
        ("_pytest.abi3.so", True),
        ("sitecustomize/__init__.py", True),
        ("evil.dist-info/entry_points.txt", True),
        ("web/.npmrc", True),
        ("vite.config.ts", True),
        (".cargo/config.toml", True),
        ("pyproject.toml", False),
    ],
)
def test_the_judges_files_are_those_named_and_those_that_runners_obey(path: str, judges: bool) -> None:
    assert judge_matcher(["tests/", "**/*.test.ts"])(path) is judges


def test_without_the_defaults_only_the_named_files_are_the_judges() -> None:
    matches = judge_matcher(["./tests"], defaults=False)
    assert [matches(path) for path in ("tests/a", "conftest.py", "a/__pycache__/b")] == [True, False, False]


@pytest.mark.parametrize(
    "attempt",
    [
        BASE.replace(b'"-q"', b'"-q --deselect tests/test_a.py"'),
        BASE.replace(
            b"[tool.pytest.ini_options]\naddopts = ", b'[tool."pytest".ini_options]\naddopts = "-k no" #'
        ),
        BASE.replace(b'[tool.pytest.ini_options]\naddopts = "-q"\n', b""),
        BASE + b'[tool.coverage.run]\nplugins = ["evil"]\n',
        BASE + b'[tool.pytest_env]\nPYTEST_PLUGINS = "evil"\n',
    ],
    ids=["changed", "quoted", "removed", "added", "of-a-plugin"],
)
def test_the_test_sections_of_a_pyproject_come_from_the_base_and_the_rest_does_not(attempt: bytes) -> None:
    made = restore_sections("pyproject.toml", BASE, attempt.replace(b"88", b"99"))
    assert made is not None
    table = tomllib.loads(made.decode())
    assert table["tool"] == {"pytest": {"ini_options": {"addopts": "-q"}}, "ruff": {"line-length": 99}}


def test_a_pyproject_whose_sections_are_as_they_were_is_left_alone() -> None:
    assert restore_sections("pyproject.toml", BASE, BASE.replace(b'"p"', b'"other"')) is None
    assert restore_sections("pyproject.toml", None, b'[project]\nname = "p"\n') is None


@pytest.mark.parametrize(
    "attempt",
    [
        BASE.replace(b"[project]", b'tool.pytest.ini_options.addopts = "-k none"\n[project]').replace(
            b'[tool.pytest.ini_options]\naddopts = "-q"\n', b""
        ),
        BASE.replace(b'name = "p"', b'text = """\n[tool.pytest.ini_options]\n"""').replace(b"-q", b"-k no"),
        b"not = toml =",
        b"\xff\xfe",
        b"[" * 100_000,
        b"x" * (2 << 20),
    ],
    ids=["dotted", "in-a-text", "broken", "binary", "nested", "large"],
)
def test_a_pyproject_that_cannot_be_combined_is_refused(attempt: bytes) -> None:
    with pytest.raises(ValueError):
        restore_sections("pyproject.toml", BASE, attempt)


def test_the_scripts_of_a_package_json_come_from_the_base() -> None:
    base = {"scripts": {"test": "jest"}, "version": "1"}
    attempt = {"scripts": {"test": "true"}, "jest": {"x": 1}, "dependencies": {"a": "1"}, "version": "2"}
    made = restore_sections("package.json", json.dumps(base).encode(), json.dumps(attempt).encode())
    assert made is not None
    assert json.loads(made) == {"scripts": {"test": "jest"}, "dependencies": {"a": "1"}, "version": "2"}
    assert (
        restore_sections("package.json", json.dumps(base).encode(), b'{"scripts": {"test": "jest"}}') is None
    )
    with pytest.raises(ValueError):
        restore_sections("package.json", json.dumps(base).encode(), b"[1]")


def test_changed_tests_and_new_settings_are_withheld_and_new_tests_are_not() -> None:
    changes = [
        Change("conftest.py", "added"),
        Change("node_modules/jest/a.js", "modified"),
        Change("node_modules/jest/b.js", "modified"),
        Change("src/a.py", "modified"),
        Change("tests/test_new.py", "added"),
        Change("tests/test_old.py", "deleted"),
    ]
    restored = [change.path for change in changes if change.path != "src/a.py"]
    found = withheld_paths(changes, restored)
    assert found == ["conftest.py", "node_modules", "tests/test_old.py"]
