"""Work items as a Markdown checklist."""

from __future__ import annotations

import re

from stockade.loop.items.entries import MOST_BODY, MOST_TITLE
from stockade.loop.items.item import MOST_ITEMS, ItemsError, WorkItem

FORM = """write a checklist, with what belongs to an item indented below it:

- [ ] Let the parser accept comments
  A comment begins with # and ends with the line.
- [x] what is ticked is done and left out"""

_BOX = re.compile(r"([ \t]*)(?:[-*+]|\d{1,9}[.)])[ \t]+\[([^\]]?)\](?:[ \t]+(.*))?\Z")
_FENCE = re.compile(r"[ \t]*(```+|~~~+)")


def from_markdown(text: str, name: str) -> list[WorkItem]:
    """Read the boxes of a checklist that are not ticked; what is indented below one is its body."""
    found: list[_Box] = []
    current: _Box | None = None
    fence = ""
    for number, line in enumerate(text.replace("\r\n", "\n").expandtabs(4).split("\n"), 1):
        indent = len(line) - len(line.lstrip(" "))
        inside = current is not None and (indent > current.indent or not line.strip())
        if fenced := _FENCE.match(line):
            fence = "" if fence and fenced[1].startswith(fence) else fence or fenced[1]
        elif not fence and not inside and (box := _BOX.match(line)):
            current = _Box(number, indent, _is_ticked(box[2], f"{name}:{number}"), (box[3] or "").strip())
            _check(current, name, len(found))
            found.append(current)
            continue
        if inside and current is not None:
            current.lines.append(line)
        elif line.strip():
            current = None
    if not found:
        raise ItemsError(f"{name} has no checklist", hint=FORM)
    taken: set[str] = set()
    items = []
    for one in found:
        identity = _identity(one.title, taken)
        body = one.body()
        if len(body) > MOST_BODY:
            raise ItemsError(
                f"{name}:{one.line}: the text below this item is longer than {MOST_BODY} characters"
            )
        if not one.ticked:
            items.append(WorkItem(id=identity, title=one.title, body=body))
    return items


class _Box:
    """One box of a checklist, while it is read."""

    def __init__(self, line: int, indent: int, ticked: bool, title: str) -> None:
        self.line, self.indent, self.ticked, self.title = line, indent, ticked, title
        self.lines: list[str] = []

    def body(self) -> str:
        """Return the lines below it without the indentation that they share."""
        import textwrap

        return textwrap.dedent("\n".join(self.lines)).strip("\n")


def _is_ticked(mark: str, place: str) -> bool:
    if mark in ("x", "X"):
        return True
    if mark in (" ", ""):
        return False
    raise ItemsError(f"{place}: a box holds a space or an x, and this one holds {mark!r}", hint=FORM)


def _check(box: _Box, name: str, before: int) -> None:
    if not box.title:
        raise ItemsError(f"{name}:{box.line}: this box has no text behind it", hint=FORM)
    if len(box.title) > MOST_TITLE:
        raise ItemsError(
            f"{name}:{box.line}: the text of this box has more than {MOST_TITLE} characters",
            hint="write the details indented below it",
        )
    if before >= MOST_ITEMS:
        raise ItemsError(f"{name} has more than {MOST_ITEMS} items")


def _identity(title: str, taken: set[str]) -> str:
    """Return an id made of the title, so that it stays when other boxes come and go."""
    plain = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60].strip("-") or "item"
    identity, number = plain, 1
    while identity in taken:
        number += 1
        identity = f"{plain}-{number}"
    taken.add(identity)
    return identity
