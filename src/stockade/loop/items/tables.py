"""Work items as TOML or JSON: our own form, prd.json, and the lists that trackers print."""

from __future__ import annotations

from typing import Any

from stockade.linux.plain_text import clean_line
from stockade.loop.items.entries import MOST_ATTEMPTS, Entry, entries, kind, paragraphs
from stockade.loop.items.item import ItemsError, WorkItem

TOML_FORM = """write a table for each item:

[[items]]
id = "parser-comments"
title = "Let the parser accept comments"
body = "A comment begins with # and ends with the line."   # optional, as is everything below
depends_on = ["lexer"]
priority = 1                        # lower first
labels = ["parser"]
verify = "pytest -q tests/test_parser.py"
judge = ["tests"]
attempts = 5"""
JSON_FORM = """write a list of items:

{"items": [{"id": "parser-comments", "title": "Let the parser accept comments",
            "body": "", "depends_on": [], "priority": 1, "labels": [],
            "verify": "pytest -q", "judge": ["tests"], "attempts": 5}]}"""
PRD_FORM = """prd.json has its stories at the top level:

{"project": "...", "branchName": "...", "description": "...",
 "userStories": [{"id": "US-001", "title": "...", "description": "...",
                  "acceptanceCriteria": ["..."], "priority": 1, "passes": false,
                  "labels": [], "dependsOn": [], "notes": ""}]}"""
LIST_FORM = """print a list of objects:

[{"id": "bd-12", "title": "...", "description": "...", "priority": 1, "labels": []}]

or the form of a file: {"items": [...]}"""

_OURS = ("id", "title", "body", "depends_on", "priority", "labels", "verify", "judge", "attempts")
#: How models wrap the stories of a prd.json, though its readers do not expect it.
_WRAPPERS = ("prd", "tasks", "stories", "user_stories", "features", "data")
#: What trackers call an item that needs no more work.
_DONE = frozenset({"closed", "done", "completed", "resolved", "tombstone"})


def from_table(value: Any, name: str, form: str) -> list[WorkItem]:
    """Read the items of a decoded TOML or JSON file, whichever form it has."""
    if isinstance(value, list):
        return from_list(value, name)
    if not isinstance(value, dict):
        raise ItemsError(f"{name} holds {kind(value)}, and no items", hint=form)
    if "userStories" in value:
        return from_prd(value, name)
    if "items" in value:
        return from_ours(value, name, form)
    for wrapper in _WRAPPERS:
        if wrapper in value:
            raise ItemsError(f"{name} has {wrapper!r} at the top level, and no userStories", hint=PRD_FORM)
    found = ", ".join(clean_line(str(key)[:40]) for key in list(value)[:5]) or "nothing"
    raise ItemsError(f"{name} has no items: at the top level it has {found}", hint=form)


def from_ours(value: dict[str, Any], name: str, form: str) -> list[WorkItem]:
    """Read our own form, which has no other fields."""
    for key in value:
        if key != "items":
            raise ItemsError(f"{name} has {clean_line(str(key)[:80])!r} beside its items", hint=form)
    found = []
    for entry in entries(value["items"], f"{name}: items", form):
        entry.refuse_unknown(_OURS)
        found.append(
            WorkItem(
                id=entry.id("id"),
                title=entry.title(),
                body=entry.text("body"),
                depends_on=entry.texts("depends_on"),
                priority=entry.priority(),
                labels=entry.texts("labels"),
                verify=entry.text("verify"),
                judge=entry.paths("judge"),
                attempts=entry.number("attempts", None, least=1, most=MOST_ATTEMPTS),
            )
        )
    return found


def from_prd(value: dict[str, Any], name: str) -> list[WorkItem]:
    """Read a prd.json; stories that pass are done and left out, also as dependencies."""
    stories = entries(value["userStories"], f"{name}: userStories", PRD_FORM)
    found, done = list[WorkItem](), set[str]()
    for entry in stories:
        passes = entry.value("passes")
        if passes not in (True, False, None):
            raise entry.error("passes must be true or false")
        if passes:
            done.add(entry.id("id"))
            continue
        body = paragraphs(
            [
                ("", entry.text("description")),
                ("Acceptance criteria", entry.texts("acceptanceCriteria")),
                ("Notes", entry.text("notes")),
            ]
        )
        found.append(
            WorkItem(
                id=entry.id("id"),
                title=entry.title(),
                body=body,
                depends_on=entry.texts("dependsOn"),
                priority=entry.priority(),
                labels=entry.texts("labels"),
            )
        )
    return [_without(item, done) for item in found]


def from_list(value: list[Any], name: str) -> list[WorkItem]:
    """Read the list that a tracker prints: `bd ready --json`, `gh issue list --json number,title,body`.

    The tracker knows what is ready: dependencies on items that it does not print are done.
    """
    found = []
    for entry in entries(value, name, LIST_FORM):
        if str(entry.value("status") or entry.value("state") or "").lower() in _DONE:
            continue
        body = paragraphs(
            [
                ("", entry.text("description") or entry.text("body")),
                ("Design", entry.text("design")),
                ("Acceptance criteria", _text_or_texts(entry, "acceptance_criteria")),
                ("Notes", entry.text("notes")),
            ]
        )
        found.append(
            WorkItem(
                id=entry.id("id", "number", "key"),
                title=entry.title(),
                body=body,
                depends_on=_dependencies(entry),
                priority=entry.priority(),
                labels=_labels(entry),
                verify=entry.text("verify"),
            )
        )
    printed = {item.id for item in found}
    return [_without(item, set(item.depends_on) - printed) for item in found]


def _without(item: WorkItem, done: set[str]) -> WorkItem:
    import msgspec

    left = tuple(other for other in item.depends_on if other not in done)
    return msgspec.structs.replace(item, depends_on=left)


def _text_or_texts(entry: Entry, name: str) -> str | tuple[str, ...]:
    return entry.texts(name) if isinstance(entry.value(name), list) else entry.text(name)


def _labels(entry: Entry) -> tuple[str, ...]:
    """Return the labels, which GitHub prints as objects with a name."""
    value = entry.value("labels")
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return tuple(
            Entry(one, f"{entry.place}.labels", LIST_FORM).text("name", required=True) for one in value
        )
    return entry.texts("labels")


def _dependencies(entry: Entry) -> tuple[str, ...]:
    """Return what blocks the item: ids, or the objects of beads, of which only `blocks` ones block."""
    for name in ("depends_on", "dependsOn"):
        if name in entry:
            return entry.texts(name)
    value = entry.value("dependencies")
    if value is None:
        return ()
    if not isinstance(value, list):
        raise entry.error(f"dependencies must be a list, and is {kind(value)}")
    found = []
    for one in value:
        if isinstance(one, str):
            found.append(one)
            continue
        inner = Entry(one, f"{entry.place}.dependencies", LIST_FORM)
        blocks = inner.text("type") or inner.text("dependency_type") or "blocks"
        if blocks in ("blocks", "parent-child"):
            found.append(inner.id("depends_on_id", "id"))
    return tuple(found)
