"""The `stockade` command as a whole: its commands, their help, and what it makes of a wrong word."""

from __future__ import annotations

import pytest

from stockade import __version__, cli


def main(*arguments: str) -> int:
    """In this process, because starting one takes longer than what is tested."""
    try:
        return cli.main(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command, "--help") == 0
    shown = capsys.readouterr().out
    assert f"usage: stockade {command}" in shown
    assert "example" in shown and f"stockade {command}" in shown.partition("example")[2]


@pytest.mark.parametrize(
    "words", [[], ["--help"], ["-h"], ["help"]], ids=lambda words: " ".join(words) or "none"
)
def test_the_help_lists_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*words) == 0
    shown = capsys.readouterr().out
    for command in cli.COMMANDS:
        assert f"\n  {command} " in shown
    assert "example:" in shown


def test_help_before_a_command_is_the_commands_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("help", "commit") == 0
    assert "usage: stockade commit" in capsys.readouterr().out
    assert main("help", "comit") == 2
    assert "did you mean `stockade commit`?" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_the_packages(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(word) == 0
    assert capsys.readouterr().out == f"stockade {__version__}\n"


def test_an_unknown_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("rum") == 2
    said = capsys.readouterr().err
    assert "'rum'" in said and "did you mean `stockade run`?" in said


def test_a_word_like_no_command_gets_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("xyzzy") == 2
    assert "`stockade --help`" in capsys.readouterr().err


def test_control_characters_in_a_word_are_shown_not_sent(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("\x1b[2J") == 2
    assert "\x1b[2J" not in capsys.readouterr().err


@pytest.mark.parametrize("command", [name for name in cli.COMMANDS if name not in ("run", "plan")])
def test_an_unknown_option_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [command, "check"] if command == "policy" else [command]
    assert main(*words, "--no-such-option") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == "stockade: error: unknown option --no-such-option"
    assert second.startswith("stockade: hint: ") and f"`stockade {command} --help`" in second


@pytest.mark.parametrize(
    ("words", "wrong", "meant"),
    [
        (
            ["run", "--mode", "readonly", "--", "true"],
            "--mode 'readonly': is not a",
            "one of overlay, rw, ro;",
        ),
        (["run", "--mode", "overly", "--", "true"], "--mode 'overly': is not a", "did you mean overlay?"),
        (["policy", "chekc"], "unknown action 'chekc'", "did you mean check?"),
        (["keys", "make"], "unknown action 'make'", "write one of show, export, rotate;"),
    ],
)
def test_a_word_that_is_no_choice_gets_the_choices(
    words: list[str], wrong: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*words) == 2
    said = capsys.readouterr().err
    assert wrong in said and meant in said
