"""What changed and what was held back, in as few lines as a user reads.

A new directory gets one line, whatever a build or an installation put into it. What a commit holds back, what
runs at the user's next command, and links get their own lines first, with the reason: nothing of that hides
in a directory.

A commit that git makes inside adds tens of files to `.git`. They get one line together at the end, so that
they do not push the file that matters out of a list. Files there that git runs or obeys get their own lines.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING

from stockade.cli.ui import output
from stockade.result import Change

if TYPE_CHECKING:
    from stockade.workspace.diff.change_details import ChangeDetail
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


def change_lines(
    changes: Sequence[Change | ChangeDetail], count: int = 0, *, whole: bool = False
) -> list[str]:
    """Return the lines of a list of changes.

    First what a commit holds back, what runs at the user's next command and links, each with its reason, as
    far as the changes are details; then at most SHOWN paths, where a new directory stands for what is in it;
    then one line for each repository. `count` is the number of all changes, if these are only some. `whole`
    gives each path a line.
    """
    if whole:
        return [_line(one.kind, f"{output.brief(one.path)}{_reason(one)}") for one in changes]
    repositories: dict[str, _Repository] = {}
    others: list[Change | ChangeDetail] = []
    notable: dict[tuple[str, str], _Reason] = {}
    for one in changes:
        if record := written_by_git(one.path):
            repositories.setdefault(record, _Repository()).add(one)
        elif reason := _reason(one):
            notable.setdefault((one.kind, reason), _Reason()).add(one.path)
        else:
            others.append(one)
    lines = [_line(kind, f"{paths}{reason}") for (kind, reason), paths in list(notable.items())[:SHOWN]]
    lines += _count(len(notable) - SHOWN, "reasons, which `stockade diff` shows")
    entries = _fold(others)
    lines += [_line(kind, words) for kind, words, _ in entries[:SHOWN]]
    left = sum(paths for _, _, paths in entries[SHOWN:]) + max(0, count - len(changes))
    lines += _count(left)
    lines += [
        _line(one.kind, f"{output.brief(record)}, where git records commits: {one}")
        for record, one in list(repositories.items())[:SHOWN]
    ]
    return lines + _count(len(repositories) - SHOWN, "repositories")


def folds(changes: Sequence[Change]) -> bool:
    """Whether `change_lines` gives some of these changes no line of their own."""
    added = {one.path for one in changes if one.kind == "added"}
    return len(changes) > SHOWN or any(
        os.path.dirname(one.path) in added or written_by_git(one.path) for one in changes
    )


def _line(kind: str, words: str) -> str:
    return f"  {kind:<8}  {words}"


def _count(left: int, what: str = "") -> list[str]:
    return [f"  and {left} more{' ' if what else ''}{what}"] if left > 0 else []


def _reason(one: Change | ChangeDetail) -> str:
    """Return why a reader must see the change, or ""; a change without details has no reason."""
    if isinstance(one, Change):
        return ""
    if one.held:
        return f": a commit holds it back: {output.name(one.why)}"
    if one.runs:
        return f": runs at your next command: {output.name(one.runs)}"
    return ": a link" if one.link else ""


def _fold(changes: Sequence[Change | ChangeDetail]) -> list[tuple[str, str, int]]:
    """Return the kind, the words and the number of paths of each line; a new directory is one line."""
    added = {one.path for one in changes if one.kind == "added"}
    inner: dict[str, list[Change | ChangeDetail]] = {}
    tops: dict[str, str] = {}
    for one in changes:
        inner.setdefault(_top(one.path, added, tops), []).append(one)
    found: list[tuple[str, str, int]] = []
    for path, below in inner.items():
        first = below[0]
        if len(below) == 1 and first.path == path:
            found.append((first.kind, output.brief(path) + _slash(first), 1))
        else:
            found.append(("added", f"{output.brief(path)}/{_content(path, below)}", len(below)))
    return found


def _top(path: str, added: Set[str], known: dict[str, str]) -> str:
    """Return the highest new directory that holds the path, or the path itself."""
    above = os.path.dirname(path)
    if above not in added or os.path.basename(above) == ".git":
        return path  # what git obeys is not hidden behind a repository that is new
    if above not in known:
        known[above] = _top(above, added, known)
    return known[above]


def _slash(one: Change | ChangeDetail) -> str:
    return "/" if not isinstance(one, Change) and one.directory else ""


def _content(top: str, changes: Sequence[Change | ChangeDetail]) -> str:
    """Describe what is in a new directory: how many files, the names of a few, and their size."""
    directories = {os.path.dirname(one.path) for one in changes}
    files = [one for one in changes if one.path not in directories and not _slash(one)]
    if not files:
        return ""
    many = f": {len(files)} file{'s' if len(files) != 1 else ''}"
    if len(files) <= NAMED:
        many += f" ({', '.join(output.brief(one.path[len(top) + 1 :]) for one in files)})"
    if any(isinstance(one, Change) for one in changes):
        return many
    from stockade.cli.ui.formats import size

    return f"{many}, {size(sum(one.size for one in changes if not isinstance(one, Change)))}"


class _Repository:
    """The changes that git made to one repository."""

    def __init__(self) -> None:
        self._kinds: set[str] = set()
        self._count = 0
        self._held = ""

    def add(self, one: Change | ChangeDetail) -> None:
        self._kinds.add(one.kind)
        self._count += 1
        if not isinstance(one, Change):
            self._held = self._held or one.why

    @property
    def kind(self) -> str:
        return "modified" if len(self._kinds) > 1 else next(iter(self._kinds))

    def __str__(self) -> str:
        held = f": a commit holds it back: {output.name(self._held)}" if self._held else ""
        return f"{_paths(self._count)}{held}"


def written_by_git(path: str) -> str:
    """Return the repository if the path is one that git itself writes there; empty for every other path."""
    before, found, inside = f"/{path}/".partition("/.git/")
    inside = inside.rstrip("/")
    name = inside.partition("/")[0]
    sample = name == "hooks" and inside.endswith(".sample")
    return f"{before}/.git"[1:] if found and (not name or name in WRITTEN or sample) else ""


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
