"""`--net` on the command line: open, none, or rules, once for each."""

from __future__ import annotations

import pytest

from stockade.cli.run import _flags, parse_arguments
from stockade.errors import PolicyError


def flags(*words: str, command: str = "run") -> object:
    rest = [] if command == "shell" else ["--", "true"]
    return _flags(parse_arguments(command, [*words, *rest])).get("net")


@pytest.mark.parametrize("command", ["run", "shell", "plan"])
def test_rules_are_given_one_by_one(command: str) -> None:
    words = (
        "--net",
        "a.example:443",
        "--net=*.b.example",
        "--net",
        "!c.b.example",
        "--net",
        "tcp://d.example:22",
    )
    assert flags(*words, command=command) == [
        "a.example:443", "*.b.example", "!c.b.example", "tcp://d.example:22",
    ]  # fmt: skip


def test_the_whole_network_or_none_are_single_words() -> None:
    assert flags() is None
    assert flags("--net", "open") == "open"
    assert flags("--net", "none", "--net", "none") == "none"


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["open", "a.example"], "--net open and --net a.example contradict each other", "leave out one"),
        (["a.example", "none"], "--net none and --net a.example contradict each other", "leave out one"),
        (["open", "none"], "--net open and --net none contradict each other", "leave out one"),
        (["https://a.example/x"], "--net https://a.example/x: a rule names a host", "write a.example:443"),
        (["*."], "--net *.: names no host after the *", "write *.example.com:443"),
        (["host"], "--net host: is not a rule", "write --net open"),
        (["any"], "--net any: is not a rule", "write '*' for every public host, --net open for your whole"),
        (["opne"], "--net opne: is neither none nor open", "did you mean --net open?"),
        (["a.example,b.example"], "a name cannot contain ','", "write --net once for each host"),
        ([""], "--net '': is empty", "write a host"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str, hint: str) -> None:
    with pytest.raises(PolicyError) as caught:
        flags(*(part for word in words for part in ("--net", word)))
    assert message in caught.value.message
    assert hint in caught.value.hint
