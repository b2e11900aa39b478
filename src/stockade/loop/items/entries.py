"""Fields of a work item as its author wrote them, and where: what all formats share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from stockade.linux.plain_text import clean_line
from stockade.loop.items.item import MOST_ITEMS, ItemsError

#: An id names logs and state files, so it is one plain name.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\Z")
MOST_TITLE = 1000
MOST_BODY = 1 << 20
MOST_PRIORITY = 1_000_000
MOST_ATTEMPTS = 100


class Entry:
    """One table of a file: checks a field when it is asked for, and says where a wrong one is.

    `form` is the right form, which every error shows.
    """

    def __init__(self, table: Any, place: str, form: str) -> None:
        self.place = place
        self.form = form
        if not isinstance(table, dict):
            raise ItemsError(f"{place}: an item is a table of fields, and this is {kind(table)}", hint=form)
        self._table = table

    def __contains__(self, name: str) -> bool:
        return name in self._table

    def error(self, words: str) -> ItemsError:
        return ItemsError(f"{self.place}: {words}", hint=self.form)

    def refuse_unknown(self, known: Sequence[str]) -> None:
        from stockade.policy.suggestions import closest

        for name in self._table:
            if name not in known:
                near = closest(name, known)
                meant = f"; did you mean {near}?" if near else f": the fields are {', '.join(known)}"
                raise self.error(f"there is no field {clean_line(str(name)[:80])!r}{meant}")

    def id(self, *names: str) -> str:
        """Return the first of these fields as an id; a number becomes text."""
        name = next((name for name in names if self._table.get(name) is not None), names[0])
        value = self._table.get(name)
        found = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(found, str) or not _ID.match(found):
            wrong = "is missing" if value is None else f"is {show(value)}"
            raise self.error(
                f"{name} {wrong}; an id is up to 100 letters, digits, dots, dashes and underscores"
            )
        return found

    def text(self, name: str, *, most: int = MOST_BODY, required: bool = False) -> str:
        value = self._table.get(name)
        if value is None and not required:
            return ""
        if value is None or not isinstance(value, str):
            wrong = "is missing" if value is None else f"must be text, and is {kind(value)}"
            raise self.error(f"{name} {wrong}")
        if required and not value.strip():
            raise self.error(f"{name} is empty")
        if len(value) > most:
            raise self.error(f"{name} has {len(value)} characters, and the most is {most}")
        return value

    def title(self) -> str:
        return " ".join(self.text("title", most=MOST_TITLE, required=True).split())

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._table.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(f'{name} must be a list of texts, such as ["one", "two"], and is {show(value)}')
        return tuple(value)

    def paths(self, name: str) -> tuple[str, ...]:
        """Return paths in the project, relative to it."""
        for path in self.texts(name):
            parts = path.split("/")
            if not path or path.startswith("/") or ".." in parts or parts in (["."], [".", ""]):
                raise self.error(
                    f"{name} has {show(path)}, which is not the path of something in the project"
                )
        return self.texts(name)

    def number(self, name: str, default: int | None, *, least: int, most: int) -> int | None:
        value = self._table.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(f"{name} must be a whole number from {least} to {most}, and is {show(value)}")
        return value

    def priority(self) -> int:
        return self.number("priority", 0, least=-MOST_PRIORITY, most=MOST_PRIORITY) or 0

    def value(self, name: str) -> Any:
        return self._table.get(name)


def entries(value: Any, place: str, form: str) -> list[Entry]:
    """Return the entries of a list."""
    if not isinstance(value, list):
        raise ItemsError(f"{place} must be a list of items, and is {kind(value)}", hint=form)
    if len(value) > MOST_ITEMS:
        raise ItemsError(f"{place} has {len(value)} items, and the most is {MOST_ITEMS}")
    if not value:
        raise ItemsError(f"{place} has no items", hint=form)
    return [Entry(table, f"{place}[{number}]", form) for number, table in enumerate(value)]


def paragraphs(parts: Iterable[tuple[str, str | Sequence[str]]]) -> str:
    """Join the parts of a body that are there, each below its heading."""
    shown: list[str] = []
    for heading, part in parts:
        text = part.strip() if isinstance(part, str) else "\n".join(f"- {one}" for one in part)
        if text:
            shown.append(f"{heading}:\n{text}" if heading else text)
    return "\n\n".join(shown)


def kind(value: object) -> str:
    """Return what a decoded value is, in words."""
    if value is None:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a table")


def show(value: object) -> str:
    """Return a value for an error, short and clean."""
    shown = clean_line(repr(value)[:80])
    return f"{shown}…" if len(repr(value)) > 80 else shown
