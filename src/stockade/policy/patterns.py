"""Patterns in a policy's paths: `*` for characters of one name, `**` for directories at any depth.

Two clauses have them. In `exec` a `?` also stands for one character. In `deny`
it does not, and everything that other tools treat as a wildcard is refused: a
pattern that is not expanded hides nothing, and the user would not notice. In
brackets each of those characters stands for itself, as in `[*]`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

#: A character that stands for itself.
_QUOTED = r"\[([*?\[{])\]"
_TOKENS = r"(\[[*?\[{]\]|\*+)"
_SPECIAL = frozenset("*?[{")
#: Alternatives as shells and gitignore write them; ${NAME} is a variable.
_ALTERNATIVES = r"(?<!\$)\{[^/{}]*,[^/{}]*\}"

ANY_DEPTH = "**"
#: PATH_MAX: no path is longer.
LONGEST = 4096
#: How many states are cached: the author of the tree decides how many there are.
MOST_STATES = 10_000


def quote(name: str) -> str:
    """Quote a file name for `deny`, so that no character of it is a wildcard."""
    return "".join(f"[{char}]" if char in _SPECIAL else char for char in name)


def unquote(text: str) -> str:
    """The file name that a `deny` without wildcards names."""
    return re.sub(_QUOTED, r"\1", text) if "[" in text else text


def is_relative(path: str) -> bool:
    """Whether a `deny` is relative to the workspace."""
    return not path.startswith(("/", "~", "$"))


def is_pattern(text: str) -> bool:
    """Whether a `deny` has wildcards."""
    return "*" in text and "*" in re.sub(_QUOTED, "", text)


def problem(text: str) -> tuple[str, str] | None:
    """What is wrong with a `deny` and what to write instead; None if it is valid."""
    if len(text) >= LONGEST:
        return "is longer than a path can be", "name a directory above it"
    if _SPECIAL.isdisjoint(text):
        return None
    bare = re.sub(_QUOTED, "", text)
    if bare.endswith("?"):
        bare = bare[:-1]
        if "*" not in bare:
            return "a denied path need not exist, so it takes no ?", "leave the ? out"
    if "?" in bare:
        return "? is not a wildcard here", "write * for any characters, and [?] for a ? in a name"
    if "[" in bare:
        return "[...] is not a wildcard here", "write * for any characters, and [[] for a [ in a name"
    if re.search(_ALTERNATIVES, bare):
        return "{...} is not a wildcard here", "write one pattern for each, and [{] for a { in a name"
    for part in text.removesuffix("?").split("/"):
        if ANY_DEPTH in part and part != ANY_DEPTH:
            return "** must stand alone between slashes", f'write "**/{re.sub("[*]+", "*", part)}"'
    return None


#: How far patterns have matched in a directory: the number of each, and which of its parts is next.
States = frozenset[tuple[int, int]]


class Globs:
    """Several absolute `deny` patterns, matched together against a path name by name from the root."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self.parts = [_parts(pattern) for pattern in patterns]
        self._steps: dict[States, PatternStep] = {}
        self._states = 0

    def start(self) -> States:
        """The states at the root."""
        return frozenset(state for number in range(len(self.parts)) for state in self.reach(number, 0))

    def reach(self, number: int, at: int) -> list[tuple[int, int]]:
        """The state of a part, and of those after it while ** may stand for no directory."""
        states = [(number, at)]
        while self.parts[number][at] is None:
            at += 1
            states.append((number, at))
        return states

    def step(self, states: States) -> PatternStep:
        """How the patterns match names in a directory with these states."""
        step = self._steps.get(states)
        if step is None:
            self._states += len(states)
            if self._states > MOST_STATES:
                self._states = len(states)
                self._steps.clear()
            step = self._steps[states] = PatternStep(self, states)
        return step


class PatternStep:
    """How patterns in some states match the names of one directory."""

    def __init__(self, globs: Globs, states: States) -> None:
        self._last: list[tuple[int, re.Pattern[str]]] = []
        self._inner: list[tuple[re.Pattern[str], list[tuple[int, int]]]] = []
        plain: set[str] | None = set()
        through: list[tuple[int, int]] = []
        for number, at in states:
            part = globs.parts[number][at]
            if part is None:
                through += globs.reach(number, at)
                continue
            names, matches = part
            if at + 1 == len(globs.parts[number]):
                self._last.append((number, matches))
            else:
                self._inner.append((matches, globs.reach(number, at + 1)))
            plain = None if plain is None or names is None else plain | {names}
        self._through = frozenset(through)
        #: The only names that can match here; None if every name must be tried.
        self.names = None if self._through or plain is None else plain
        either = "|".join(f"(?:{matches.pattern})" for _, matches in self._last)
        #: Matches a name that a pattern names in full.
        self.means = re.compile(either or "(?!)", re.DOTALL).fullmatch

    def meant_by(self, name: str) -> list[int]:
        """The numbers of the patterns that match this name in full."""
        return [number for number, matches in self._last if matches.fullmatch(name)]

    def below(self, name: str) -> States:
        """The states in a directory of that name."""
        if not self._inner:
            return self._through
        inner = [state for matches, states in self._inner if matches.fullmatch(name) for state in states]
        return self._through.union(inner)


#: The name, None if it has wildcards, and the expression that it must match; None for **.
Part = tuple[str | None, re.Pattern[str]] | None


def _parts(path: str) -> tuple[Part, ...]:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    # Everything below at any depth lies in something directly below.
    if parts[-1] == ANY_DEPTH:
        parts[-1] = "*"
    # Two ** in a row are one.
    parts = [part for part, before in zip(parts, ["", *parts], strict=False) if {part, before} != {ANY_DEPTH}]
    return tuple(_part(part) for part in parts)


def _part(text: str) -> Part:
    if text == ANY_DEPTH:
        return None
    if not is_pattern(text):
        return unquote(text), re.compile(re.escape(unquote(text)))
    words = [""]
    for token in re.split(_TOKENS, text):
        if token.strip("*"):
            words[-1] += unquote(token)
        elif token:
            words.append("")
    first, *between, last = map(re.escape, words)
    # Atomic groups take the first place of each word: with backtracking a hostile name would take forever.
    inner = "".join(f"(?>.*?{word})" for word in between)
    return None, re.compile(f"{first}{inner}.*{last}", re.DOTALL)


def is_included(pattern: str, patterns: Iterable[str]) -> bool:
    """Whether one of the other `exec` patterns includes everything that `pattern` names; compared as text."""
    name, *others = (one.removesuffix("?").replace("/./", "/") for one in (pattern, *patterns))
    plain = not has_wildcard(name)
    return name in others or (plain and any(compile_pattern(other).fullmatch(name) for other in others))


def has_wildcard(text: str) -> bool:
    """Whether an `exec` has wildcards."""
    return "*" in text or "?" in text


@functools.lru_cache(maxsize=64)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile an `exec` pattern into the expression that a path must match."""
    words = {"/**/": "/(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(/\*\*/|\*\*|\*|\?)", pattern)
    return re.compile("".join(words.get(part) or re.escape(part) for part in parts), re.DOTALL)
