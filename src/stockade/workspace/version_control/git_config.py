"""Git's configuration files, read without git.

Running git to read its configuration would execute commands from it. Where
git stops at a mistake, this parser goes on with the next line: it must not
miss a setting that another version of git would obey.
"""

from __future__ import annotations

import os
from typing import NamedTuple

#: The largest file to read, and the most settings of one.
LARGEST = 1 << 20
MOST_SETTINGS = 10_000

_ESCAPES = {"n": "\n", "t": "\t", "b": "\b"}
_BLANKS = " \t\n\v\f\r"


class Setting(NamedTuple):
    """One line of a configuration: `[section "subsection"] key = value`."""

    section: str
    subsection: str
    key: str
    value: str

    @property
    def name(self) -> str:
        """The name as `git config` writes it."""
        return ".".join(filter(None, (self.section, self.subsection, self.key)))


def parse(data: bytes) -> list[Setting]:
    """Return the settings of a file in their order. A key without a value is `true`."""
    reader = _ConfigReader(os.fsdecode(data.removeprefix(b"\xef\xbb\xbf")).replace("\r\n", "\n"))
    found: list[Setting] = []
    section = subsection = ""
    while (char := reader.next()) and len(found) < MOST_SETTINGS:
        if char in _BLANKS:
            continue
        if char == "[":
            section, subsection = reader.header()
        elif char.isascii() and char.isalpha():
            key = char + reader.name()
            if (value := reader.value()) is not None:
                found.append(Setting(section, subsection, key.lower(), value))
        else:
            reader.skip_line()  # a comment, or a mistake
    return found


class _ConfigReader:
    """A text with a read position. Beyond its end, every character is empty."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def next(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        return char

    def back(self) -> None:
        self._at -= 1

    def skip_line(self) -> None:
        """Move past the end of the line that contains the last character read."""
        end = self._text.find("\n", self._at - 1)
        self._at = len(self._text) if end < 0 else end + 1

    def name(self) -> str:
        start = self._at
        while (char := self.next()) and char.isascii() and (char.isalnum() or char == "-"):
            pass
        self.back()
        return self._text[start : self._at]

    def header(self) -> tuple[str, str]:
        """Return the section and the subsection after an opening bracket."""
        start = self._at
        while (char := self.next()) and char not in ']"\n':
            pass
        section = self._text[start : self._at - 1].strip().lower()
        if char == "\n":
            self.back()
        if char != '"':
            name, _, old = section.partition(".")
            return name, old
        subsection: list[str] = []
        while (char := self.next()) and char not in '"\n':
            subsection.append(self.next() if char == "\\" else char)
        while char and char not in "]\n":
            char = self.next()
        return section, "".join(subsection)

    def value(self) -> str | None:
        """Return the value after a key, up to the end of its line; None if the line is malformed."""
        while (char := self.next()) and char in " \t":
            pass
        if char != "=":
            self.back()
            self.skip_line() if char not in ("\n", "") else self.next()
            return "true" if char in ("\n", "", "#", ";") else None
        found, quoted, blanks = list[str](), False, list[str]()
        while (char := self.next()) and char != "\n":
            if not quoted and char in "#;":
                self.skip_line()
                break
            if char in _BLANKS and not quoted:
                blanks += char if found else ()
                continue
            if char == '"':
                quoted = not quoted
                char = ""
            elif char == "\\":
                char = self.next()
                if char == "\n":
                    continue
                char = _ESCAPES.get(char, char)
            found += (*blanks, char)
            blanks.clear()
        return "".join(found)
