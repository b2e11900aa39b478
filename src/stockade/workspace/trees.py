"""Whole trees beneath a descriptor: searched, removed, copied.

A program may have made them as deep as it likes and goes on changing them.
So nothing recurses and no more than a few descriptors are open: each
directory is reached anew from the top, by real names only.
"""

from __future__ import annotations

import errno
import fnmatch
import itertools
import os
import re
import stat
from collections.abc import Iterator

from stockade.workspace import copying
from stockade.workspace.beneath import (
    NO_XDEV,
    STRAIGHT,
    Status,
    held,
    listed,
    look,
    node,
    not_mounted,
    opened,
    status,
)

#: A tree that ends at other mounts: what is granted separately is neither removed nor copied with it.
WITHIN = STRAIGHT | NO_XDEV
#: How many names are taken in at a time.
BATCH = 4096
#: How often a directory may be filled again while it is being removed.
STUBBORN = 1000
#: The longest path that is searched: each directory is reached anew.
DEEPEST = 1 << 16
#: How much is read at a time.
CHUNK = 1 << 20


class Glob:
    """A pattern for paths: `*`, `?` and `[...]` within one name, `**` for any number of directories.

    A set of positions in the pattern stands for how far a path has matched, so no pattern takes long.
    """

    def __init__(self, pattern: str) -> None:
        parts = [part for part in pattern.split("/") if part not in ("", ".")]
        if parts and parts[-1] == "**":
            parts.append("*")
        self._parts = [None if part == "**" else re.compile(fnmatch.translate(part)) for part in parts]

    def start(self) -> frozenset[int]:
        """Where a path begins."""
        return self._skipping({0})

    def after(self, positions: frozenset[int], name: str) -> frozenset[int]:
        """Where it stands after one more name; nowhere if nothing below can match."""
        found = set()
        for position in positions:
            if position == len(self._parts):
                continue
            part = self._parts[position]
            if part is None:
                found.add(position)
            elif part.match(name):
                found.add(position + 1)
        return self._skipping(found)

    def matches(self, positions: frozenset[int]) -> bool:
        return len(self._parts) in positions

    def _skipping(self, positions: set[int]) -> frozenset[int]:
        """With those that are reached without a name: `**` also stands for no directory."""
        for position in sorted(positions):
            beyond = position
            while beyond < len(self._parts) and self._parts[beyond] is None:
                beyond += 1
                positions.add(beyond)
        return frozenset(positions)


def search(top: int, glob: Glob) -> Iterator[tuple[str, Status | None]]:
    """What is below a directory: each path looked at, with its status if it matches.

    A directory that cannot be read is given as a path that ends in "/".
    """
    pending = [("", glob.start())]
    while pending:
        here, positions = pending.pop()
        try:
            with listed(top, here) as directory, os.scandir(directory) as entries:
                for entry in entries:
                    path = f"{here}{entry.name}"
                    reached = glob.after(positions, entry.name)
                    yield path, look(directory, entry.name) if glob.matches(reached) else None
                    if reached and entry.is_dir(follow_symlinks=False):
                        if len(path) > DEEPEST:
                            yield f"{path}/", None
                            continue
                        pending.append((f"{path}/", reached))
        except (FileNotFoundError, NotADirectoryError):
            if not here:
                raise
        except OSError:
            if not here:
                raise
            yield here, None


def remove(parent: int, name: str) -> None:
    """Remove what a directory has under the name, with everything in it; nothing that is mounted there."""
    try:
        os.unlink(name, dir_fd=parent)
        return
    except IsADirectoryError:
        pass
    patience = STUBBORN
    with held(node(parent, name, WITHIN, directory=True, follow=False)) as top:
        pending = [""]
        while pending:
            here = pending[-1]
            with listed(top, here, WITHIN) as directory:
                below = [*_emptied(directory)]
            if below:
                pending += [f"{here}/{child}" if here else child for child in below]
                continue
            try:
                _remove_empty(top, here) if here else os.rmdir(name, dir_fd=parent)
                pending.pop()
            except FileNotFoundError:
                pending.pop()
            except OSError as error:
                patience -= 1
                if error.errno != errno.ENOTEMPTY or not patience:
                    raise


def _emptied(directory: int) -> Iterator[str]:
    """Remove the files of a directory and give some of the directories in it."""
    with os.scandir(directory) as entries:
        found = list(itertools.islice(entries, BATCH))
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            yield entry.name
        else:
            not_mounted(directory, entry.name)
            try:
                os.unlink(entry.name, dir_fd=directory)
            except IsADirectoryError:
                yield entry.name
            except FileNotFoundError:
                pass


def _remove_empty(top: int, path: str) -> None:
    parent, _, name = path.rpartition("/")
    with held(node(top, parent, WITHIN, directory=True)) as directory:
        os.rmdir(name, dir_fd=directory)


def copy(source: int, name: str, target: int, new: str) -> None:
    """Copy a file, link or directory with everything in it; kinds that cannot be copied are an error."""
    found = status(source, name)
    if not stat.S_ISDIR(found.mode):
        _copy_one(source, name, found, target, new)
        return
    os.mkdir(new, 0o700, dir_fd=target)
    with (
        held(node(source, name, WITHIN, directory=True, follow=False)) as old_top,
        held(node(target, new, WITHIN, directory=True, follow=False)) as new_top,
    ):
        pending, done = [""], []
        while pending:
            here = pending.pop()
            with (
                listed(old_top, here, WITHIN) as old,
                held(node(new_top, here, WITHIN, directory=True)) as made,
            ):
                pending += _copy_entries(old, made, here)
                done.append((here, status(old)))
        # From the bottom up: one that is closed to its owner closes what is in it.
        for here, found in reversed(done):
            with held(node(new_top, here, WITHIN, directory=True)) as made:
                _alike(f"/proc/self/fd/{made}", found)


def _copy_entries(old: int, made: int, here: str) -> list[str]:
    below = []
    with os.scandir(old) as entries:
        for entry in entries:
            found = status(old, entry.name)
            if stat.S_ISDIR(found.mode):
                os.mkdir(entry.name, 0o700, dir_fd=made)
                below.append(f"{here}/{entry.name}" if here else entry.name)
            else:
                _copy_one(old, entry.name, found, made, entry.name)
    return below


def _copy_one(source: int, name: str, found: Status, target: int, new: str) -> None:
    if stat.S_ISLNK(found.mode):
        os.symlink(os.readlink(name, dir_fd=source), new, dir_fd=target)
        return
    with held(node(source, name, WITHIN, follow=False)) as place, held(opened(place)) as old:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with held(os.open(new, flags, 0o600, dir_fd=target)) as made:
            copying.content(old, made, os.fstat(old).st_size)
            _alike(made, found)


def _alike(made: int | str, found: Status) -> None:
    os.chmod(made, stat.S_IMODE(found.mode) & 0o1777)
    os.utime(made, (found.modified, found.modified))
