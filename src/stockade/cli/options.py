"""A parser whose refusals read like all others: what is wrong, and what to write instead."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, NoReturn

from stockade.cli import output

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says `stockade: error:` and a hint, and not its whole usage."""

    def error(self, message: str) -> NoReturn:
        """Refuse the command line, with exit code 2."""
        hint = f"`{self.prog} --help` lists the options"
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            hint += "; those of the command itself come after --"
        if message.startswith(UNKNOWN):
            word = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
            option = word.startswith("-")
            message = f"there is no option {word}" if option else f"{word!r} is one word too many"
            hint = f"{self._nearest(word) if option else ''}{hint}"
        elif message.endswith("expected one argument"):
            hint = f"write its value behind it; {hint}"
        output.error(message, hint=hint)
        raise SystemExit(2)

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print it, and fail where that cannot be: argparse's own (3.13) says nothing of a full disk."""
        (file or sys.stdout).write(self.format_help())

    def _nearest(self, word: str) -> str:
        import difflib

        known = [option for action in self._actions for option in action.option_strings]
        near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
        return f"did you mean {near[0]}? " if near else ""
