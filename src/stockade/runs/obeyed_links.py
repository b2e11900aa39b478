"""Links that lead tools of the host to files that a program could write for real.

With a link `CLAUDE.md -> docs/guide.md` an agent obeys docs/guide.md. The supervisor follows the links once
everything inside has ended, as the tools will find them. A program can make any number of links, but new
links are listed themselves, so those that it did not touch are followed first.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping

from stockade.linux.path_lookup import covers
from stockade.policy.holdback_lookup import obeyed, spelled
from stockade.resolve.config_files import NAMES
from stockade.workspace.holdback import aliases
from stockade.workspace.version_control.repositories import TreeWalk

#: How many links are followed, and the total length of the names that they lead to.
MOST_LINKS, MOST_BYTES = 1_000, 1 << 20
#: How many names are tried for one path, and in all: 4 to 20 µs each.
MOST_NAMES, MOST_TRIES = 16, 50_000


class ObeyedLinks:
    """The links in some trees and in the repositories above them, by their targets in the trees."""

    def __init__(self, trees: Mapping[str, int], above: Mapping[str, tuple[str, ...]]) -> None:
        """`trees` maps each tree to a descriptor, `above` to its possible names in repositories above it."""
        self.cut = ""
        self._tries = MOST_TRIES
        self._above = above
        self._found = {
            tree: aliases.aliases(root, tree, frozenset(), above[tree]) for tree, root in trees.items()
        }

    def follow(self, walk: TreeWalk, is_changed: Callable[[os.DirEntry[str]], bool]) -> None:
        """Find the links in the trees and follow them, unchanged ones first."""
        links: tuple[list[str], list[str]] = ([], [])
        more = False
        for _, entries in walk:
            for entry, is_dir in entries:
                if is_dir:
                    if entry.name not in aliases.SKIPPED:
                        walk.add(entry.path)
                elif entry.is_symlink() and self._is_obeyed(entry.path):
                    chosen = links[is_changed(entry)]
                    if len(chosen) < MOST_LINKS:
                        chosen.append(entry.path)
                    else:
                        more = True
        room = MOST_BYTES
        for link in (*links[0], *links[1])[:MOST_LINKS]:
            for target in aliases.targets(link):
                room -= len(target)
                if room >= 0 and (tree := tree_of(target, self._found)):
                    self._found[tree].add(os.path.relpath(link, tree), target[len(tree) :].lstrip("/"))
        if more or room < 0 or len(links[0]) + len(links[1]) > MOST_LINKS:
            self.cut = "there are more links than Stockade follows"

    def _is_obeyed(self, link: str) -> bool:
        tree = tree_of(link, self._found)
        name = link[len(tree) :].lstrip("/")
        policy = spelled(os.path.basename(name)) == NAMES[1]
        return policy or obeyed(name, stat.S_IFLNK, above=self._above[tree]) is not None

    def names_of(self, path: str, *, link: bool) -> Iterator[tuple[str, str]]:
        """Yield the names by which links lead to a path, each with the tree that it is relative to."""
        tree = tree_of(path, self._found)
        for number, name in enumerate(self._found[tree].names_of(path[len(tree) :].lstrip("/"), link=link)):
            self._tries -= 1
            if number >= MOST_NAMES or self._tries < 0:
                self.cut = "more links lead to the same files than Stockade follows"
                return
            yield name, tree


def tree_of(path: str, trees: Mapping[str, object]) -> str:
    """Return the tree that a path is in; empty if it is in none."""
    return next((tree for tree in trees if covers(tree, path)), "")
