"""Handoffs: files that a program left where it could write for real, and that tools of the host obey.

Nothing can keep a program from making a repository, or a file that an editor or an agent obeys, in a
directory that it may write to. When the run is over, the supervisor walks those directories and lists every
such file that is new or changed: also the targets of links, files that decide the policy of the next run and,
where the backend could not mount anything over them, the contents of repositories that were there before.

A changed file is known by its change time (ctime), which no program can set; a renamed directory with old
files in it, by its inode number. The list makes no judgement: changes that the user made at the same time are
in it too.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator
from functools import partial

import msgspec

from stockade.linux import casefold
from stockade.linux.path_lookup import covers
from stockade.policy.holdback_lookup import obeyed, spelled
from stockade.policy.model import in_repository, is_repository
from stockade.resolve.config_files import NAMES
from stockade.resolve.paths.protected_paths import TOOLS
from stockade.resolve.project_files import PolicyFileReader
from stockade.resolve.resolved import ResolvedPolicy
from stockade.result import Handoff
from stockade.runs.obeyed_links import ObeyedLinks, tree_of
from stockade.workspace.holdback import aliases
from stockade.workspace.holdback.holdback import executes
from stockade.workspace.version_control.repositories import REALTIME_COARSE, RepositorySearch, TreeWalk

#: How much is searched when a run is over: 3 to 10 µs an entry.
MOST_DIRECTORIES, MOST_ENTRIES = 20_000, 100_000
#: How many handoffs are listed.
MOST_LISTED = 1_000
#: A smaller difference between two clocks does not count as a step of one of them.
SAME_NS = 1_000_000_000
POLICY = "Stockade reads the policy of the next run from it, if it has a table [tool.stockade]"
UNKEPT = "the policy protects it, but the backend could not keep the program from changing it"


class Handoffs(msgspec.Struct, frozen=True):
    """The handoffs, and warnings about what could not be searched."""

    left: tuple[Handoff, ...] = ()
    warnings: tuple[str, ...] = ()


def handoffs(resolved: ResolvedPolicy, *, covered: bool) -> Handoffs:
    """Search what the program could write for real, and return the handoffs.

    `covered` says that the backend mounted read-only what must not change; without that, everything may have.
    """
    searched = resolved.repositories.searched
    if searched is None:
        return Handoffs()
    since, listing = _threshold(searched), HandoffList()
    reasons = Reasons(resolved, since, covered)
    cut = _compare(resolved, searched, since, reasons, listing, covered)
    for path, reason in reasons.besides():
        listing.add(path, reason, first=True)
    links = reasons.links.cut
    more = listing.more
    warnings = (
        searched.cut and f"{searched.cut}: repositories further down were not found, and were writable",
        cut and f"{cut}: what the program left further down for tools of the host is not listed",
        links and f"{links}: the files that the other links lead tools to are not listed",
        f"{more} more files that tools of the host obey are new or changed; they are not listed"
        if more
        else "",
    )
    return Handoffs(listing.all(), tuple(filter(None, warnings)))


class HandoffList:
    """The handoffs to list: those that version control and Stockade obey come first, whatever the limit."""

    def __init__(self) -> None:
        self._first: list[Handoff] = []
        self._others: list[Handoff] = []
        self._count = 0

    def add(self, path: str, reason: str, *, first: bool) -> None:
        self._count += 1
        chosen = self._first if first else self._others
        if len(chosen) < MOST_LISTED:
            chosen.append(Handoff(path, reason))

    def all(self) -> tuple[Handoff, ...]:
        return (*self._first, *self._others)[:MOST_LISTED]

    @property
    def more(self) -> int:
        return max(0, self._count - MOST_LISTED)


def _compare(
    resolved: ResolvedPolicy,
    searched: RepositorySearch,
    since: int,
    reasons: Reasons,
    listing: HandoffList,
    covered: bool,
) -> str:
    """List what is new or changed; return a warning about what was not searched, or nothing."""
    kept = frozenset(resolved.repositories.kept if covered else ())
    known = frozenset(searched.found)
    same = {path: _is_same(path, searched) for path in known - kept}
    for path in sorted(path for path in same if same[path] is False):
        listing.add(path, _repository(path), first=True)
    before = sorted(path for path in same if same[path])
    walk = TreeWalk(searched.trees, MOST_DIRECTORIES, MOST_ENTRIES, before)
    #: Directories that had another name before: everything in them counts as new.
    moved: set[str] = set()
    for place, entries in walk:
        for entry, is_dir in entries:
            path, new = entry.path, place in moved
            if path in kept or same.get(path) is not None:
                continue
            if is_repository(entry.name) and path not in known:
                if new or not searched.cut or _changed(entry, since):
                    listing.add(path, _repository(path), first=True)
            elif is_dir:
                if walk.add(path) and (new or (path not in known and _renamed(entry, searched, since))):
                    moved.add(path)
            elif new or _changed(entry, since):
                kind = stat.S_IFLNK if entry.is_symlink() else stat.S_IFREG
                if reason := reasons.why(path, kind):
                    listing.add(path, reason, first=in_repository(path))
    return walk.cut


def _is_same(repository: str, searched: RepositorySearch) -> bool | None:
    """Whether a directory is the one that was searched before the run; None if there was or is none."""
    number = searched.inodes.get(repository)
    try:
        now = os.lstat(repository)
    except OSError:
        return None
    return now.st_ino == number if number is not None and stat.S_ISDIR(now.st_mode) else None


def _repository(path: str) -> str:
    tool = TOOLS.get(os.path.basename(path).lower(), "git")
    return f"a repository: {tool} runs what its hooks and configuration say"


class Reasons:
    """Why tools of the host obey a path."""

    def __init__(self, resolved: ResolvedPolicy, since: int, covered: bool) -> None:
        known, workspace = resolved.repositories, resolved.workspace
        assert known.hook_paths is not None and known.project_files is not None
        self._hook_paths, self._projects = known.hook_paths, known.project_files
        self._reader = PolicyFileReader()
        trees = known.trees
        grants = (*resolved.grants, *(() if workspace is None else (workspace,)))
        self._trees = {grant.path: grant.fd for grant in grants if grant.path in trees}
        self._above = {tree: aliases.outer_names(tree) for tree in trees}
        self.links = ObeyedLinks(self._trees, self._above)
        self.links.follow(
            TreeWalk(trees, MOST_DIRECTORIES, MOST_ENTRIES), lambda entry: _changed(entry, since)
        )
        #: Paths that the policy protects and the backend could not mount over, and whether they existed.
        self._unkept = dict[str, bool]()
        if workspace is not None and not covered:
            named = {f"{workspace.path}/{name}": exists for name, exists in resolved.protected}
            self._unkept = {path: named[path] for path in named if tree_of(path, self._trees)}

    def why(self, path: str, kind: int) -> str:
        """Return why a tool obeys a new or changed file or link; empty if none does."""
        tree = tree_of(path, self._trees)
        why = executes(
            path[len(tree) + 1 :],
            kind,
            partial(_has_head, tree),
            folds=partial(_folds, tree),
            above=self._above[tree],
        )
        why = why or self._hook_paths.why(path, link=kind == stat.S_IFLNK)
        why = why or (POLICY if self._is_policy(path, path) else "") or self._by_another_name(path, kind)
        return why or next((UNKEPT for one in self._unkept if covers(one, path)), "")

    def besides(self) -> Iterator[tuple[str, str]]:
        """Yield handoffs without a new or changed file: modes of directories, and files that are gone."""
        yield from self._projects.opened()
        yield from self._projects.gone()
        for path, existed in self._unkept.items():
            if existed and path not in self._projects.files and not os.path.lexists(path):
                yield path, f"it was removed: {UNKEPT}"

    def _by_another_name(self, path: str, kind: int) -> str:
        for name, tree in self.links.names_of(path, link=kind == stat.S_IFLNK):
            entry = obeyed(name, kind, partial(_folds, tree), self._above[tree])
            if entry is not None:
                return f"{name} leads to it: {entry.why}"
            if self._is_policy(path, os.path.normpath(f"{tree}/{name}")):
                return f"{name} leads to it: {POLICY}"
        return ""

    def _is_policy(self, path: str, name: str) -> bool:
        """Whether a file that tools find by this name may hold a project's policy, or held one before."""
        if spelled(os.path.basename(name)) != NAMES[1]:
            return False
        return self._projects.cut or name in self._projects.files or self._reader.holds(path)


def _has_head(top: str, directory: str) -> bool:
    return os.path.lexists(f"{top}/{directory}/HEAD")


def _folds(top: str, path: str) -> bool:
    """Whether the directory of a path ignores the case of names; also true if that is unknown."""
    try:
        directory = os.open(os.path.dirname(f"{top}/{path}"), os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return True
    try:
        return casefold.folds(directory, "") is not False
    finally:
        os.close(directory)


def _renamed(directory: os.DirEntry[str], searched: RepositorySearch, since: int) -> bool:
    """Whether a directory may have had another name before the run."""
    number = searched.inodes.get(directory.path)
    if number is None:  # it is new, or the search did not reach it
        return _changed(directory, since)
    return number != directory.inode()


def _changed(entry: os.DirEntry[str], since: int) -> bool:
    try:
        return entry.stat(follow_symlinks=False).st_ctime_ns >= since
    except OSError:  # it was removed meanwhile
        return False


def _threshold(searched: RepositorySearch) -> int:
    """Return the change time from which on a file may have changed since the search.

    It is earlier than the search if the clock was set back meanwhile.
    """
    passed = time.monotonic_ns() - searched.running
    stepped = time.clock_gettime_ns(REALTIME_COARSE) - searched.began - passed
    return searched.began + (stepped if stepped < -SAME_NS else 0)
