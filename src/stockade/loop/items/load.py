"""Read work items from their source: a file, a directory of tasks, or a command that prints them."""

from __future__ import annotations

import os
from typing import Any

import msgspec

from stockade.errors import PolicyError
from stockade.linux.plain_text import clean_line
from stockade.loop.items import harbor, markdown, tables
from stockade.loop.items.item import ItemsError, WorkItem, order_items
from stockade.loop.items.source_file import printed_by, read_text

__all__ = ["KINDS", "load_items", "order_items"]

#: What `kind` may say, and the files that have it.
KINDS = {
    "toml": ".toml: our own form",
    "json": ".json: our own form, prd.json, or the list that a tracker prints",
    "markdown": ".md: a checklist",
    "harbor": "a directory of Harbor tasks",
    "command": "'!COMMAND': a command that prints JSON, such as '!bd ready --json'",
}
_SUFFIXES = {".toml": "toml", ".json": "json", ".md": "markdown", ".markdown": "markdown"}


def load_items(source: str, *, kind: str | None = None, commands: bool = False) -> tuple[WorkItem, ...]:
    """Read the work items of a source, in the order in which it has them.

    Without `kind` the source says what it is: a directory has Harbor tasks, a file is what its name ends in,
    and `!` begins a command. A command runs on the host, so `commands` must say that the user asked for it:
    a file of the project must not.
    """
    kind = kind or _kind_of(source)
    if kind == "command":
        command = source.removeprefix("!").strip()
        if not commands:
            raise ItemsError(
                f"the items come from a command ({clean_line(command[:200])}), which runs outside of every "
                "sandbox, and a file asks for it",
                hint="if you trust it, ask for it yourself: --items " + f"'!{clean_line(command[:200])}'",
            )
        if not command:
            raise ItemsError("there is no command after !", hint="write --items '!bd ready --json'")
        name = f"the output of {clean_line(command[:200])}"
        items = tables.from_table(_json(printed_by(command), name, tables.LIST_FORM), name, tables.LIST_FORM)
    elif kind == "harbor":
        items = harbor.from_directory(source)
    elif kind == "markdown":
        items = markdown.from_markdown(read_text(source), clean_line(source))
    elif kind == "toml":
        items = tables.from_table(
            _toml(read_text(source), clean_line(source)), clean_line(source), tables.TOML_FORM
        )
    elif kind == "json":
        items = tables.from_table(
            _json(read_text(source), clean_line(source), tables.JSON_FORM),
            clean_line(source),
            tables.JSON_FORM,
        )
    else:
        raise ItemsError(f"there is no kind of items {kind!r}", hint=f"the kinds are {', '.join(KINDS)}")
    order_items(items)
    return tuple(items)


def _kind_of(source: str) -> str:
    if source.startswith("!"):
        return "command"
    if os.path.isdir(source):
        return "harbor"
    kind = _SUFFIXES.get(os.path.splitext(source)[1].lower())
    if kind is None:
        known = "\n".join(f"  {words}" for words in KINDS.values())
        raise ItemsError(
            f"{clean_line(source)}: its name does not say what kind of items it has",
            hint=f"items are\n{known}",
        )
    return kind


def _toml(text: str, name: str) -> Any:
    from stockade.policy import toml

    try:
        return toml.decode(text, name)
    except PolicyError as error:
        raise ItemsError(error.message, hint=tables.TOML_FORM) from None


def _json(text: str, name: str, form: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        words = "nested too deeply" if isinstance(error, RecursionError) else clean_line(str(error))
        raise ItemsError(f"{name} is not JSON: {words}{_place(text, str(error))}", hint=form) from None


def _place(text: str, words: str) -> str:
    """Return line and column for the byte that a message of the decoder names."""
    import re

    byte = re.search(r"\(byte (\d+)\)", words)
    if byte is None:
        return ""
    before = text.encode()[: int(byte[1])].decode("utf-8", "replace")
    return f", line {before.count(chr(10)) + 1}, column {len(before) - before.rfind(chr(10))}"
