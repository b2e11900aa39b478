"""What a start loads: a budget on modules, because times say little on a busy machine."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stockade
from stockade.cli import run
from stockade.cli.ui.fast_args import FastParser, NeedsArgparseError
from stockade.cli.ui.quick_imports import PackageFinder
from stockade.policy import profile

#: What a plain `stockade run` loads besides msgspec and what that needs. Each has its reason.
OF_PYTHON = {
    "_sha2", "_sha256",                     # hashes of plans and filters, without OpenSSL
    "_socket", "array", "struct", "_struct",  # talking to the gate
    "_weakrefset", "threading", "atexit",   # sandboxes may be used from threads, and are put away at the end
    "signal", "select", "errno", "fcntl", "pwd", "grp", "gc",
    "_ctypes", "ctypes", "ctypes._endian", "binascii",  # the receipt, while the program runs
}  # fmt: skip
#: More would be noticed: each costs a tenth to a third of a millisecond.
MOST_OF_OURS = 102

LOADED = "import sys; print(*sorted(m for m in sys.modules if getattr(sys.modules[m], '__spec__', 1)))"


def loaded_by(statement: str) -> set[str]:
    """The modules of a fresh interpreter after a statement."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\n{LOADED}"], capture_output=True, text=True, check=True, cwd="/"
    )
    return set(done.stdout.split())


def test_importing_it_loads_nothing_but_its_errors() -> None:
    assert loaded_by("import stockade") - loaded_by("pass") == {
        "__future__",
        "errno",
        "stockade",
        "stockade._version",
        "stockade.errors",
    }


def test_a_run_loads_what_it_needs(stockade_home: Path) -> None:
    line = "from stockade.cli import main; main(['run', '-q', '--', 'true'])"
    loaded_by(line)  # what the machine can do is found out once
    found = loaded_by(line)
    of_msgspec = loaded_by(
        "import importlib; import sys; sys.modules['typing_extensions'] = None; import msgspec"
    )
    ours = {name for name in found if name.startswith("stockade")}
    others = {name for name in found - ours - of_msgspec if not name.startswith("importlib")}
    others -= {"contextlib", "math", "warnings"}  # the rest of msgspec's: newer typing loads less of its own
    assert others <= OF_PYTHON, f"also loaded: {sorted(others - OF_PYTHON)}"
    assert len(ours) <= MOST_OF_OURS, sorted(ours)
    assert not found & {
        "platform",
        "textwrap",
        "typing_extensions",
        "argparse",
        "inspect",
        "dataclasses",
        "tomllib",
        "datetime",
        "msgspec.inspect",
    }


def test_our_modules_are_found_as_python_finds_them() -> None:
    """By their names alone, with everything that importing them needs."""
    top = Path(stockade.__file__).parent
    files = [file for file in top.rglob("*.py") if file != top / "__init__.py"]
    assert len(files) > 500
    for file in files:
        place = file.parent if file.name == "__init__.py" else file.with_suffix("")
        name = ".".join(("stockade", *place.relative_to(top).parts))
        path = [str(place.parent)]
        found, wanted = PackageFinder.find_spec(name, path), PathFinder.find_spec(name, path)
        assert found is not None and wanted is not None, name
        assert type(found.loader) is type(wanted.loader) and found.has_location, name
        for attribute in ("name", "origin", "cached", "parent", "submodule_search_locations"):
            assert getattr(found, attribute) == getattr(wanted, attribute), (name, attribute)


@pytest.mark.parametrize("name", ["stockade.nothing", "stockade.cli.nothing", "json", "stockades.cli"])
def test_what_is_not_ours_is_left_to_python(name: str) -> None:
    assert PackageFinder.find_spec(name, [str(Path(stockade.__file__).parent)]) is None
    assert PackageFinder.find_spec(name, None) is None


def test_what_msgspec_is_kept_from_can_be_loaded_afterwards() -> None:
    """And what msgspec keeps of it works: it trims the docstrings of a schema with textwrap."""
    line = "from stockade.cli import main; main(['policy', 'schema', '-q']); import platform, uuid"
    dates = "import datetime, msgspec; print(msgspec.convert('2026-11-18', datetime.date).strftime('%j'))"
    done = subprocess.run(
        [sys.executable, "-c", f"{line}; {dates}; print(platform.system(), uuid.uuid4(), platform.__file__)"],
        capture_output=True,
        text=True,
        check=True,
    )
    *_, day, system, _, file = done.stdout.split()
    assert (day, system) == ("322", "Linux") and file.endswith("platform.py")


@pytest.mark.parametrize("name", profile.names())
def test_a_profile_reads_the_same_with_and_without_tomllib(name: str) -> None:
    import tomllib

    text = profile.source(name)
    assert profile._parse_plain(text) == tomllib.loads(text)


@pytest.mark.parametrize(
    "text", ["a = 'b'", "a = [\n", 'a.b = "c"', "a", "a = 1 # one", "a = 0x10", '"a" = 1']
)
def test_a_profile_that_is_not_plain_is_for_tomllib(text: str) -> None:
    assert profile._parse_plain(text) is None


WORDS = st.lists(
    st.sampled_from(
        ["-p", "-w", "--read", "--read=x", "--mode", "--mode=rw", "--mode=no", "ro", "--json", "--json-fd",
         "3", "x", "--", "-", "-v", "-q", "-vq", "--quiet", "--keep", "--commit", "--discard", "--snap",
         "--limit", "wall=5s", "--env=A=B", "--env=", "-px", "--json=1", "-p=x", "", "-3", "a b", "-a b",
         "--timeout", "5", "--no-such", "-h", "true", "--net", "open", "@", "--snapshot", "--verbose"]
    ),
    max_size=7,
)  # fmt: skip


class Refused(Exception):
    """What argparse would have said."""


class Strict(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise Refused(message)

    def exit(self, *_: object) -> None:  # type: ignore[override]
        raise Refused


@pytest.fixture(scope="module")
def parsers() -> tuple[FastParser, Strict]:
    """Both, told of the same options."""
    both = FastParser(), Strict()
    for one in both:
        run.add_options(one, "run")
    return both


@given(words=WORDS)
def test_a_plain_line_is_read_as_argparse_reads_it(
    parsers: tuple[FastParser, Strict], words: list[str]
) -> None:
    light, strict = parsers
    try:
        found = vars(light.parse(words))
    except NeedsArgparseError:
        return
    wanted = vars(strict.parse_args(words))
    for one in (found, wanted):
        if one["command"][:1] == ["--"]:  # newer versions of argparse leave it out themselves
            del one["command"][0]
    assert found == wanted


@pytest.mark.parametrize(
    "line",
    [
        "-q -- true",
        "--read /a --read=/b --env A=B -w . --mode ro --json -- sh -c x",
        "--timeout 5 --limit wall=5s --discard true --json",
        "-p file.toml --json-fd 3 --snapshot -v",
    ],
)
def test_everyday_lines_are_plain(parsers: tuple[FastParser, Strict], line: str) -> None:
    parsers[0].parse(line.split())


def test_the_command_ends_like_any_other_program() -> None:
    """It does not wait for the interpreter to be taken apart, and still loses nothing."""
    ours = [sys.executable, "-m", "stockade"]
    for words, status in ((["--version"], 0), (["run", "--no-such"], 2), (["run", "-q", "--", "false"], 1)):
        done = subprocess.run([*ours, *words], capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
        assert words != ["--version"] or done.stdout.startswith("stockade ")
    with open("/dev/full", "w") as disk:
        full = subprocess.run([*ours, "profiles"], stdout=disk, stderr=subprocess.PIPE, check=False)
    assert full.returncode == 125 and b"No space left" in full.stderr
