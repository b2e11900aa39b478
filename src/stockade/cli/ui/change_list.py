"""What changed and what was held back, in as few lines as a user reads.

A commit that git makes inside adds tens of files to `.git`. They get one line together at the end, so that
they do not push the file that matters out of a list. Files there that git runs or obeys get their own lines.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from stockade.cli.ui import output

if TYPE_CHECKING:
    from stockade.result import Change
    from stockade.workspace.holdback.holdback import HoldBack

#: How many lines a list has at most, not counting those of repositories.
SHOWN = 20
#: How many paths one line names.
NAMED = 3
#: Where git writes when it makes a repository or a commit. Its hooks and configuration lie elsewhere.
WRITTEN = frozenset(
    {
        "branches",
        "description",
        "objects",
        "refs",
        "logs",
        "index",
        "HEAD",
        "ORIG_HEAD",
        "FETCH_HEAD",
        "COMMIT_EDITMSG",
        "packed-refs",
    }
)


def change_lines(changes: Sequence[Change], count: int = 0) -> list[str]:
    """Return the lines of a list of changes: at most SHOWN paths, then one line for each repository.

    `count` is the number of all changes, if these are only some.
    """
    repositories: dict[str, Counter[str]] = {}
    others: list[Change] = []
    for one in changes:
        record = _written_by_git(one.path)
        if record:
            repositories.setdefault(record, Counter())[one.kind] += 1
        elif len(others) < SHOWN:
            others.append(one)
    lines = [f"  {one.kind:<8}  {output.brief(one.path)}" for one in others]
    if (
        left := max(count, len(changes)) - len(lines) - sum(kinds.total() for kinds in repositories.values())
    ) > 0:
        lines.append(f"  and {left} more")
    for record, kinds in list(repositories.items())[:SHOWN]:
        kind = "modified" if len(kinds) > 1 else next(iter(kinds))
        words = f"{output.brief(record)}, where git records commits: {_paths(kinds.total())}"
        lines.append(f"  {kind:<8}  {words}")
    if (more := len(repositories) - SHOWN) > 0:
        lines.append(f"  and {more} more repositories")
    return lines


def _written_by_git(path: str) -> str:
    """Return the repository if the path is one that git itself writes there; empty for every other path."""
    before, found, inside = f"/{path}".partition("/.git/")
    name = inside.partition("/")[0]
    sample = name == "hooks" and inside.endswith(".sample")
    return f"{before}/.git"[1:] if found and (name in WRITTEN or sample) else ""


class _Reason:
    """Paths that are held back for one reason: the first ones, their number, and their common directory."""

    def __init__(self) -> None:
        self.first: list[str] = []
        self.count = 0
        self.where: str | None = None

    def add(self, path: str) -> None:
        if len(self.first) < SHOWN:
            self.first.append(path)
        self.count += 1
        above = os.path.dirname(path)
        self.where = above if self.where is None else os.path.commonpath((self.where, above))

    def __str__(self) -> str:
        named = ", ".join(map(output.brief, self.first[:NAMED]))
        if self.count <= NAMED:
            return named
        return f"{named} and {self.count - NAMED} more in {output.brief(self.where or '') or 'the workspace'}"


def held_lines(held: Iterable[HoldBack]) -> tuple[list[tuple[str, str]], int]:
    """Return what was held back and why, and the number of paths that are left out of the list.

    Causes come first, then the repositories that are held back with them. If there are many causes, paths
    that are held back for one reason get one line together.
    """
    from stockade.workspace.holdback.tracked_repositories import repository

    causes: dict[str, _Reason] = {}
    repositories: dict[str, _Reason] = {}
    more = 0
    for one in held:
        among, place = (repositories, repository(one.path)) if one.reason == "repository" else (causes, "")
        key = f"{place}\0{one.detail}"
        if key not in among and len(among) >= SHOWN:
            more += 1
            continue
        among.setdefault(key, _Reason()).add(one.path)
    lines = [(str(paths), key[1:]) for key, paths in causes.items()]
    if not more and sum(paths.count for paths in causes.values()) <= SHOWN:
        lines = [(output.name(path), key[1:]) for key, paths in causes.items() for path in paths.first]
    for key, paths in repositories.items():
        place, _, why = key.partition("\0")
        lines.append((f"{output.brief(place)} ({_paths(paths.count)})", why))
    return lines, more


def _paths(count: int) -> str:
    return f"{count} path{'s' if count != 1 else ''}"
