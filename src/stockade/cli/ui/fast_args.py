"""A parser for plain command lines: importing argparse takes longer than many a command runs.

`FastParser` has the same `add_argument` as an `ArgumentParser`, so that one
function adds the options to both. It parses only unambiguous lines: options by
their whole names, values that cannot be options, one option of each group. For
any other line it raises `NeedsArgparseError`, and argparse parses the line,
with its help and its errors. A test compares the two.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

#: The nargs of an argument that takes the rest of the line: argparse.REMAINDER.
REST = "..."
_KNOWN = {"action", "choices", "const", "default", "dest", "help", "metavar", "nargs", "type"}


class NeedsArgparseError(Exception):
    """FastParser cannot parse this line or these options; argparse must."""


class _FastOption:
    """One option, from the arguments of `add_argument`."""

    def __init__(self, names: Sequence[str], group: object, settings: dict[str, Any]) -> None:
        self.action = settings.get("action", "store")
        if self.action not in ("store", "append", "store_true", "store_const") or settings.keys() - _KNOWN:
            raise NeedsArgparseError
        if settings.get("nargs") is not None:
            raise NeedsArgparseError
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
                raise NeedsArgparseError from None
            if self.choices is not None and value not in self.choices:
                raise NeedsArgparseError
        if self.action == "append":
            value = [*(found[self.dest] or ()), value]
        found[self.dest] = value


class FastParser:
    """The part of `ArgumentParser` that plain command lines need."""

    def __init__(self) -> None:
        self._options: dict[str, _FastOption] = {}
        self._defaults: dict[str, Any] = {}
        self._rest = ""

    def add_argument(self, *names: str, group: object = None, **settings: Any) -> None:
        """Add an option, or the argument that takes the rest of the line."""
        if not names[0].startswith("-"):
            if settings.get("nargs") != REST or self._rest:
                raise NeedsArgparseError
            self._rest = names[0]
            return
        option = _FastOption(names, group, settings)
        self._options |= dict.fromkeys(names, option)
        self._defaults.setdefault(option.dest, option.default)

    def add_mutually_exclusive_group(self) -> _ArgumentGroup:
        return _ArgumentGroup(self)

    def set_defaults(self, **values: Any) -> None:
        self._defaults |= values

    def parse(self, argv: Sequence[str]) -> Any:
        """Parse the line as argparse would; raise `NeedsArgparseError` if that is not certain."""
        found = dict(self._defaults)
        chosen: dict[object, _FastOption] = {}
        words = iter(argv)
        rest: list[str] = []
        for word in words:
            if word == "--" or not word.startswith("-") or word == "-":
                rest = [word, *words]
                break
            name, equals, text = word.partition("=")
            option = self._options.get(name)
            if option is None or (equals and not name.startswith("--")):
                raise NeedsArgparseError
            if option.takes_value and not equals:
                text = next(words, "-")
                if text.startswith("-"):
                    raise NeedsArgparseError
            elif equals and not option.takes_value:
                raise NeedsArgparseError
            if option.group is not None and chosen.setdefault(option.group, option) is not option:
                raise NeedsArgparseError
            option.set(found, text)
        if self._rest:
            found[self._rest] = rest
        elif rest:
            raise NeedsArgparseError
        return types.SimpleNamespace(**found)


class _ArgumentGroup:
    def __init__(self, parser: FastParser) -> None:
        self._parser = parser

    def add_argument(self, *names: str, **settings: Any) -> None:
        self._parser.add_argument(*names, group=self, **settings)
