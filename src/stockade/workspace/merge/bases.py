"""Merge bases: the host's version of each file that a program changed, in `base` of a layer.

The supervisor copies them when a sandbox ends, and only files whose change
time shows that they are still what the program started from. Each is named by
a hash of its path and has the file's mode. Without a base a file cannot be
merged, and the error says so.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections.abc import Iterable

from stockade.linux import dirwalk
from stockade.workspace import metadata, tree_copy
from stockade.workspace.diff.layer_walk import FileStat, PathDifference
from stockade.workspace.merge.conflicts import Judge
from stockade.workspace.snapshots import BASES, open_directory
from stockade.workspace.version_control import git_index

#: The size limits of one base and of all together.
LARGEST = 1 << 20
IN_ALL = 64 << 20
#: How many bases to keep.
MOST = 20_000
_NEW = ".new"


def may_be_texts(one: PathDifference) -> bool:
    """Return whether a change is from a regular file to a regular file: only those may be texts."""
    return all(info is not None and stat.S_ISREG(info.st_mode) for info in (one.before, one.after))


def keep(layer: str, found: Iterable[PathDifference], lower: int) -> None:
    """Copy the host's version of each changed file without a base, while there is room."""
    changed = (one for one in found if may_be_texts(one))
    if (first := next(changed, None)) is None:
        return
    judge = Judge(lower, metadata.read(layer), metadata.seen(layer))
    # A full disk or an unreadable file: then there is no base.
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{layer}/{BASES}", 0o700)
        with open_directory(f"{layer}/{BASES}") as place:
            names = set(os.listdir(place))
            room = IN_ALL - sum(os.stat(name, dir_fd=place).st_size for name in names)
            for one in itertools.chain((first,), changed):
                name, info = _name(one.path), one.before
                assert info is not None
                most = git_index.LARGEST if one.path.endswith(".git/index") else LARGEST
                fits = info.st_size <= min(most, room) and len(names) < MOST
                if fits and name not in names and judge.is_unchanged(one.path, info):
                    with contextlib.suppress(OSError):
                        _copy(lower, one.path, info, place)
                        names.add(name)
                        room -= info.st_size


def _copy(lower: int, path: str, info: FileStat, place: int) -> None:
    parent, name = dirwalk.split(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_NEW, dir_fd=place)
    with dirwalk.listed(lower, parent) as directory, dirwalk.content(directory, name) as old:
        new = os.open(_NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
        try:
            tree_copy.content(old, new, info.st_size)
            os.fchmod(new, stat.S_IMODE(info.st_mode) & 0o777)
        finally:
            os.close(new)
        now = os.fstat(old)
    if (now.st_ino, now.st_ctime_ns) == (info.st_ino, info.st_ctime_ns):
        os.rename(_NEW, _name(path), src_dir_fd=place, dst_dir_fd=place)
    else:
        os.unlink(_NEW, dir_fd=place)


def read(layer: str, path: str) -> tuple[bytes, int] | None:
    """Return the content and mode that the program started from at a path; None if it was not kept."""
    try:
        with (
            open_directory(f"{layer}/{BASES}") as place,
            dirwalk.content(place, _name(path), own=True) as file,
        ):
            mode = stat.S_IMODE(os.stat(_name(path), dir_fd=place).st_mode)
            data = b""
            while piece := os.read(file, LARGEST):
                data += piece
            return data, mode
    except OSError:
        return None


def drop(layer: str, paths: Iterable[str]) -> None:
    """Drop the bases of committed paths: the program continues from the host's current files."""
    with contextlib.suppress(OSError), open_directory(f"{layer}/{BASES}") as place:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_name(path), dir_fd=place)


def _name(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()
