"""A reader of sandbox-exec's profiles, as far as Stockade writes them: anything else in one is an error.

Written from the language's form and not from the code that writes profiles, so that the two check each other.
"""

from __future__ import annotations

from typing import NamedTuple

#: What stands for a filter, by how many strings and words it takes.
FILTERS = {
    "literal": ("string",),
    "subpath": ("path",),
    "sysctl-name": ("string",),
    "target": ("same-sandbox",),
    "vnode-type": ("CHARACTER-DEVICE|BLOCK-DEVICE",),
    "remote": ("ip", "string"),
    "local": ("ip", "string"),
}
#: Operations, and the filters each may have.
FILES = {"literal", "subpath", "vnode-type"}
OPERATIONS = {
    "process-fork": set(),
    "process-exec": FILES,
    "process-info*": {"target"},
    "signal": {"target"},
    "sysctl-read": {"sysctl-name"},
    "file-read*": FILES,
    "file-read-data": FILES,
    "file-read-metadata": FILES,
    "file-map-executable": FILES,
    "file-write*": FILES,
    "file-write-data": FILES,
    "network-outbound": {"remote", "literal"},
    "network-inbound": {"local"},
    "network-bind": {"local"},
    "system-socket": set(),
}
#: What may be allowed everywhere.
UNFILTERED = {"process-fork", "system-socket"}


class Text(str):
    """A string of the language, not a word."""


class Rule(NamedTuple):
    allow: bool
    operations: tuple[str, ...]
    #: Each as its name and what it is given.
    filters: tuple[tuple[str, ...], ...]


class Profile(NamedTuple):
    message: str
    rules: tuple[Rule, ...]

    def allows(self, operation: str, path: str) -> bool:
        """What becomes of a file: the last rule that matches counts."""
        verdict = False
        for rule in self.rules:
            covered = any(
                operation == name or (name.endswith("*") and operation.startswith(name[:-1]))
                for name in rule.operations
            )
            if covered and any(_matches(one, path) for one in rule.filters):
                verdict = rule.allow
        return verdict


def _matches(one: tuple[str, ...], path: str) -> bool:
    kind, *given = one
    if kind == "literal":
        return path == given[0]
    return kind == "subpath" and (path == given[0] or path.startswith(given[0] + "/"))


def read(text: str) -> Profile:
    """The profile that a text is; ValueError if it is none."""
    forms = parse(text)
    if forms[:1] != [["version", "1"]]:
        raise ValueError("a profile begins with its version")
    match forms[1:]:
        case [["deny", "default", ["with", "message", Text() as message]], *rules]:
            return Profile(str(message), tuple(map(_rule, rules)))
    raise ValueError(f"nothing must be allowed by default: {forms[1:2]!r}")


def _rule(form: object) -> Rule:
    match form:
        case [("allow" | "deny") as action, *rest]:
            words = [word for word in rest if isinstance(word, str)]
            filters = [word for word in rest if isinstance(word, list)]
        case _:
            raise ValueError(f"not a rule: {form!r}")
    if rest != [*words, *filters] or not words or any(isinstance(word, Text) for word in words):
        raise ValueError(f"operations come first, then filters: {form!r}")
    for word in words:
        if word not in OPERATIONS:
            raise ValueError(f"no such operation: {word}")
        if action == "allow" and not filters and word not in UNFILTERED:
            raise ValueError(f"{word} would be allowed everywhere")
    found = tuple(_filter(one, words) for one in filters)
    return Rule(action == "allow", tuple(words), found)


def _filter(form: list[object], operations: list[str]) -> tuple[str, ...]:
    name, *given = form
    if not isinstance(name, str) or name not in FILTERS:
        raise ValueError(f"no such filter: {form!r}")
    if any(name not in OPERATIONS[operation] for operation in operations):
        raise ValueError(f"{name} does not go with {operations}")
    wanted = FILTERS[name]
    if len(given) != len(wanted):
        raise ValueError(f"{name} takes {len(wanted)}: {form!r}")
    words = []
    for kind, value in zip(wanted, given, strict=True):
        if kind == "path" and isinstance(value, list):
            if len(value) != 2 or value[0] != "param" or not isinstance(value[1], Text):
                raise ValueError(f"no path: {value!r}")
            words.append(f"param {value[1]}")
            continue
        as_text = kind in ("path", "string")
        if not isinstance(value, str) or isinstance(value, Text) != as_text:
            raise ValueError(f"{name} takes {kind}: {value!r}")
        if as_text and name in ("literal", "subpath") and not value.startswith("/"):
            raise ValueError(f"not a real name: {value!r}")
        if not as_text and value not in kind.split("|"):
            raise ValueError(f"{name} takes {kind}: {value!r}")
        words.append(str(value))
    return (name, *words)


def parse(text: str) -> list[object]:
    """The forms of a text: lists, words and strings. Comments end with their line."""
    forms: list[object] = []
    open_lists: list[list[object]] = []
    at = 0

    def put(form: object) -> None:
        if not open_lists and not isinstance(form, list):
            raise ValueError(f"outside of every list: {form!r}")
        (open_lists[-1] if open_lists else forms).append(form)

    while at < len(text):
        char = text[at]
        if char == ";":
            at = text.find("\n", at) if "\n" in text[at:] else len(text)
        elif char.isspace():
            at += 1
        elif char == "(":
            open_lists.append([])
            at += 1
        elif char == ")":
            if not open_lists:
                raise ValueError("a list is closed that was not opened")
            put(open_lists.pop())
            at += 1
        elif char == '"':
            value, at = _string(text, at + 1)
            put(Text(value))
        else:
            end = at
            while end < len(text) and not text[end].isspace() and text[end] not in '();"':
                end += 1
            put(text[at:end])
            at = end
    if open_lists:
        raise ValueError("a list is not closed")
    return forms


def _string(text: str, at: int) -> tuple[str, int]:
    value = ""
    while at < len(text):
        char = text[at]
        if char == '"':
            return value, at + 1
        if char == "\\":
            at += 1
            if text[at : at + 1] not in ('"', "\\"):
                raise ValueError(f"what a backslash before {text[at : at + 1]!r} means is not certain")
            char = text[at]
        value += char
        at += 1
    raise ValueError("a string is not closed")
