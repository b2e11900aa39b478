"""Where a clause of a policy is written, for errors that appear when the policy is resolved.

By then the files have been merged into one policy. For the message alone, the clause that an error names is
looked up in the files again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from stockade.errors import PolicyError
from stockade.policy.toml import decode, line_of
from stockade.policy.values import render, show

#: A clause at the beginning of a message.
_CLAUSE = re.compile(
    r"(read|write|exec|deny|protect|unprotect|toolchain|workspace(?:\.path)?) = "
    r'("(?:[^"\\]|\\.)*"|".*?\.\.\.)'
)
#: How deeply tables are searched: a policy may be [tool.stockade], or a layer in a file.
DEEPEST = 5


def located(error: PolicyError, sources: Sequence[str]) -> PolicyError:
    """Return the error, with the file and the line of its clause in front of the message."""
    found = _CLAUSE.match(error.message)
    if found is not None:
        key, value = found.groups()
        places = [place for source in reversed(sources) if (place := _place(source, key, value))]
        if places:
            error.args = (f"{places[0]}: {error.message}", *error.args[1:])
    return error


def place_of(clause: str, sources: Sequence[str]) -> str:
    """Return the file and the line of a clause such as `deny = "secrets"`; empty if no file writes it."""
    key, equals, value = clause.partition(" = ")
    if not equals:
        return ""
    return next((place for source in reversed(sources) if (place := _place(source, key, value))), "")


def _place(source: str, key: str, value: str) -> str:
    """Return the file and the line that write a value as a message shows it; empty if this file does not."""
    from stockade.policy.toml import read_file, text_of

    try:
        text = text_of(read_file(source), source)
        table = decode(text, source)
    except PolicyError:  # it has changed since, or is not TOML
        return ""
    for names, written in _values(table, ()):
        if names[-1:] == (key,) or names[-2:] == (*key.split("."),):
            for one in written if isinstance(written, list) else [written]:
                if isinstance(one, str) and _means(one, value):
                    line = line_of(text, names, one)
                    return f"{source}:{line}" if line else source
    return ""


def _values(table: dict[str, Any], above: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield every value of a file with its dotted name: a policy may be one table of a larger file."""
    for name, value in table.items():
        names = (*above, name)
        if isinstance(value, dict) and len(names) < DEEPEST:
            yield from _values(value, names)
        else:
            yield names, value


def _means(written: str, value: str) -> bool:
    """Whether a message's value comes from the written text; a relative path has become absolute by now."""
    if show(written) == value:
        return True
    tail = render(written.removeprefix("./").removesuffix("?")).strip('"')
    if not tail or written.startswith(("/", "~", "$")):
        return False
    if not value.endswith("..."):
        return value.strip('"').removesuffix("?").endswith(f"/{tail}")
    return True  # a long value is cut in messages, so any relative path may be it
