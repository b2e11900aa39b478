"""Plain command lines without argparse, which takes longer to load than many a command to run.

`Light` is told of options exactly as an `ArgumentParser` is, by the same
function, and reads the lines that leave no question: options by their whole
names, values that cannot be taken for options, one of each group. Whatever
else it meets it does not judge; then argparse reads the line, with its help
and its errors. A test compares the two.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

#: The nargs of a word that takes all the rest: argparse.REMAINDER.
REST = "..."
_KNOWN = {"action", "choices", "const", "default", "dest", "help", "metavar", "nargs", "type"}


class NotPlainError(Exception):
    """This line, or these options, are for argparse."""


class _Option:
    """One option as it was told."""

    def __init__(self, names: Sequence[str], group: object, settings: dict[str, Any]) -> None:
        self.action = settings.get("action", "store")
        if self.action not in ("store", "append", "store_true", "store_const") or settings.keys() - _KNOWN:
            raise NotPlainError
        if settings.get("nargs") is not None:
            raise NotPlainError
        longest = next((name for name in names if name.startswith("--")), names[0])
        self.dest: str = settings.get("dest") or longest.lstrip("-").replace("-", "_")
        self.default = settings.get("default", False if self.action == "store_true" else None)
        self.const = True if self.action == "store_true" else settings.get("const")
        self.choices = settings.get("choices")
        self.type: Callable[[str], Any] = settings.get("type", str)
        self.group = group

    @property
    def takes_value(self) -> bool:
        return self.action in ("store", "append")

    def set(self, found: dict[str, Any], text: str) -> None:
        value = self.const
        if self.takes_value:
            try:
                value = self.type(text)
            except (TypeError, ValueError):
                raise NotPlainError from None
            if self.choices is not None and value not in self.choices:
                raise NotPlainError
        if self.action == "append":
            value = [*(found[self.dest] or ()), value]
        found[self.dest] = value


class Light:
    """What an `ArgumentParser` is told, as far as plain lines need it."""

    def __init__(self) -> None:
        self._options: dict[str, _Option] = {}
        self._defaults: dict[str, Any] = {}
        self._rest = ""

    def add_argument(self, *names: str, group: object = None, **settings: Any) -> None:
        """Note an option, or the word that takes all the rest."""
        if not names[0].startswith("-"):
            if settings.get("nargs") != REST or self._rest:
                raise NotPlainError
            self._rest = names[0]
            return
        option = _Option(names, group, settings)
        self._options |= dict.fromkeys(names, option)
        self._defaults.setdefault(option.dest, option.default)

    def add_mutually_exclusive_group(self) -> _Group:
        return _Group(self)

    def set_defaults(self, **values: Any) -> None:
        self._defaults |= values

    def parse(self, argv: Sequence[str]) -> Any:
        """The line as argparse would have it; raises `NotPlainError` where that is not certain."""
        found = dict(self._defaults)
        chosen: dict[object, _Option] = {}
        words = iter(argv)
        rest: list[str] = []
        for word in words:
            if word == "--" or not word.startswith("-") or word == "-":
                rest = [word, *words]
                break
            name, equals, text = word.partition("=")
            option = self._options.get(name)
            if option is None or (equals and not name.startswith("--")):
                raise NotPlainError
            if option.takes_value and not equals:
                text = next(words, "-")
                if text.startswith("-"):
                    raise NotPlainError
            elif equals and not option.takes_value:
                raise NotPlainError
            if option.group is not None and chosen.setdefault(option.group, option) is not option:
                raise NotPlainError
            option.set(found, text)
        if self._rest:
            found[self._rest] = rest
        elif rest:
            raise NotPlainError
        return types.SimpleNamespace(**found)


class _Group:
    def __init__(self, parser: Light) -> None:
        self._parser = parser

    def add_argument(self, *names: str, **settings: Any) -> None:
        self._parser.add_argument(*names, group=self, **settings)
