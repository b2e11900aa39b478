"""Writes docs/reference/command-line.md from the parsers that print `--help`, so that the two agree.

python scripts/command_reference.py           write it
python scripts/command_reference.py --check   exit code 1 if it is stale
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

#: argparse breaks lines by the width of the terminal, and colours them on some versions of Python.
os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}

from stockade.cli.man import ENVIRONMENT, FILES
from stockade.cli.ui.command_spec import CommandSpec, Option, commands

WIDTH = 96
ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "command-line.md"

HEAD = """\
# Command line

`scripts/command_reference.py` makes this page from the parsers that print `--help`. `stockade COMMAND --help`
prints the same for one command, and `stockade man` is the manual page. [Exit codes](exit-codes.md) has a page
of its own.
"""


def page() -> str:
    """Return the whole page."""
    every = commands()
    lines = [HEAD, "| command | does |", "|---|---|"]
    lines += [f"| [`{one.name}`](#stockade-{one.name}) | {_cell(one.help)} |" for one in every]
    for one in every:
        lines += ["", f"## stockade {one.name}", "", *_command(one)]
    lines += ["", "## Environment", "", *_table("variable", ENVIRONMENT)]
    lines += ["", "## Files", "", *_table("file", FILES)]
    return "\n".join(lines).replace(f"{ROOT}/", "") + "\n"


def _command(one: CommandSpec) -> Iterator[str]:
    yield from ("```text", *_wrapped(one.usage), "```", "")
    if one.description:
        yield from (_prose(one.description), "")
    yield from _options([*one.words, *([one.tail] if one.tail else []), *one.options])
    for part in one.parts:
        yield from ("", f"### stockade {one.name} {part.name}", "")
        yield from ("```text", *_wrapped(part.usage), "```", "")
        if about := part.description or part.help:
            yield from (_sentence(_prose(about)), "")
        yield from _options([*part.words, *part.options])
    if one.epilog:
        yield from ("", "```text", one.epilog.strip("\n"), "```")


def _wrapped(usage: str) -> Iterator[str]:
    """Break a usage line between options, never in one."""
    line = ""
    for word in re.findall(r"\[[^\]]*\]|\S+", usage):
        if line and len(line) + 1 + len(word) > WIDTH:
            yield line
            line = f"    {word}"
        else:
            line = f"{line} {word}" if line else word
    yield line


def _options(options: list[Option]) -> Iterator[str]:
    shown = [option for option in options if option.help and "--help" not in option.names]
    if not shown:
        return
    yield from ("| option | does |", "|---|---|")
    for option in shown:
        value = f"`{_cell(option.value)}`" if option.value else ""
        names = ", ".join(f"`{name}`" for name in option.names)
        yield f"| {f'{names} {value}'.strip()} | {_cell(option.help)} |"


def _table(kind: str, entries: dict[str, str]) -> Iterator[str]:
    yield from (f"| {kind} | holds |", "|---|---|")
    for name, about in entries.items():
        names = ", ".join(f"`{one}`" for one in name.split(", "))
        yield f"| {names} | {_cell(about)} |"


def _cell(text: str) -> str:
    return _prose(text).replace("|", "\\|")


def _prose(text: str) -> str:
    # Angle brackets and stars of a usage line are no markup.
    return " ".join(text.split()).replace("<", "&lt;").replace("*", "\\*")


def _sentence(text: str) -> str:
    text = text[0].upper() + text[1:]
    return text if text.endswith(".") else f"{text}."


def main(arguments: list[str]) -> int:
    """Write the page, or say whether it is stale."""
    made = page()
    if "--check" in arguments:
        stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != made
        if stale:
            print(f"{PAGE.name} is stale: run `python scripts/command_reference.py`", file=sys.stderr)
        return int(stale)
    PAGE.write_text(made, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
