"""An argument parser whose errors look like Stockade's others: what is wrong, and what to write instead."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from stockade.cli.ui import output

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

UNKNOWN = "unrecognized arguments: "


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints `stockade: error:` and a hint instead of its whole usage."""

    #: What else a hint says about this command.
    note = ""
    _parsed: Sequence[str] = ()

    def parse_known_args(self, args=None, namespace=None):  # type: ignore[no-untyped-def]
        """Parse, and remember the words for errors."""
        self._parsed = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line, with exit code 2."""
        hint = f"`{self.prog} --help` lists the options"
        if any(action.nargs == argparse.REMAINDER for action in self._actions):
            hint += "; options of the command itself come after --"
        if message.startswith(UNKNOWN):
            word = message.removeprefix(UNKNOWN).split()[0].partition("=")[0]
            option = word.startswith("-")
            message = f"unknown option {word}" if option else f"unexpected argument {word!r}"
            hint = f"{self._nearest(word) if option else ''}{hint}"
        elif message.endswith("expected one argument"):
            hint = f"write the value after the option; {hint}"
        elif ": invalid choice: " in message:
            if word := self._unknown_before(message):
                message, choice = f"unknown option {word}", self._nearest(word).rstrip("; ")
            else:
                message, choice = _wrong_choice(message)
            hint = f"{choice} {hint}" if choice.endswith("?") else f"{choice}; {hint}".removeprefix("; ")
        if self.note:
            hint += f"; {self.note}"
        output.error(message, hint=hint)
        raise SystemExit(2)

    def parse_words(self, argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
        """Parse options mixed in any order with words: an `id` and `paths`. After -- come only words.

        argparse's own parse_intermixed_args does not support --.
        """
        place = argv.index("--") if "--" in argv else len(argv)
        args = self.parse_intermixed_args(argv[:place])
        first = [] if args.id is None else [args.id]
        return args, [*first, *args.paths, *argv[place + 1 :]]

    def print_help(self, file: SupportsWrite[str] | None = None) -> None:
        """Print the help, or raise if that fails: argparse's own (3.13) ignores a full disk."""
        (file or sys.stdout).write(self.format_help())

    def _unknown_before(self, message: str) -> str:
        """Return the unknown option whose value argparse took for an action; "" if there is none."""
        wrong = message.partition(": invalid choice: ")[2].partition(" (choose")[0].strip("'\"")
        known = [option for action in self._actions for option in action.option_strings]
        for word in self._parsed:
            name = word.partition("=")[0]
            if word in (wrong, "--"):
                break
            if name.startswith("--") and not any(option.startswith(name) for option in known):
                return name
        return ""

    def _nearest(self, word: str) -> str:
        from stockade.policy import Policy
        from stockade.policy.suggestions import closest, for_option

        known = [option for action in self._actions for option in action.option_strings]
        clause = word.lstrip("-").replace("-", "_")
        runs = self.prog.partition(" ")[2] in ("run", "shell", "plan")
        if runs and (written := for_option(word)):
            return f"{written}; "
        if runs and clause in Policy.__struct_fields__ and word.removesuffix("s") not in known:
            return f"{clause} has no option, but a policy can set it: `{clause} = ...` in stockade.toml; "
        near = closest(word, known)
        return f"did you mean {near}? " if near else ""


def _wrong_choice(message: str) -> tuple[str, str]:
    """Return what is wrong with a word that is not a choice, and what to write, from argparse's words."""
    from stockade.policy.suggestions import closest

    name, _, rest = message.removeprefix("argument ").partition(": invalid choice: ")
    word, _, listed = rest.rpartition(" (choose from ")
    known = [one.strip("'") for one in listed.removesuffix(")").split(", ")]
    near = closest(word.strip("'\""), known)
    wrong = f"{name} {word}: is not a known value" if name.startswith("-") else f"unknown action {word}"
    return wrong, f"did you mean {near}?" if near else f"write one of {', '.join(known)}"
