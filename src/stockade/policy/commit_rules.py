"""Whether a commit under one policy lands no more than a commit under another.

`hold_back` and `allow_commit` are relative to the top of the workspace, and so
are the names in the hold-back table. The same words therefore name other files
where the workspace lies elsewhere: `hold_back = ["sub/x"]` holds nothing back
in a workspace that is `sub` itself. So the patterns of the wider policy are
rewritten for the directory of the narrower one before they are compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from stockade.policy.model import REPOSITORIES, Policy
from stockade.policy.values import show

Pattern = tuple[str, ...]


def excess(mine: Policy, other: Policy, top: str, other_top: str) -> Iterator[str]:
    """Describe what a commit under `mine` lands beyond one under `other`.

    The tops are the directories that the patterns are relative to; they are empty unless both policies
    change a copy of some of the same files.
    """
    yield from (f"without hold_back = {show(one)}" for one in other.hold_back if one not in mine.hold_back)
    yield from (f"allow_commit = {show(one)}" for one in mine.allow_commit if one not in other.allow_commit)
    if top == other_top:
        return
    if (names := between(other_top, top)) is not None:
        yield from _excess_in_subdirectory(mine, other, top, names)
    elif between(top, other_top) is not None:
        yield f"workspace.path = {show(top)}: commits in {other_top}, by rules of a directory above it"


def _excess_in_subdirectory(mine: Policy, other: Policy, top: str, names: list[str]) -> Iterator[str]:
    """Describe the excess of a workspace that lies in the other policy's, below it by these names."""
    from stockade.policy.holdback_lookup import spelled

    low = [spelled(name) for name in names]
    held_back = set(_patterns(map(spelled, mine.hold_back)))
    for pattern in _patterns(map(spelled, other.hold_back)):
        for rest in sorted(remainders(pattern, low) - held_back):
            yield f"without hold_back = {show(_text(rest))} in {top}"
    allowed = {rest for pattern in _patterns(other.allow_commit) for rest in remainders(pattern, names)}
    for text in mine.allow_commit:
        if next(_patterns([text])) not in allowed:
            yield f"allow_commit = {show(text)} in {top}"
    if tool := _tool_of(low):
        yield f"workspace.path = {show(top)}: a commit there does not see that it lands in files of {tool}"


def between(above: str, below: str) -> list[str] | None:
    """The names that lead from one directory to another below it; None if it does not lie below."""
    start = above.rstrip("/") + "/"
    if not above or not below.startswith(start):
        return None
    return below[len(start) :].replace("$$", "$").split("/")


def _patterns(texts: Iterable[str]) -> Iterator[Pattern]:
    """Split patterns of a policy into names. A pattern also matches everything in what it names."""
    for text in texts:
        names = [*filter(None, text.split("/")), "**"]
        yield tuple(
            name for name, after in zip(names, [*names[1:], ""], strict=True) if {name, after} != {"**"}
        )


def _text(pattern: Pattern) -> str:
    return "/".join(pattern[:-1]) or "**"


def remainders(pattern: Pattern, names: Iterable[str]) -> set[Pattern]:
    """What remains of a pattern below a directory of these names; several patterns if it has `**`."""
    from stockade.policy.holdback_lookup import fits

    remaining = {pattern}
    for name in names:
        further: set[Pattern] = set()
        for one in remaining:
            deep = one[:1] == ("**",)
            further |= {one} if deep else set()
            rest = one[1:] if deep else one
            if rest and fits(rest[:1], [name]):
                further.add(rest[1:])
        remaining = further
    return remaining


def _tool_of(names: list[str]) -> str:
    """The tool that obeys files in a directory because of the directory's name; empty if none does."""
    from stockade.policy.holdback_lookup import Pattern, expanded
    from stockade.policy.holdback_table import OBEYED

    # A bare repository may have any name; of what git obeys in one, only `hooks` is a directory.
    if not {*REPOSITORIES, "hooks"}.isdisjoint(names):
        return "a repository"
    for entry in OBEYED:
        for words in expanded(entry.patterns.lower().split()):
            pattern = Pattern(words, entry)
            if remainders(pattern.names, names) - {pattern.names, ()}:
                return entry.tool
    return ""
