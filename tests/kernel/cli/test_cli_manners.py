"""How every command speaks: -v and -q, colour, pipes and narrow terminals."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

import stockade
from stockade import Policy, cli
from stockade.cli.ui import output
from support.screen import STOCKADE, seen
from support.supervisors import dead

COLOUR = "\x1b["
#: What can be asked without doing harm, and says something.
SPEAKING = {
    "logs": ["logs"],
    "ps": ["ps"],
    "workspaces": ["workspaces"],
    "diff": ["diff", "--no-pager"],
    "profiles": ["profiles"],
    "policy": ["policy", "check"],
    "plan": ["plan", "--", "true"],
    "doctor": ["doctor"],
    "trust": ["trust", "--list"],
    "init": ["init", "--print"],
    "snapshot": ["snapshot", "--list"],
    "purge": ["purge", "--yes"],
    "unknown": ["purg"],
    "help": ["--help"],
}


@pytest.fixture
def busy(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a workspace of long names, from which something is to be told."""
    deep = workspace / ("a-rather-long-name-" * 4) / ("of-a-directory-" * 5)
    deep.mkdir(parents=True)
    monkeypatch.chdir(deep)
    stockade.run(["sh", "-c", "echo 1 > new"], Policy(workspace=str(deep)))
    return deep


def test_every_command_can_say_more_and_less() -> None:
    for module, _ in cli.COMMANDS.values():
        parser = importlib.import_module(module).build_parser()
        known = {name for action in parser._actions for name in action.option_strings}
        assert {"-v", "--verbose", "-q", "--quiet", "-h", "--help"} <= known, module


def test_a_pipe_gets_neither_colour_nor_cut_lines(busy: Path) -> None:
    for words in SPEAKING.values():
        done = subprocess.run([STOCKADE, *words], capture_output=True, text=True, timeout=60, check=False)
        assert COLOUR not in done.stdout + done.stderr and "…" not in done.stdout, words


def test_a_terminal_gets_colour_unless_it_is_unwanted(busy: Path) -> None:
    for environ, coloured in (({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)):
        for name in ("logs", "diff", "unknown"):
            _, screen = seen([STOCKADE, *SPEAKING[name]], environ=environ)
            assert (COLOUR in screen) == coloured, (name, environ, screen)


@pytest.mark.parametrize("columns", [40, 80])
def test_on_a_narrow_terminal_no_table_is_wider(busy: Path, columns: int) -> None:
    for name in ("logs", "ps", "workspaces", "profiles"):
        _, screen = seen([STOCKADE, *SPEAKING[name]], columns=columns, environ={"NO_COLOR": "1"})
        widest = max(map(len, screen.splitlines()))
        # What tells rows apart is never cut.
        assert widest <= (columns if name in ("ps", "profiles") else 80), screen
    _, wide = seen([STOCKADE, "profiles"], columns=200)
    _, narrow = seen([STOCKADE, "profiles"], columns=50, environ={"NO_COLOR": "1"})
    words = re.sub(r"\s+", " ", narrow)
    assert len(narrow.splitlines()) > len(wide.splitlines()) and "and nothing of yours" in words


def test_quiet_leaves_what_was_asked_for_and_errors(busy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["diff", "-q", "--stat"]) == 0
    said = capsys.readouterr()
    assert said.err == "" and "1 path changed" in said.out
    assert cli.main(["diff", "-q", "nothing"]) == 125
    assert "error:" in capsys.readouterr().err
    assert cli.main(["diff", "--stat"]) == 0
    assert capsys.readouterr().err.startswith("stockade: workspace "), "and it holds for one command only"


def test_quiet_lists_are_ids_for_other_programs(busy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (kept,) = stockade.Workspace.list()
    for command in ("workspaces", "logs"):
        assert cli.main([command, "-q"]) == 0
        assert capsys.readouterr().out == f"{kept.id}\n"
    assert cli.main(["ps", "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_verbose_shows_what_the_library_logs(stockade_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stockade.run(["true"])
    damaged = dead(str(stockade_home), b"{") / "sandboxes"
    assert cli.main(["run", "-v", "--", "true"]) == 0
    said = capsys.readouterr().err
    assert "network.none: " in said and f"{damaged} is damaged" not in said  # swept once per process
    assert cli.main(["purge", "-v", "--yes"]) == 0
    assert "is damaged" in capsys.readouterr().err


def test_a_table_wraps_or_cuts_only_as_much_as_it_must(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(output, "_columns", lambda: 40)
    rows = [["1", "x" * 60, "short"], ["2", "y", "z"]]
    cut = output.table(rows, ["N", "LONG", "LAST"], cut=(1,)).splitlines()
    assert len(cut) == 3 and len(cut[1]) == 40 and cut[1].count("…") == 1
    text = "several words that have to be put below one another"
    wrapped = output.table([["1", text]], ["N", "TEXT"], wrap=(1,)).splitlines()
    assert max(map(len, wrapped)) <= 40 and " ".join(" ".join(wrapped[1:]).split()) == f"1 {text}"
