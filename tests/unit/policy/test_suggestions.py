"""A name that does not exist gets the name that was meant, or none: never one that is merely similar."""

from __future__ import annotations

from typing import Any

import pytest

from stockade.cli import COMMANDS, nearest_command
from stockade.cli.run import build_parser
from stockade.errors import PolicyError
from stockade.policy import Policy
from stockade.policy.suggestions import OTHER_COMMANDS, OTHER_TOOLS, closest

CLAUSES = Policy.__struct_fields__


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("raed", "read"),
        ("Read", "read"),
        ("limts", "limits"),
        ("pass-env", "pass_env"),
        ("tool", "toolchain"),
        ("work", "workspace"),
        ("user", ""),
        ("filter", ""),
        ("hosts", ""),
        ("version", ""),
        ("description", ""),
        ("x", ""),
        ("", ""),
        ("-", ""),
    ],
)
def test_only_a_slip_of_the_fingers_or_an_abbreviation_is_taken_for_a_name(word: str, meant: str) -> None:
    assert closest(word, CLAUSES) == meant


@pytest.mark.parametrize(
    ("clauses", "hint"),
    [
        ({"timeout": 30}, 'write limits.wall = "30s"'),
        ({"mode": "rw"}, "did you mean workspace.mode?"),
        ({"memory": "1G"}, "did you mean limits.memory?"),
        ({"cpus": 2}, "write limits.cpu = 2"),
        ({"network": True}, 'write net = "open" for the host\'s network'),
        ({"volumes": ["/a:/b"]}, 'write read = ["/path"], or write = ["/path"]'),
        ({"environment": {"A": "1"}}, 'write env = { NAME = "value" }'),
        ({"allowed_domains": ["x.org"]}, 'write net = ["api.example.com:443"]'),
        ({"limits": {"timeout": 3}}, 'write limits.wall = "30s"'),
        ({"limits": {"pids": 3}}, "write limits.tasks = 64"),
        ({"limits": {"cpus": 3}}, "did you mean limits.cpu?"),
    ],
)
def test_a_key_of_another_tool_is_answered_with_ours(clauses: dict[str, Any], hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(**clauses)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["-it"], "the command gets a terminal of its own automatically"),
        (["-t"], "the command gets a terminal of its own automatically"),
        (["--rm"], "--discard deletes them"),
        (["--volume", "/a:/a"], "write --read /path, or --write /path"),
        (["--bind", "/a", "/a"], "write --write /path"),
        (["--ro-bind", "/a", "/a"], "write --read /path"),
        (["--allow-net"], "write --net open"),
        (["--network", "host"], "write --net open"),
        (["--network", "none"], "--net none for no network"),
        (["--workdir", "/x"], "write --cwd DIRECTORY"),
        (["--read-only"], "write --mode ro"),
        (["-c", "ls"], "stockade run -- COMMAND"),
        (["--memory=1g"], "write --limit memory=512M"),
        (["-m", "512m"], "write --limit memory=512M"),
        (["--cpus", "2"], "write --limit cpu=2"),
        (["-u", "1000"], "the program runs as you"),
        (["--time-limit", "3"], "write --timeout 30s"),
        (["--privileged"], "leave it out"),
        (["--die-with-parent"], "every sandbox has it"),
        (["--dry-run"], "`stockade plan`"),
        (["--timeot", "3"], "did you mean --timeout?"),
    ],
)
def test_an_option_of_another_tool_is_answered_with_ours(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*words, "--", "true"])
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--frobnicate", "-z", "--xyz", "-ab"])
def test_an_option_that_nobody_means_gets_no_suggestion(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([word, "--", "true"])
    said = capsys.readouterr().err
    assert f"unknown option {word}" in said and "did you mean" not in said and "--help" in said


def test_the_table_has_no_word_that_exists_here() -> None:
    assert not set(OTHER_TOOLS) & set(CLAUSES)
    assert not set(OTHER_COMMANDS) & set(COMMANDS) and set(OTHER_COMMANDS.values()) <= set(COMMANDS)


def test_a_command_of_another_tool_is_answered_with_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert nearest_command("stop") == "did you mean `stockade kill`?"
    assert nearest_command("rum") == "did you mean `stockade run`?"
    assert nearest_command("quux") == "`stockade --help` lists the commands"


@pytest.mark.parametrize("port", ["8080", "8080:80", "127.0.0.1:8080:80", "53:53/udp"])
def test_a_port_in_the_place_of_a_policy_file_is_answered_with_the_option_for_ports(port: str) -> None:
    with pytest.raises(PolicyError) as caught:
        Policy.load(port)
    assert "write --publish 8080:80" in caught.value.hint


def test_a_size_that_is_too_small_says_that_a_bare_number_is_bytes() -> None:
    with pytest.raises(PolicyError) as caught:
        Policy(limits={"memory": 512})
    assert "a number without a unit is bytes" in caught.value.hint
