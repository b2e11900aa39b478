"""A learned policy as TOML with comments, and as an addition to a policy file that exists.

A program chose many of the names in it. So each value is escaped as TOML escapes it, and each comment is on
one line, without control characters and of bounded length.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

from stockade.errors import PolicyError
from stockade.linux.plain_text import clean_line
from stockade.observe.learning.learned_policy import LISTS, LearnedPolicy
from stockade.observe.learning.lesson import LearnedEntry, LearnQuestion
from stockade.policy.model import Policy
from stockade.policy.toml import clauses, write
from stockade.policy.values import quote, render

#: The most characters of a comment, and of the command in the first line.
LONGEST_COMMENT = 160
LONGEST_COMMAND = 100
#: The column at which the reason for an entry begins.
REASON_AT = 36

HIDDEN = "Hidden in the workspace. ** means any depth, ? means it may be missing."
QUESTIONS = "# Not granted. Decide for yourself:"
#: What the comment above each clause says.
WORDS = {
    "read": "Files and directories that it reads, besides those of the profile.",
    "net": "Hosts that it reaches. It reaches no other.",
    "pass_env": "Variables of your environment that its programs obey.",
    "toolchain": "Commands that it starts by name, and whose installs are elsewhere than the system's.",
    "exec": "The only programs that it may execute. Nothing that it writes is executable.",
}


def policy_text(learned: LearnedPolicy, command: Sequence[str], *, workspace: str = "") -> str:
    """Return the text of a new policy file; `workspace` is the path of the workspace to write, if any."""
    table = _plain(learned, workspace)
    lines = [*_heading(learned, command), ""]
    own = {name for name in LISTS if learned.additions.get(name)}
    plain = {name: value for name, value in table.items() if name not in own and not isinstance(value, dict)}
    if hidden := plain.pop("deny", None):
        lines += [f"# {HIDDEN}", f"deny = {render(hidden)}", ""]
    if plain:
        lines += ["# What the runs began with.", *write(plain).splitlines(), ""]
    for name in LISTS:
        if name in own:
            lines += [f"# {WORDS[name]}", *_list(name, _known(table, name), learned.additions[name]), ""]
    lines += _comments(learned)
    for name, value in table.items():
        if isinstance(value, dict) and value:
            lines += [f"[{name}]", *(f"{_key(key)} = {render(one)}" for key, one in value.items()), ""]
    lines += _limits(learned)
    text = "\n".join(lines).rstrip("\n") + "\n"
    _check(text, learned, workspace)
    return text


def merged_text(text: str, learned: LearnedPolicy, name: str) -> str:
    """Return the text of a policy file with what was learned added to its lists; the rest stays as it is."""
    added = {
        key: entries
        for key, entries in learned.additions.items()
        if key != "exec" or learned.start.exec is not None
    }
    if learned.start.net == "open":
        added.pop("net", None)
    before = clauses(text, name=name)
    expected = {**before}
    lines = text.splitlines()
    for key, entries in added.items():
        had = before.get(key)
        if isinstance(had, bool):
            raise _cannot(name, f"{key} = {render(had)} is no list")
        expected[key] = [*(had or ()), *(one.text for one in entries)]
        lines = _grown(lines, key, entries) if had is not None else _inserted(lines, key, entries)
    asked = [f"# - {question_line(one)}" for one in learned.questions]
    if new := [line for line in asked if line not in lines]:
        lines = [*lines, "", QUESTIONS, *new]
    result = "\n".join(lines).rstrip("\n") + "\n"
    try:
        same = clauses(result, name=name) == _normal(expected)
    except PolicyError:
        same = False
    if not same:
        raise _cannot(name, "its lists are written in a way that cannot be extended")
    return result


def question_line(one: LearnQuestion) -> str:
    """Return a question on one line."""
    words = comment(f"{one.wanted}: {one.why}")
    allow = comment(one.allow)
    # Half of a line could grant something else.
    return f"{words}; to allow it: {allow}" if allow and not allow.endswith("…") else words


def comment(words: str, most: int = LONGEST_COMMENT) -> str:
    """Return words for a comment: on one line, escaped, and not too long."""
    line = clean_line(words[: most * 2]).replace("\r", "\\r")
    return line if len(line) <= most else f"{line[: most - 1]}…"


def quoted(text: str) -> str:
    """Return text as TOML, with nothing in it that a terminal obeys or does not show."""
    plain = quote(text)
    return plain if plain.isprintable() else "".join(map(_escaped, plain))


def _escaped(letter: str) -> str:
    if letter.isprintable():
        return letter
    code = ord(letter)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def _heading(learned: LearnedPolicy, command: Sequence[str]) -> list[str]:
    shown = comment(shlex.join(command[:50]), LONGEST_COMMAND)
    runs = f"{learned.runs} run{'s' if learned.runs != 1 else ''}"
    lines = [
        f"# What this command needs, learned by `stockade learn` from {runs} of it:",
        "#",
        f"#     {shown}",
        "#",
        "# The command chose what is in here: read it before you use it. `stockade policy check` says what",
        "# this file enforces.",
    ]
    if not learned.settled:
        lines.append("# It is not complete: the last run still met a refusal, or another one than before.")
    if learned.exit_code or learned.ended:
        lines.append(f"# The last run failed: {comment(learned.ended or f'exit code {learned.exit_code}')}.")
    return lines


def _comments(learned: LearnedPolicy) -> list[str]:
    lines = [f"# {comment(note)}" for note in learned.notes]
    if learned.questions:
        lines += ["", QUESTIONS] if lines else [QUESTIONS]
        lines += [f"# - {question_line(one)}" for one in learned.questions]
    return [*lines, ""] if lines else []


def _limits(learned: LearnedPolicy) -> list[str]:
    known = {name: getattr(learned.start.limits, name) for name in learned.start.limits.__struct_fields__}
    written = {name: value for name, value in known.items() if value is not None}
    new = {name: one for name, one in learned.limits.items() if name not in written}
    if not (written or new):
        return []
    table = learned.start.table().get("limits", {})
    lines = ["# With room to spare: another machine is slower, another day there is more to do.", "[limits]"]
    lines += [f"{name} = {render(value)}" for name, value in table.items()]
    lines += [_with_reason(f"{name} = {one.text}", one.reason) for name, one in new.items()]
    return [*lines, ""]


def _list(name: str, had: Sequence[str], entries: Iterable[LearnedEntry]) -> list[str]:
    inner = [f"    {quoted(text)}," for text in had]
    inner += [_with_reason(f"    {quoted(one.text)},", one.reason) for one in entries]
    return [f"{name} = [", *inner, "]"]


def _with_reason(line: str, reason: str) -> str:
    return f"{line.ljust(REASON_AT)}  # {comment(reason, 80)}" if reason else line


def _plain(learned: LearnedPolicy, workspace: str) -> dict[str, Any]:
    table: dict[str, Any] = {
        name: value for name, value in learned.start.table().items() if name not in ("limits", "workspace")
    }
    if workspace:
        table["workspace"] = {"path": workspace}
        if learned.start.workspace is not None and learned.start.workspace.mode != "overlay":
            table["workspace"]["mode"] = learned.start.workspace.mode
    return table


def _known(table: dict[str, Any], name: str) -> list[str]:
    value = table.get(name, ())
    return [str(item) for item in value] if isinstance(value, list | tuple) else []


def _key(name: str) -> str:
    plain = name.replace("_", "").replace("-", "").isalnum() and name.isascii()
    return name if plain else quote(name)


def _grown(lines: list[str], key: str, entries: Sequence[LearnedEntry]) -> list[str]:
    """Add entries at the end of a list that the lines write: before its last bracket."""
    first = next((at for at, line in enumerate(lines) if _begins(line, key)), None)
    if first is None:
        return lines
    for last in range(first, len(lines)):
        body = _without_comment(lines[last])
        if not body.rstrip().endswith("]"):
            continue
        head, tail = body.rstrip()[:-1], lines[last][len(body.rstrip()) :]
        if head.strip() and not head.rstrip().endswith(("[", ",")):
            head = f"{head.rstrip()},"
        elif not head.strip() and last > first:
            _end_with_comma(lines, first, last - 1)
        opened = [head.rstrip()] if head.strip() else []
        inner = [_with_reason(f"    {quoted(one.text)},", one.reason) for one in entries]
        return [*lines[:last], *opened, *inner, f"]{tail}", *lines[last + 1 :]]
    return lines


def _end_with_comma(lines: list[str], first: int, last: int) -> None:
    """Put a comma after the last item of a list, whose lines may end in comments."""
    for at in range(last, first - 1, -1):
        body = _without_comment(lines[at])
        if body.strip():
            if not body.rstrip().endswith(("[", ",")):
                lines[at] = f"{body.rstrip()},{lines[at][len(body.rstrip()) :]}"
            return


def _inserted(lines: list[str], key: str, entries: Sequence[LearnedEntry]) -> list[str]:
    """Add a clause before the first table, since what follows a table's header belongs to it."""
    at = next((at for at, line in enumerate(lines) if line.lstrip().startswith("[")), len(lines))
    while at and lines[at - 1].lstrip().startswith("#"):
        at -= 1  # a comment above the header belongs to it
    before = lines[:at]
    while before and not before[-1].strip():
        before.pop()
    gap = [""] if before else []
    return [*before, *gap, f"# {WORDS[key]}", *_list(key, (), entries), "", *lines[at:]]


def _begins(line: str, key: str) -> bool:
    name, equals, rest = line.partition("=")
    return bool(equals) and name.strip().strip("\"'") == key and rest.strip().startswith("[")


def _without_comment(line: str) -> str:
    """Return a line of TOML without the comment at its end."""
    inside = ""
    at = 0
    while at < len(line):
        letter = line[at]
        if inside == '"' and letter == "\\":
            at += 1
        elif inside:
            inside = "" if letter == inside else inside
        elif letter in "\"'":
            inside = letter
        elif letter == "#":
            return line[:at]
        at += 1
    return line


def _normal(table: dict[str, Any]) -> dict[str, Any]:
    checked = Policy(**table).table(full=True)
    return {
        key: {part: value[part] for part in table[key] if part in value} if isinstance(value, dict) else value
        for key, value in checked.items()
        if key in table
    }


def _check(text: str, learned: LearnedPolicy, workspace: str) -> None:
    """Refuse a text that does not mean the policy that was learned: a name in it must not change it."""
    found = Policy(**clauses(text))
    wanted = learned.policy().table(full=True)
    wanted["workspace"] = None
    if workspace:
        wanted["workspace"] = _plain(learned, workspace)["workspace"]
    if found != Policy(**wanted):
        raise PolicyError("the learned policy cannot be written", hint="a name in it is too strange")


def _cannot(name: str, why: str) -> PolicyError:
    return PolicyError(
        f"{name} cannot be merged with: {why}", hint="write to another file: -o FILE, and compare the two"
    )
