"""Other names under which the host's tools know files of the workspace.

With a link `CLAUDE.md -> docs/guide.md` in the project, an agent obeys docs/guide.md. So a changed path is
also judged by every link that leads to it from where some tool looks, through a chain of links too. And the
workspace may itself lie where a tool looks, as `.github` or `.git/hooks` do: then its own name counts.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence, Set

from stockade.linux import dirwalk
from stockade.linux.path_lookup import covers, names_on_the_way
from stockade.policy.holdback_lookup import PACKAGES, begins_pattern, obeyed
from stockade.policy.model import REPOSITORIES
from stockade.workspace.version_control.repositories import BARE, pointer

#: How deep to search the directories of tools.
DEEPEST = 6
SKIPPED = PACKAGES | {".git"}


def outer_names(tree: str) -> tuple[str, ...]:
    """Return the names of a workspace that lies where tools look: the ends of its path that begin a pattern.

    Files in a git worktree are the project's, wherever it lies: agents put them in `.claude` or `.cursor`.
    A name without a dot counts only within a repository: outside, users may name projects as they like.
    """
    names = tree.strip("/").split("/")
    first = root = 0
    found = []
    for number in range(len(names), 0, -1):
        place = "/" + "/".join(names[:number])
        if all(os.path.lexists(f"{place}/{name}") for name in BARE):
            found.append("/".join((".git", *names[number:])))
        if not root and any(os.path.lexists(f"{place}/{name}") for name in REPOSITORIES):
            root = number
        if _is_worktree(place):
            first = number
            break
    packaged = max((number + 1 for number, name in enumerate(names) if name in PACKAGES), default=0)
    for start in (first, max(first, packaged)):
        for number in range(start, len(names)):
            if (number >= root or names[number].startswith(".")) and begins_pattern(names[number]):
                found.append("/".join(names[number:]))
                break
    return tuple(dict.fromkeys(found))


def _is_worktree(place: str) -> bool:
    """Return whether a git repository lists this directory. No commit writes the file that lists it."""
    text = pointer(f"{place}/.git")
    inner = os.path.join(place, text.removeprefix("gitdir:").strip())
    if not text.startswith("gitdir:") or os.path.basename(os.path.dirname(inner)) != "worktrees":
        return False
    back = pointer(f"{inner}/gitdir")
    return bool(back) and os.path.realpath(os.path.join(inner, back)) == os.path.realpath(f"{place}/.git")


class Aliases:
    """Links of the host's, by their targets in the workspace."""

    def __init__(self) -> None:
        self._links: dict[str, list[str]] = {}
        #: By directories above the target.
        self._above: dict[str, list[str]] = {}
        self._longest = 0

    def add(self, link: str, target: str) -> None:
        self._links.setdefault(target, []).append(link)
        for place in dirwalk.parents(target):
            self._above.setdefault(place, []).append(link)
        self._longest = max(self._longest, len(target))

    def names_of(self, path: str, *, link: bool) -> Iterator[str]:
        """Yield the links that lead to a path, or that led into a directory which is a link now."""
        if not self._links:
            return
        if link:
            yield from self._above.get(path, ())
        place = path if len(path) <= self._longest else path[: self._longest + 1].rpartition("/")[0]
        while True:
            rest = path[len(place) :].lstrip("/")
            for name in self._links.get(place, ()):
                yield f"{name}/{rest}" if rest else name
            if not place:
                return
            place = dirwalk.split(place)[0]


def aliases(root: int, tree: str, tops: Set[str], above: Sequence[str] = ()) -> Aliases:
    """Return the links into the workspace that lie in its directories `tops`.

    The search includes directories in those that tools obey, except packages and git's own, and the
    directories above the workspace, up to the top of the outermost repository. `above` are names of the
    workspace itself.
    """
    found = Aliases()
    pending = [(directory, 0) for directory in (*tops, *_directories_above(tree))]
    while pending:
        directory, depth = pending.pop()
        for name, kind in _links_and_directories(root, tree, directory):
            path = f"{directory}/{name}" if directory else name
            if kind == stat.S_IFDIR:
                further = depth < DEEPEST and path not in tops and name not in SKIPPED
                if further and (depth or obeyed(path, stat.S_IFLNK, above=above) is not None):
                    pending.append((path, depth + 1))
            elif obeyed(path, kind, above=above) is not None:
                for target in targets(f"{tree}/{path}"):
                    if covers(tree, target):
                        found.add(path, target[len(tree) :].lstrip("/"))
    return found


def targets(link: str) -> Iterator[str]:
    """Yield the real names of everything that a link leads to and through, but not its own."""
    return (name for name in names_on_the_way(link) if name != link)


def _directories_above(tree: str) -> list[str]:
    """Return the directories above a workspace, up to the top of the outermost repository.

    The list is empty if it lies in no repository.
    """
    found: list[str] = []
    farthest, place, path = 0, tree, ".."
    while (place := os.path.dirname(place)) != "/":
        found.append(path)
        path += "/.."
        if any(os.path.lexists(f"{place}/{name}") for name in REPOSITORIES):
            farthest = len(found)
    return found[:farthest]


def _links_and_directories(root: int, tree: str, directory: str) -> Iterator[tuple[str, int]]:
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        outside = directory == ".." or directory.startswith("../")
        opened = f"{tree}/{directory}" if outside else stack.enter_context(dirwalk.listed(root, directory))
        for entry in stack.enter_context(os.scandir(opened)):
            if entry.is_symlink():
                yield entry.name, stat.S_IFLNK
            elif entry.is_dir(follow_symlinks=False):
                yield entry.name, stat.S_IFDIR
