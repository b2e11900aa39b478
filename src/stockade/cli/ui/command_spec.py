"""Every command's options as data, read from the parsers that print `--help`.

Completion and the man page are generated from it, so they have exactly the
options that exist.
"""

from __future__ import annotations

import argparse
import importlib
from typing import NamedTuple

from stockade import cli

#: What kind of value completes a word, by its metavar.
_BY_METAVAR = {
    "FILE": "files",
    "PATH": "files",
    "DIR": "files",
    "PATH|@ID": "places",
    "ID": "sandboxes",
    "OTHER": "workspaces",
}
_BY_NAME = {"id": "workspaces", "path": "files", "file": "files"}
_BY_BOTH = {
    ("restore", "words"): "workspaces",
    ("snapshot", "name"): "",
    ("profiles", "name"): "profiles",
    **{(command, "profile"): "profiles" for command in ("run", "shell", "plan", "explain")},
    ("diff", "a"): "files",
    ("diff", "b"): "files",
    ("logs", "id"): "runs",
    ("receipts", "id"): "",
    ("keys", "id"): "",
    ("verify", "receipt"): "files",
}
#: Commands that take another command line after `--`.
_RUNNERS = argparse.REMAINDER


class Option(NamedTuple):
    """An option, or with no `names` a positional argument."""

    names: tuple[str, ...]
    help: str
    #: The placeholder of its value in the help; empty if it takes none.
    value: str
    choices: tuple[str, ...]
    #: What completes it: files, workspaces, sandboxes, runs, profiles, or places: workspaces and files.
    kind: str
    #: Whether it can be written more than once.
    again: bool


class CommandSpec(NamedTuple):
    """One command of `stockade`."""

    name: str
    help: str
    usage: str
    description: str
    epilog: str
    options: tuple[Option, ...]
    words: tuple[Option, ...]
    #: Whether it takes another command line after `--`.
    runs: bool
    #: That command line, as the help shows it.
    tail: Option | None
    parts: tuple[CommandSpec, ...]


def commands() -> list[CommandSpec]:
    """Return every command, in the order of `stockade --help`."""
    found = []
    for name, (module, line) in cli.COMMANDS.items():
        parser: argparse.ArgumentParser = importlib.import_module(module).build_parser()
        found.append(_command(name, line, parser))
    return found


def _command(name: str, line: str, parser: argparse.ArgumentParser) -> CommandSpec:
    options: list[Option] = []
    words: list[Option] = []
    tail: Option | None = None
    parts: list[CommandSpec] = []
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            parts = [_command(word, about.get(word, ""), sub) for word, sub in action.choices.items()]
            words.append(Option((), "", "", tuple(action.choices), "", False))
        elif action.nargs == _RUNNERS:
            tail = _option(name, action)
        else:
            (options if action.option_strings else words).append(_option(name, action))
    usage = " ".join(parser.format_usage().split()).removeprefix("usage: ")
    return CommandSpec(
        name,
        line,
        usage,
        parser.description or "",
        parser.epilog or "",
        tuple(options),
        tuple(words),
        tail is not None,
        tail,
        tuple(parts),
    )


def _option(command: str, action: argparse.Action) -> Option:
    choices = tuple(map(str, action.choices or ()))
    takes = action.nargs != 0
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    default = action.dest.upper() if action.option_strings else action.dest
    value = metavar or ("|".join(choices) if choices else default)
    if choices:
        kind = ""
    elif (command, action.dest) in _BY_BOTH:
        kind = _BY_BOTH[command, action.dest]
    else:
        kind = _BY_METAVAR.get(metavar) or ("" if action.option_strings else _BY_NAME.get(action.dest, ""))
    return Option(
        tuple(action.option_strings),
        (action.help or "").replace("%%", "%"),
        value if takes else "",
        choices if takes else (),
        kind if takes else "",
        isinstance(action, argparse._AppendAction) or action.nargs in ("*", "+"),
    )
