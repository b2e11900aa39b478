"""Search, remove and copy whole trees below a descriptor.

A program may have made them as deep, wide and large as it likes, and may keep
changing them. So each operation limits its memory, time and descriptors, and
reports the limit that it reached.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import itertools
import os
import re
import stat
import time
from collections.abc import Iterator

from stockade.errors import LimitError
from stockade.linux.openat2 import (
    NO_XDEV,
    STRAIGHT,
    FileStatus,
    held,
    listed,
    look,
    node,
    not_mounted,
    opened,
    status,
)
from stockade.workspace import tree_copy
from stockade.workspace.diff.layer_walk import MOST_PATHS, MOST_STEPS, WalkBudget, length

#: A tree ends at other mounts: separate grants in it are neither removed nor copied.
WITHIN = STRAIGHT | NO_XDEV
#: How many names to read at a time while emptying a directory, at each level of the tree.
BATCH = 256
#: How often a directory may be refilled during its removal, and how long a removal may take in all.
STUBBORN, REMOVAL_SECONDS = 1000, 60.0
#: How many nested directories are open at once while a tree is removed.
DEEPEST = 100
#: How many directories a search enters: each takes some 50 µs.
MOST_SEARCHED = 100_000
#: How many entries to copy; the directories among them have a `WalkBudget`.
MOST_COPIED = 200_000
#: How many bytes to read at a time.
CHUNK = 1 << 20


class Glob:
    """A pattern for paths: `*`, `?` and `[...]` within one name, `**` for any number of directories.

    A match is tracked as a set of positions in the pattern, so no pattern takes long.
    """

    def __init__(self, pattern: str) -> None:
        parts: list[str] = []
        for part in pattern.split("/"):
            # Several `**` in a row mean no more than one, and each would be tried from each.
            if part not in ("", ".") and not (part == "**" and parts[-1:] == ["**"]):
                parts.append(part)
        if parts and parts[-1] == "**":
            parts.append("*")
        self._parts = [None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts]

    def start(self) -> frozenset[int]:
        """Return the positions before the first name."""
        return self._with_empty_matches({0})

    def after(self, positions: frozenset[int], name: str) -> frozenset[int]:
        """Return the positions after one more name; empty if nothing below can match."""
        found = set()
        for position in positions:
            if position == len(self._parts):
                continue
            part = self._parts[position]
            if part is None:
                found.add(position)
            elif part.match(name):
                found.add(position + 1)
        return self._with_empty_matches(found)

    def matches(self, positions: frozenset[int]) -> bool:
        return len(self._parts) in positions

    def _with_empty_matches(self, positions: set[int]) -> frozenset[int]:
        """Add the positions that are reached without a name: `**` also stands for no directory."""
        for position in sorted(positions):
            beyond = position
            while beyond < len(self._parts) and self._parts[beyond] is None:
                beyond += 1
                positions.add(beyond)
        return frozenset(positions)


def search(top: int, glob: Glob) -> Iterator[tuple[str, FileStatus | None]]:
    """Yield each path examined below a directory, with its status if it matches.

    A path that ends in "/" is a directory that could not be searched: unreadable, or beyond a limit.
    """
    pending = [("", 0, glob.start())]
    left, room, steps = MOST_SEARCHED, MOST_PATHS, MOST_STEPS
    while pending:
        here, depth, positions = pending.pop()
        room += length(here)
        left, steps = left - 1, steps - depth
        if left < 0 or steps < 0:  # each directory is opened from the top
            yield here, None
            return
        try:
            with listed(top, here) as directory, os.scandir(directory) as entries:
                for entry in entries:
                    path = f"{here}{entry.name}"
                    reached = glob.after(positions, entry.name)
                    reached = positions if reached == positions else reached  # one shared set saves memory
                    yield path, look(directory, entry.name) if glob.matches(reached) else None
                    if reached and entry.is_dir(follow_symlinks=False):
                        if room < length(path) + 1 or len(pending) >= left:
                            yield f"{path}/", None
                            continue
                        pending.append((f"{path}/", depth + 1, reached))
                        room -= length(path) + 1
        except (FileNotFoundError, NotADirectoryError):
            if not here:
                raise
        except OSError:
            if not here:
                raise
            yield here, None


def remove(parent: int, name: str) -> None:
    """Remove a file or a whole directory, but nothing that is mounted there."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except IsADirectoryError:
        pass
    with held(node(parent, name, WITHIN, directory=True, follow=False)) as top:
        removal = _TreeRemoval(top)
        while True:
            removal.empty(top)
            try:
                os.rmdir(name, dir_fd=parent)
                return
            except OSError as error:
                removal.tolerate(error)


class _TreeRemoval:
    """One removal. It keeps nested directories open; those that lie too deep are moved up first."""

    def __init__(self, top: int) -> None:
        self._top = top
        self._prefix = f".removed-{os.urandom(6).hex()}-"
        self._moved = 0
        self._patience, self._until = STUBBORN, time.monotonic() + REMOVAL_SECONDS

    def empty(self, found: int, depth: int = 0) -> None:
        """Remove everything in a directory, which a program may refill meanwhile."""
        with held(opened(found, os.O_RDONLY | os.O_DIRECTORY)) as directory:
            while below := [*self._directories(directory)]:
                for name in below:
                    self._remove_directory(directory, name, depth + 1)

    def tolerate(self, error: OSError) -> None:
        """Tolerate a refilled directory for a while; raise any other error."""
        if error.errno != errno.ENOTEMPTY:
            raise error
        self._patience -= 1
        self._check_limits()

    def _check_limits(self) -> None:
        if self._patience < 0 or time.monotonic() > self._until:
            raise OSError(errno.EBUSY, "it is not empty yet: a program may be filling it again")

    def _remove_directory(self, parent: int, name: str, depth: int) -> None:
        try:
            with held(node(parent, name, WITHIN, directory=True, follow=False)) as found:
                if depth >= DEEPEST:
                    self._move_up(parent, name)
                    return
                self.empty(found, depth)
            os.rmdir(name, dir_fd=parent)
        except (FileNotFoundError, NotADirectoryError):
            pass  # removed or replaced meanwhile: the caller lists the directory again
        except OSError as error:
            self.tolerate(error)

    def _move_up(self, parent: int, name: str) -> None:
        try:
            os.rename(name, f"{self._prefix}{self._moved}", src_dir_fd=parent, dst_dir_fd=self._top)
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            # A directory of the host's below an overlay, which the kernel cannot move.
            words = f"it has more than {DEEPEST} nested directories"
            raise OSError(errno.EBUSY, words) from None
        self._moved += 1

    def _directories(self, directory: int) -> Iterator[str]:
        """Remove files of a directory and yield some of the directories in it."""
        self._check_limits()
        with os.scandir(directory) as entries:
            found = list(itertools.islice(entries, BATCH))
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                yield entry.name
                continue
            not_mounted(directory, entry.name)
            try:
                os.unlink(entry.name, dir_fd=directory)
            except IsADirectoryError:
                yield entry.name
            except FileNotFoundError:
                pass


def copy(source: int, name: str, target: int, new: str) -> None:
    """Copy a file, link or whole directory; other kinds of files are an error."""
    found = status(source, name)
    if not stat.S_ISDIR(found.mode):
        _copy_one(source, name, found, target, new)
        return
    os.mkdir(new, 0o700, dir_fd=target)
    with (
        held(node(source, name, WITHIN, directory=True, follow=False)) as old_top,
        held(node(target, new, WITHIN, directory=True, follow=False)) as new_top,
    ):
        _TreeCopy(old_top, new_top).all()


class _TreeCopy:
    """One copy of a directory. Each directory in it is opened from the top, which costs steps."""

    def __init__(self, old_top: int, new_top: int) -> None:
        self._old_top, self._new_top = old_top, new_top
        self._budget, self._left = WalkBudget(), MOST_COPIED

    def all(self) -> None:
        pending, done = [("", 0)], list[tuple[str, FileStatus]]()
        while pending:
            here, depth = pending.pop()
            if not self._budget.enter(depth):
                raise _too_much(self._budget.cut)
            with (
                listed(self._old_top, here, WITHIN) as old,
                held(node(self._new_top, here, WITHIN, directory=True)) as made,
            ):
                pending += [(below, depth + 1) for below in self._entries(old, made, here)]
                done.append((here, status(old)))
        # From the bottom up: a directory that is closed to its owner makes its entries inaccessible.
        for here, found in reversed(done):
            with held(node(self._new_top, here, WITHIN, directory=True)) as made:
                _copy_metadata(f"/proc/self/fd/{made}", found)

    def _entries(self, old: int, made: int, here: str) -> Iterator[str]:
        """Copy everything but directories, and yield the paths of the directories."""
        with os.scandir(old) as entries:
            for entry in entries:
                found = status(old, entry.name)
                self._left -= 1
                if self._left < 0:
                    raise _too_much(f"there are more than {MOST_COPIED:,} entries")
                if not stat.S_ISDIR(found.mode):
                    _copy_one(old, entry.name, found, made, entry.name)
                    continue
                path = f"{here}/{entry.name}" if here else entry.name
                if not self._budget.take(length(path)):
                    raise _too_much(f"too many directories: {self._budget.cut}")
                os.mkdir(entry.name, 0o700, dir_fd=made)
                yield path


def _too_much(why: str) -> LimitError:
    return LimitError(
        f"the move needs a copy, which is too large: {why}",
        hint="move it with a command inside",
    )


def _copy_one(source: int, name: str, found: FileStatus, target: int, new: str) -> None:
    if stat.S_ISLNK(found.mode):
        os.symlink(os.readlink(name, dir_fd=source), new, dir_fd=target)
        with _tolerated_owner():
            os.chown(new, found.uid, found.gid, dir_fd=target, follow_symlinks=False)
        return
    with held(node(source, name, WITHIN, follow=False)) as place, held(opened(place)) as old:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with held(os.open(new, flags, 0o600, dir_fd=target)) as made:
            tree_copy.content(old, made, os.fstat(old).st_size)
            _copy_metadata(made, found)


@contextlib.contextmanager
def _tolerated_owner() -> Iterator[None]:
    """Go on where only the user who copies can be the owner of the copy."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL):
            raise


def _copy_metadata(made: int | str, found: FileStatus) -> None:
    with _tolerated_owner():
        os.chown(made, found.uid, found.gid)
    os.chmod(made, stat.S_IMODE(found.mode) & 0o1777)
    os.utime(made, (found.modified, found.modified))
