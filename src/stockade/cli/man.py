"""`stockade man`: the manual page, from the same parsers as `--help`."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from typing import TYPE_CHECKING

from stockade.cli import output
from stockade.cli.options import Parser

if TYPE_CHECKING:
    from stockade.cli.words import Command, Option

ENVIRONMENT = {
    "STOCKADE_HOME": "the directory for Stockade's state; else $XDG_STATE_HOME/stockade, "
    "else ~/.local/state/stockade",
    "STOCKADE_LOG": "full: the log of runs has whole commands, which may hold secrets; off: there is no log",
    "STOCKADE_PAGER, PAGER": "what stockade diff shows its text with on a terminal",
    "NO_COLOR": "if it is set, nothing is coloured",
}
FILES = {
    "stockade.toml, pyproject.toml": "a project's policy, which may only narrow yours unless you trust it",
    "~/.config/stockade/config.toml": "your own policy",
    "~/.local/state/stockade": "what outlives a run; stockade purge removes it",
}


def main(argv: list[str]) -> int:
    """Print the page; on a terminal, show it."""
    parser().parse_args(argv)
    page = written()
    if sys.stdout.isatty() and shutil.which("man"):
        import subprocess

        return subprocess.run(["man", "-l", "-"], input=page.encode(), check=False).returncode
    print(page, end="")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade man",
        description="Show the manual page, or print its source if the output is no terminal.",
        epilog="example:\n  stockade man > ~/.local/share/man/man1/stockade.1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return output.with_manners(made)


def written() -> str:
    """The page in the language of man(7)."""
    from stockade import __version__
    from stockade.cli.words import commands

    lines = [
        f'.TH STOCKADE 1 "" "stockade {__version__}" "User Commands"',
        ".SH NAME",
        "stockade \\- run code you do not trust behind walls the kernel keeps",
        ".SH SYNOPSIS",
        ".B stockade",
        ".I COMMAND",
        "\\&...",
        ".SH DESCRIPTION",
        *_text("Stockade runs a command in a sandbox of its own: it sees the system's programs and the "
               "directory it was started in, no other file of yours, no network, none of your environment "
               "and no process of yours, and what it changes is kept aside until you commit it. What the "
               "policy asks for is enforced, or nothing is run."),
        ".SH COMMANDS",
    ]  # fmt: skip
    for command in commands():
        lines += _command(command, f"stockade {command.name}")
    lines += [".SH ENVIRONMENT", *_list(ENVIRONMENT), ".SH FILES", *_list(FILES)]
    return "\n".join(lines) + "\n"


def _command(command: Command, name: str) -> list[str]:
    lines = [f'.SS "{name}"', *_text(command.description), ".PP", ".nf", f"\\fB{_escaped(command.usage)}\\fR"]
    lines.append(".fi")
    every = [*command.words, *([command.tail] if command.tail else []), *command.options]
    for option in every:
        if option.help:
            lines += [".TP", _head(option), *_text(option.help)]
    for part in command.parts:
        lines += [".PP", f"\\fB{_escaped(part.usage)}\\fR", *_text(f"{part.help}.")]
        for option in (*part.words, *part.options):
            lines += [".TP", _head(option), *_text(option.help)]
    if command.epilog:
        lines += [".PP", ".nf", *map(_line, command.epilog.splitlines()), ".fi"]
    return lines


def _head(option: Option) -> str:
    value = f"\\fI{_escaped(option.value)}\\fR" if option.value else ""
    if not option.names:
        return value
    names = ", ".join(f"\\fB{_escaped(name)}\\fR" for name in option.names)
    return f"{names} {value}".strip()


def _list(entries: dict[str, str]) -> list[str]:
    lines = []
    for name, about in entries.items():
        lines += [".TP", f"\\fB{_escaped(name)}\\fR", *_text(about)]
    return lines


def _text(text: str) -> list[str]:
    """Running text, a sentence on a line."""
    return [_line(part) for part in re.split(r"(?<=[.:]) +", " ".join(text.split())) if part]


def _line(line: str) -> str:
    escaped = _escaped(line)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped or ".sp"


def _escaped(text: str) -> str:
    # A hyphen that can be typed is \-; the apostrophe and the accent are those of a terminal.
    escapes = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
    return "".join(escapes.get(sign, sign) for sign in text)
