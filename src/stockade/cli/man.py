"""`stockade man`: the manual page, generated from the same parsers as `--help`."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser

if TYPE_CHECKING:
    from stockade.cli.ui.command_spec import CommandSpec, Option

ENVIRONMENT = {
    "STOCKADE_HOME": "the state directory; default: $XDG_STATE_HOME/stockade, or ~/.local/state/stockade",
    "STOCKADE_LOG": "full: the log of runs has whole commands, which may hold secrets; off: no log",
    "STOCKADE_PAGER, PAGER": "the pager that stockade diff uses on a terminal",
    "NO_COLOR": "if it is set, output has no colour",
}
FILES = {
    "stockade.toml, pyproject.toml": "a project's policy; it may only narrow yours unless you trust it",
    "~/.config/stockade/config.toml": "your own policy",
    "~/.local/state/stockade": "what outlives a run; stockade purge removes it",
}


def main(argv: list[str]) -> int:
    """Show the page on a terminal; print its source elsewhere."""
    build_parser().parse_args(argv)
    page = manual_page()
    if sys.stdout.isatty() and shutil.which("man"):
        import subprocess

        return subprocess.run(["man", "-l", "-"], input=page.encode(), check=False).returncode
    print(page, end="")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade man",
        description="Show the manual page, or print its source if the output is not a terminal.",
        epilog="example:\n  stockade man > ~/.local/share/man/man1/stockade.1",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return output.add_verbosity(parser)


def manual_page() -> str:
    """Return the source of the page, in the language of man(7)."""
    from stockade._version import __version__
    from stockade.cli.ui.command_spec import commands

    lines = [
        f'.TH STOCKADE 1 "" "stockade {__version__}" "User Commands"',
        ".SH NAME",
        "stockade \\- run code you do not trust behind walls the kernel keeps",
        ".SH SYNOPSIS",
        ".B stockade",
        ".I COMMAND",
        "\\&...",
        ".SH DESCRIPTION",
        *_text("Stockade runs a command in a sandbox of its own. The command sees the system's programs and "
               "the directory it was started in, but no other file of yours, no network, no process of "
               "yours and nothing of your environment. Its changes are kept aside until you commit them. "
               "Stockade enforces all that the policy asks for, or runs nothing."),
        ".SH COMMANDS",
    ]  # fmt: skip
    for command in commands():
        lines += _command(command, f"stockade {command.name}")
    lines += [".SH ENVIRONMENT", *_list(ENVIRONMENT), ".SH FILES", *_list(FILES)]
    return "\n".join(lines) + "\n"


def _command(command: CommandSpec, name: str) -> list[str]:
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
    """Return running text, one sentence per line."""
    return [_line(part) for part in re.split(r"(?<=[.:]) +", " ".join(text.split())) if part]


def _line(line: str) -> str:
    escaped = _escaped(line)
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped or ".sp"


def _escaped(text: str) -> str:
    # roff would otherwise turn these into typographic characters, which cannot be copied to a shell.
    escapes = {"\\": "\\e", "-": "\\-", "'": "\\(aq", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"}
    return "".join(escapes.get(sign, sign) for sign in text)
