"""The judge's files: what the verify command obeys, which an attempt must not decide.

In the judge's sandbox they are those of the base. Most are taken back whole. A `pyproject.toml` and a
`package.json` say many other things too, so only what test runners read there comes from the base.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from typing import Any

from stockade.policy.patterns import compile_pattern, has_wildcard
from stockade.result import Change

#: Modules that Python takes from the project instead of its own, as source, compiled, or a directory.
MODULES = ("sitecustomize", "usercustomize", "pytest", "_pytest", "unittest")
#: Files that test runners and `make` obey, in any directory. A package's `entry_points.txt` names plugins of
#: pytest, and the `.npmrc` the shell in which scripts run.
NAMES = (
    "conftest.py", "pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "tox.toml",
    "setup.cfg", "noxfile.py", ".coveragerc", "Makefile", "makefile", "GNUmakefile",
    "jest.config.*", "vitest.config.*", "vitest.workspace.*", ".mocharc*", "karma.conf.*", "ava.config.*",
    "playwright.config.*", "cypress.config.*", ".nycrc*", ".c8rc*", ".taprc",
    "vite.config.*", ".npmrc", ".yarnrc", ".yarnrc.yml", ".pnpmfile.*", "bunfig.toml", ".rspec",
    "phpunit.xml*", "[Jj]ustfile", ".justfile", "Taskfile.y*ml", "*.pth", "entry_points.txt",
    *(f"{module}.*" for module in MODULES),
)  # fmt: skip
#: Directories that have the runners themselves, or code that runs instead of a source: in a cache of
#: compiled Python lies what runs for a conftest.py with the same size and time.
DIRECTORIES = frozenset(
    {
        "__pycache__",
        ".pytest_cache",
        ".venv",
        "venv",
        ".tox",
        ".nox",
        "node_modules",
        ".cargo",
        *MODULES,
    }
)
#: Files of which test runners read only a part.
PYPROJECT, PACKAGE = "pyproject.toml", "package.json"
SECTIONS = (PYPROJECT, PACKAGE)
#: Tables of [tool] in a pyproject.toml, and keys of a package.json, that test runners obey.
TOOLS = ("coverage", "tox", "nox", "hatch", "pdm", "poe", "taskipy")
KEYS = ("scripts", "jest", "vitest", "mocha", "ava", "nyc", "c8", "tap", "config")
#: The most bytes of such a file.
LARGEST = 1 << 20


def judge_matcher(paths: Iterable[str], *, defaults: bool = True) -> Callable[[str], bool]:
    """Return a function that says whether a path, relative to the project, is one of the judge's.

    `paths` are files and directories, and patterns: `*` is any part of a name, `**` any directories.

    >>> is_judges = judge_matcher(["tests", "**/*.test.js"])
    >>> [is_judges(path) for path in ("tests/a/b.py", "src/x.test.js", "conftest.py", "src/x.py")]
    [True, True, True, False]
    """
    plain = tuple(os.path.normpath(path) for path in paths if not has_wildcard(path))
    patterns = [compile_pattern("/" + os.path.normpath(path)) for path in paths if has_wildcard(path)]
    names = [re.compile(fnmatch.translate(name)) for name in NAMES] if defaults else []

    def matches(path: str) -> bool:
        parts = path.split("/")
        if any(path == one or path.startswith(f"{one}/") for one in plain):
            return True
        if any(pattern.fullmatch("/" + path) for pattern in patterns):
            return True
        if not defaults:
            return False
        return not DIRECTORIES.isdisjoint(parts) or any(name.match(parts[-1]) for name in names)

    return matches


def withheld_paths(changes: Iterable[Change], restored: Iterable[str], *, defaults: bool = True) -> list[str]:
    """Return the judge's files that an attempt changed in a way that could weaken the judge of the next one.

    They do not land by themselves. New tests do, but no new settings of a test runner. Of a directory that
    holds runners, the directory is named.
    """
    known, runners = set(restored), judge_matcher((), defaults=defaults)
    found: dict[str, None] = {}
    for change in changes:
        if change.path in known and (change.kind != "added" or runners(change.path)):
            parts = change.path.split("/")
            at = next((n for n, part in enumerate(parts) if defaults and part in DIRECTORIES), len(parts))
            found["/".join(parts[: at + 1])] = None
    return list(found)


def restore_sections(name: str, base: bytes | None, attempt: bytes) -> bytes | None:
    """Return an attempt's file with the base's sections for test runners; None if it has them already.

    Raises `ValueError` if the two cannot be combined: then the base's file stands for both.
    """
    if max(len(base or b""), len(attempt)) > LARGEST:
        raise ValueError("the file is too large")
    combine = _package if name == PACKAGE else _pyproject
    try:
        return combine(base, attempt)
    except (ValueError, RecursionError, AttributeError, TypeError) as error:
        raise ValueError(f"the test sections cannot be restored: {error}") from None


def _package(base: bytes | None, attempt: bytes) -> bytes | None:
    theirs: dict[str, Any] = json.loads(base or b"{}")
    ours: dict[str, Any] = json.loads(attempt)
    known = {key: theirs[key] for key in KEYS if key in theirs}
    if known == {key: ours[key] for key in KEYS if key in ours}:
        return None
    return json.dumps({**{key: value for key, value in ours.items() if key not in KEYS}, **known}).encode()


def _pyproject(base: bytes | None, attempt: bytes) -> bytes | None:
    theirs, ours = (base or b"").decode(), attempt.decode()
    wanted = _test_tables(theirs)
    if wanted == _test_tables(ours):
        return None
    text = "".join(_blocks(ours, of_tests=False)) + "\n" + "".join(_blocks(theirs, of_tests=True))
    # A header in a text of several lines, or dotted keys, would cut it at the wrong place.
    made, plain = tomllib.loads(text), tomllib.loads(ours)
    if _test_tables(text) != wanted or _without_tests(made) != _without_tests(plain):
        raise ValueError("its tables are not written as [tool.NAME]")
    return text.encode()


def _is_test_table(name: str) -> bool:
    """Whether test runners obey this table of [tool]; plugins of pytest have tables such as pytest_env."""
    return name in TOOLS or name.startswith("pytest")


def _test_tables(text: str) -> dict[str, Any]:
    tools = tomllib.loads(text).get("tool", {})
    return {name: tools[name] for name in tools if _is_test_table(name)}


def _without_tests(table: dict[str, Any]) -> dict[str, Any]:
    tools = {name: value for name, value in table.get("tool", {}).items() if not _is_test_table(name)}
    return {**{key: value for key, value in table.items() if key != "tool"}, "tool": tools}


_HEADER = re.compile(r"\s*\[\[?\s*(?P<name>[^\]]*?)\s*\]\]?\s*(#.*)?\Z")


def _blocks(text: str, *, of_tests: bool) -> list[str]:
    """Return the lines below the headers of test runners' tables, or all the others."""
    kept, inside = [], False
    for line in text.splitlines(keepends=True):
        if header := _HEADER.match(line.rstrip("\r\n")):
            parts = [part.strip().strip("\"'") for part in header["name"].split(".")]
            inside = len(parts) > 1 and parts[0] == "tool" and _is_test_table(parts[1])
        if inside == of_tests:
            kept.append(line if line.endswith("\n") else line + "\n")
    return kept
