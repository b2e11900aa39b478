"""The hold-back table: which files programs of the host run or obey, entry by entry."""

from __future__ import annotations

import gzip
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade import Policy, PolicyError
from stockade.linux import casefold
from stockade.policy import holdback_lookup
from stockade.policy.holdback_table import OBEYED, RUNS, SHADOW, ToolFile
from stockade.workspace.holdback import holdback
from stockade.workspace.metadata import Rules

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures" / "holdback"
FILE, LINK, DIRECTORY = stat.S_IFREG | 0o644, stat.S_IFLNK | 0o777, stat.S_IFDIR | 0o755
#: Of the files of packages that are held back, those that no tool obeys where they lie.
FALSE = {"tests/sitecustomize.py", "tests/test_apps/.env", "tests/fixtures/.netrc"}


def no_folding(path: str) -> bool:
    return False


def names(fixture: str) -> list[str]:
    return (FIXTURES / f"{fixture}.txt").read_text().split()


def kind(path: str, mode: int = FILE, folds: holdback_lookup.Folds = no_folding) -> str:
    if holdback_lookup.obeyed(path, mode, folds) is not None:
        return "obeyed"
    return "runs" if holdback_lookup.runs(path, mode, folds) is not None else "ordinary"


def examples(entry: ToolFile) -> Iterator[str]:
    """A path for each pattern, with something in the place of every star."""
    for words in holdback_lookup.expanded(entry.patterns.split()):
        path = words.strip("/") + ("/in/it" if words.endswith("/") else "")
        yield "/".join("any/where" if name == "**" else name.replace("*", "some") for name in path.split("/"))


@pytest.mark.parametrize("entry", [*OBEYED, *RUNS], ids=lambda entry: entry.patterns.split()[0])
def test_an_entry_matches_in_any_case_and_depth_and_nothing_longer(entry: ToolFile) -> None:
    find = holdback_lookup.obeyed if entry in OBEYED else holdback_lookup.runs
    for path in examples(entry):
        for spelling in (path, path.upper(), path.title(), f"deep/down/{path}", f"{path}. "):
            assert find(spelling, FILE) is not None, spelling
        exact = find(path, FILE, no_folding)
        assert exact is not None and exact.why == f"{exact.tool} {exact.does}"
        assert find(path, DIRECTORY) is None
    if "*" not in entry.patterns:
        for words in holdback_lookup.expanded(entry.patterns.split()):
            # A name that only ends or begins like it is another file.
            for near in (f"not{words}", f"{words.strip('/')}not"):
                found = find(near, FILE)
                assert found != entry or "/" in words.strip("/"), near


@pytest.mark.parametrize("fixture", ["obeyed", "runs", "ordinary"])
def test_real_names_are_of_their_class(fixture: str) -> None:
    assert {path: kind(path) for path in names(fixture) if kind(path) != fixture} == {}


def test_a_directory_has_many_of_them() -> None:
    assert len(names("obeyed")) > 500 and len(names("runs")) > 130 and len(names("ordinary")) > 100


@pytest.mark.parametrize(
    "path",
    [
        ".git/hooks/pre-commit", ".vscode/tasks.json", ".claude/settings.json", "AGENTS.md", ".ENVRC", ".Env",
        ".vsCode/x", ".git./hooks/x", ".git /config", ".g\u200cit/config", ".\u017fsh/config",
        ".GIT\u2064/hooks/x", ".g\ufe0fit/config", ".\u034fenvrc", ".vſcode/tasks.json", "AGENTS.md ",
        ".ｇｉｔ/config",
    ],
)  # fmt: skip
def test_a_spelling_that_some_file_system_takes_for_the_same_counts(path: str) -> None:
    """CVE-2014-9390: letters that are not seen, dots and spaces at the end, letters of another alphabet."""
    assert kind(path, folds=lambda path: True) == "obeyed"


def test_capitals_count_where_the_file_system_tells_them_apart() -> None:
    assert kind("docs/agents.md") == "ordinary" and kind("docs/AGENTS.md") == "obeyed"
    assert kind("docs/agents.md", folds=lambda path: True) == "obeyed"
    assert kind("build") == "ordinary" and kind("BUILD") == "runs"


@pytest.mark.parametrize(
    "path", [".github", ".config", "node_modules", "sub/.cargo", ".git", ".venv", ".hg", "gradle", ".yarn"]
)
def test_a_link_where_a_tool_looks_further_counts(path: str) -> None:
    assert kind(path, LINK) == "obeyed" and kind(path, DIRECTORY) == "ordinary"


def test_a_link_in_place_of_a_sample_counts() -> None:
    assert kind(".git/hooks/x.sample") == "ordinary" and kind(".git/hooks/x.sample", LINK) == "obeyed"


@pytest.mark.parametrize(
    "path",
    [
        "random.py", "random.so", "random.abi3.so", "random.cpython-311-x86_64-linux-gnu.so",
        "json/__init__.py", "scripts/json/__init__.so", "pytest.py",
        "tests/json/__init__.cpython-312-aarch64-linux-gnu.so",
    ],
)  # fmt: skip
def test_a_module_shadows_pythons_own_as_source_extension_or_package(path: str) -> None:
    assert holdback_lookup.runs(path, FILE, no_folding) == SHADOW


@pytest.mark.parametrize(
    "path", ["random.txt", "pkg/random.so.md", "json/tool.py", "src/pkg/random.py", "sys.py"]
)
def test_other_files_do_not(path: str) -> None:
    assert holdback_lookup.runs(path, FILE, no_folding) is None


@pytest.mark.parametrize(
    "path",
    [
        "__pycache__/a.cpython-311.pyc", "a/b/__pycache__/test_x.cpython-313-pytest-8.4.pyc",
        "__pycache__/m.f-1.py311.nbi", "__PYCACHE__/a.pyc", "tmp/cache/bootsnap/compile-cache-iseq/00/1",
        ".venv/lib/python3.11/site-packages/x/__pycache__/y.cpython-311.pyc",
        "node_modules/node-gyp/gyp/pylib/__pycache__/x.pyc",
    ],
)  # fmt: skip
def test_a_file_in_a_cache_of_compiled_code_is_left_out_and_a_link_there_is_held_back(path: str) -> None:
    assert holdback_lookup.cached(path, FILE) is not None and kind(path) == "ordinary"
    assert holdback_lookup.cached(path, LINK) is None and kind(path, LINK, lambda path: True) == "obeyed"
    assert holdback_lookup.cached(path.replace("__", "_").replace("boot", ""), FILE) is None


def test_removing_a_file_that_is_obeyed_counts_unless_it_is_a_program() -> None:
    for path in (".npmrc", "CODEOWNERS", ".github/workflows/x.yml", ".githooks/pre-push", "CLAUDE.md"):
        assert holdback_lookup.restricts(path, FILE, no_folding) is not None, path
    for path in (".venv/bin/python", "node_modules/.bin/x", ".git/rebase-merge/done", "a.pyc", "src/a.py"):
        assert holdback_lookup.restricts(path, FILE, no_folding) is None, path
    assert holdback_lookup.restricts(".githooks", DIRECTORY, no_folding) is not None
    assert holdback_lookup.begins("sub/.github") and holdback_lookup.begins(".config")
    assert not holdback_lookup.begins("node_modules") and not holdback_lookup.begins("src")


def test_packages_give_at_most_one_false_alarm_in_a_thousand_files() -> None:
    """The trees of fourteen popular packages.

    Recorded from PyPI (`pip download --no-deps --no-binary NAME NAME`, the names in the archive) and from npm
    (`npm install --ignore-scripts NAME...`, the names below node_modules).
    """
    listed = gzip.decompress((FIXTURES / "packages.txt.gz").read_bytes()).decode().splitlines()
    packages = [line for line in listed if line.startswith("# ")]
    files = [line for line in listed if not line.startswith("# ")]
    assert len(packages) == 8 and "npm: eslint express lodash react typescript vite webpack" in packages[-1]
    alarms = {path for path in files if kind(path) == "obeyed"}
    right = {
        path
        for path in alarms
        if path.startswith((".github/workflows/", ".github/actions/", "node_modules/.bin/"))
        or path in (".pre-commit-config.yaml", ".readthedocs.yaml", ".github/dependabot.yml")
    }
    assert alarms - right == FALSE
    assert len(files) > 16_000 and len(FALSE) * 1000 <= len(files)


def test_ten_thousand_paths_take_less_than_a_second() -> None:
    paths = [f"src/package{n % 50}/bin/module{n}.{('py', 'js', 'toml')[n % 3]}" for n in range(10_000)]
    start = time.process_time()
    for path in paths:
        assert kind(path) == "ordinary"
    assert time.process_time() - start < 1


@pytest.mark.parametrize(
    "path",
    [
        ".git/" * 900 + "config/x", "hooks/" * 900 + ".git/x", "a/" * 900 + "x.config.jsx.",
        "." + "a." * 120 + "toml",
        "node_modules/.bin" + "/node_modules" * 300, "\udcff/\udcfe", "x" * 255 + "/" + "y" * 255,
    ],
)  # fmt: skip
def test_hostile_names_cost_no_more(path: str) -> None:
    start = time.process_time()
    for _ in range(20):
        kind(path)
        kind(path, LINK)
    assert time.process_time() - start < 2


def test_a_policys_pattern_with_many_stars_costs_no_more() -> None:
    rules = Rules(hold_back=["/".join(["**"] * 20) + "/x", "*a" * 40 + "b"], allow=["**/**/**/**/y"])
    start = time.process_time()
    for path in ("a/" * 500 + "b", "a" * 255):
        assert not holdback.executes(path, FILE, no_folding, rules=rules, folds=no_folding)
        assert not holdback.allowed(path, rules)
    assert time.process_time() - start < 2


class TestFolding:
    def test_this_file_system_tells_case_apart(self, tmp_path: Path) -> None:
        (tmp_path / "sub").mkdir()
        directory = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
        try:
            assert casefold.folds(directory, "") is False
            assert casefold.folds(directory, "sub") is False
            assert casefold.folds(directory, "docs") is None
        finally:
            os.close(directory)

    def test_one_that_does_not_is_found_out(self, tmp_path: Path) -> None:
        """Two names of one file look the same from outside."""
        (tmp_path / "one").touch()
        os.link(tmp_path / "one", tmp_path / "ONE")
        directory = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
        try:
            assert casefold.folds(directory, "") is True
        finally:
            os.close(directory)


class TestThePolicy:
    def test_adds_patterns_and_takes_some_away(self) -> None:
        rules = Rules(hold_back=["deploy", "**/*.sql"], allow=[".vscode", "**/AGENTS.md"])
        held = {
            path: bool(holdback.executes(path, FILE, no_folding, rules=rules, folds=no_folding))
            and not holdback.allowed(path, rules)
            for path in (
                "deploy/run.sh", "DEPLOY/run.sh", "sub/deploy/run.sh", "x.sql", "a/b/x.SQL",
                ".vscode/tasks.json", "sub/.vscode/tasks.json", "AGENTS.md", "a/AGENTS.md", ".envrc",
            )
        }  # fmt: skip
        assert [path for path, is_held in held.items() if is_held] == [
            "deploy/run.sh", "DEPLOY/run.sh", "x.sql", "a/b/x.SQL", "sub/.vscode/tasks.json", ".envrc",
        ]  # fmt: skip

    @pytest.mark.parametrize("clause", ["hold_back", "allow_commit"])
    @pytest.mark.parametrize("value", ["/etc", "../x", "~/x", "", "."])
    def test_patterns_stay_in_the_workspace(self, clause: str, value: str) -> None:
        with pytest.raises(PolicyError, match=clause):
            Policy(**{clause: [value]})  # type: ignore[arg-type]

    def test_more_hold_back_is_narrower_and_more_allow_commit_is_wider(self) -> None:
        assert Policy(hold_back=["a", "b"]).within(Policy(hold_back=["a"]))
        assert Policy().excess(Policy(hold_back=["a"])) == ['without hold_back = "a"']
        assert Policy().within(Policy(allow_commit=["a"]))
        assert Policy(allow_commit=["a"]).excess(Policy()) == ['allow_commit = "a"']
