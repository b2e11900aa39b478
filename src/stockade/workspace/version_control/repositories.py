"""Repositories in directories that a program can write to, found before it starts.

A version control system runs what its own directory says (hooks, commands of
a configuration), and names decide which directory that is: a `.git` on the
way up, a file that points elsewhere, a bare repository that only its content
identifies. The search goes breadth first, within limits that an ordinary tree
does not reach. If it reaches one, it says so, and the run does not start: a
program of an earlier run could have put something beyond the limit.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence

import msgspec

from stockade.policy.model import REPOSITORIES, in_repository, is_repository

#: How much to search before a run: some 15 µs for each directory in the kernel's cache.
MOST_DIRECTORIES, MOST_ENTRIES = 100_000, 2_000_000
#: Bytes of the names of all searched directories. A program of an earlier run may have made them.
MOST_BYTES = 16 << 20
#: More repositories than a run may have, including hidden ones; 2,000 of the longest names.
MOST_FOUND, MOST_FOUND_BYTES = 10_000, 8 << 20
#: Files that may hold a project's policy, as in `config_files.NAMES`, and how many of them to note.
POLICIES, MOST_POLICIES = frozenset({"stockade.toml", "pyproject.toml"}), 1_000
#: The clock of file times; Python has no name for it.
REALTIME_COARSE = 5
#: The entries by which git recognizes a repository.
BARE = frozenset({"HEAD", "objects", "refs"})
#: Other entries of git's own in a repository. Worktrees may lie beside these.
GIT_OWN = frozenset(
    {
        *BARE,
        *("hooks", "info", "modules", "worktrees", "logs", "lfs", "config", "config.worktree", "commondir"),
        *("gitdir", "index", "packed-refs", "rebase-merge", "rebase-apply", "sequencer", "common"),
    }
)
#: The largest file to read as a pointer to another place. Git ignores empty lines after the pointer.
POINTER_BYTES = 1 << 16
#: The path no longer exists, or is too long for any tool.
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG})


class RepositorySearch(msgspec.Struct, frozen=True):
    """What a search found, and the facts for a later comparison."""

    trees: tuple[str, ...] = ()
    """The searched writable directories, by their real names."""
    found: tuple[str, ...] = ()
    """Directories, files and links that a version control system treats as its own."""
    inodes: dict[str, int] = {}
    """The inode number of every directory that was seen."""
    policies: tuple[str, ...] = ()
    """Files that may hold a project's policy, up to a limit."""
    cut: str = ""
    """What was not searched, in words; empty after a full search."""
    began: int = 0
    """When the search began, by the clock of file times."""
    running: int = 0
    """The same by the monotonic clock, which cannot be set."""


class TreeWalk:
    """The directories of some trees, breadth first, within limits; `cut` says which limit was reached.

    `before` are directories in them to search before the others.
    """

    def __init__(
        self, trees: Sequence[str], directories: int, entries: int, before: Iterable[str] = ()
    ) -> None:
        self.cut = ""
        self._pending = deque((*before, *trees))
        self._trees = ", ".join(trees)
        self._directories, self._entries, self._bytes = directories, entries, MOST_BYTES

    def add(self, path: str) -> bool:
        """Queue a directory; return False if the limit is reached."""
        self._bytes -= len(path)
        if self._bytes < 0:
            self.stop()
            return False
        self._pending.append(path)
        return True

    def __iter__(self) -> Iterator[tuple[str, Iterator[tuple[os.DirEntry[str], bool]]]]:
        """Yield each directory with its entries, and for each entry whether it is a directory."""
        while self._pending:
            place = self._pending.popleft()
            self._directories -= 1
            if self._directories < 0:
                self.stop()
                return
            try:
                with os.scandir(place) as entries:
                    yield place, self._count_entries(place, entries)
            except OSError as error:
                self._note_unreadable(place, error)

    def _count_entries(
        self, place: str, entries: Iterator[os.DirEntry[str]]
    ) -> Iterator[tuple[os.DirEntry[str], bool]]:
        try:
            for entry in entries:
                self._entries -= 1
                if self._entries < 0:
                    self.stop()
                    self._pending.clear()
                    return
                yield entry, entry.is_dir(follow_symlinks=False)
        except OSError as error:
            self._note_unreadable(place, error)

    def _note_unreadable(self, place: str, error: OSError) -> None:
        if error.errno in GONE or (error.errno == errno.EACCES and _is_closed(place)):
            return
        self.cut = self.cut or f"{place} could not be searched: {error.strerror}"

    def stop(self) -> None:
        """Record that a limit was reached."""
        self.cut = f"{self._trees} has too many files to search them all"


def _is_closed(directory: str) -> bool:
    """Return whether a directory that we may not read is inaccessible to all our programs too.

    Its owner could open it again, and a program that knows the names can write in a directory it may enter.
    """
    try:
        return os.stat(directory).st_uid != os.getuid() and not os.access(directory, os.X_OK)
    except OSError as error:
        return error.errno in (*GONE, errno.EACCES)


def search(trees: Iterable[str], into: Container[str] | None = (), work: str = "") -> RepositorySearch:
    """Find every repository in the directories, which are real names.

    `into` are the repositories to search as well, None for all of them. Bare repositories count only in the
    directory `work`: elsewhere they are mostly caches, as of Cargo and Go.
    """
    began, running = time.clock_gettime_ns(REALTIME_COARSE), time.monotonic_ns()
    roots = outermost(trees)
    # First, because the search may be cut: these are the ones that tools look for first.
    found = [path for root in roots for name in REPOSITORIES if os.path.lexists(path := f"{root}/{name}")]
    inodes, policies = dict[str, int](), list[str]()
    walk = TreeWalk(roots, MOST_DIRECTORIES, MOST_ENTRIES)
    room = MOST_FOUND_BYTES
    for place, entries in walk:
        marks, inside = 0, len(found)
        for entry, is_dir in entries:
            name = entry.name
            own = name[0] == "." and is_repository(name)
            if own:
                found.append(entry.path)
            elif name in BARE:
                marks += 1
            elif name in POLICIES and len(policies) < MOST_POLICIES:
                policies.append(entry.path)
            if is_dir and (not own or into is None or entry.path in into) and walk.add(entry.path):
                inodes[entry.path] = entry.inode()
        # Beside a .git, git ignores the bare repository.
        if marks == len(BARE) and inside == len(found) and place not in roots:
            found += [place] if work and place.startswith(work + "/") and not in_repository(place) else []
        room -= sum(map(len, found[inside:]))
        if room < 0 or len(found) > MOST_FOUND:
            walk.stop()
            break
    unique = tuple(dict.fromkeys(found))
    return RepositorySearch(roots, unique, inodes, tuple(policies), walk.cut, began, running)


def outermost(trees: Iterable[str]) -> tuple[str, ...]:
    """Return the directories that lie in no other of them, sorted."""
    found: dict[str, None] = {}
    for tree in sorted(trees):
        above = tree
        while above not in found and (up := os.path.dirname(above)) != above:
            above = up
        if above not in found:
            found[tree] = None
    return tuple(found)


def leads(path: str) -> Iterator[str]:
    """Yield the real names of directories elsewhere that a repository's own files point to.

    A `.git` that is a file, as in a worktree or a submodule, names git's directory, which may name a shared
    one; Mercurial, Sapling and Jujutsu do the same.
    """
    if os.path.islink(path):
        yield os.path.realpath(path)
    directory = path
    if text := pointer(path):
        directory = _resolve(os.path.dirname(path), text.removeprefix("gitdir:").strip())
        yield directory
    for name, base in (
        ("commondir", directory),
        ("sharedpath", directory),
        ("repo", directory),
        ("repo/store/git_target", f"{directory}/repo/store"),
    ):
        if text := pointer(f"{directory}/{name}"):
            yield _resolve(base, text)


def pointer(path: str) -> str:
    """Return the first line of a small file that points to another place; "" without such a file."""
    data = small(path, POINTER_BYTES) or b""
    return os.fsdecode(data.split(b"\n", 1)[0].strip().replace(b"\0", b""))


def small(path: str, most: int) -> bytes | None:
    """Return the bytes of a regular file; None for other files, unreadable and larger ones. Never waits."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        data = b""
        while len(data) <= most and (part := os.read(file, most + 1 - len(data))):
            data += part
        return data if len(data) <= most else None
    except OSError:
        return None
    finally:
        os.close(file)


def _resolve(base: str, path: str) -> str:
    return os.path.realpath(os.path.join(base, path))
