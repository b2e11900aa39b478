"""What the host had where a program changed files, for merges: `base` in a layer.

A copy is made when a sandbox ends, and only of a file that by its change time
is still what the program started from. Each is named by a hash of its path and
has its mode. There may be none: then nothing can be merged, and that is said.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterable

from stockade.workspace import copying, descend, record
from stockade.workspace.conflicts import Judge
from stockade.workspace.snapshots import BASES, opened
from stockade.workspace.walk import Found, Walk

#: How large one of them may be, and all together.
LARGEST = 1 << 20
IN_ALL = 64 << 20
_NEW = ".new"


def may_be_texts(one: Found) -> bool:
    """Whether a change is one of a regular file to another, which may be texts."""
    return all(info is not None and stat.S_ISREG(info.st_mode) for info in (one.before, one.after))


def keep(layer: str, walk: Walk, lower: int) -> None:
    """Copy the host's version of each changed file that has none yet, while there is room."""
    changed = [one for one in walk.found if may_be_texts(one)]
    if not changed:
        return
    judge = Judge(lower, record.read(layer), record.seen(layer))
    # A disk that is full, or a file that may not be read: then there is none.
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(f"{layer}/{BASES}", 0o700)
        with opened(f"{layer}/{BASES}") as place:
            sizes = {name: os.stat(name, dir_fd=place).st_size for name in os.listdir(place)}
            for one in changed:
                name, info = _name(one.path), one.before
                assert info is not None
                room = min(LARGEST, IN_ALL - sum(sizes.values()))
                if name not in sizes and info.st_size <= room and judge.is_as_it_was(one.path, info):
                    with contextlib.suppress(OSError):
                        _copy(lower, one.path, info, place)
                        sizes[name] = info.st_size


def _copy(lower: int, path: str, info: os.stat_result, place: int) -> None:
    parent, name = descend.split(path)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_NEW, dir_fd=place)
    with descend.listed(lower, parent) as directory, descend.content(directory, name) as old:
        new = os.open(_NEW, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place)
        try:
            copying.content(old, new, info.st_size)
            os.fchmod(new, stat.S_IMODE(info.st_mode) & 0o777)
        finally:
            os.close(new)
        now = os.fstat(old)
    if (now.st_ino, now.st_ctime_ns) == (info.st_ino, info.st_ctime_ns):
        os.rename(_NEW, _name(path), src_dir_fd=place, dst_dir_fd=place)
    else:
        os.unlink(_NEW, dir_fd=place)


def read(layer: str, path: str) -> tuple[bytes, int] | None:
    """What the program started from at a path, and its mode; None if nobody knows."""
    try:
        with opened(f"{layer}/{BASES}") as place, descend.content(place, _name(path), own=True) as file:
            mode = stat.S_IMODE(os.stat(_name(path), dir_fd=place).st_mode)
            data = b""
            while piece := os.read(file, LARGEST):
                data += piece
            return data, mode
    except OSError:
        return None


def drop(layer: str, paths: Iterable[str]) -> None:
    """Forget those of paths that were committed: the program goes on from what is there now."""
    with contextlib.suppress(OSError), opened(f"{layer}/{BASES}") as place:
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(_name(path), dir_fd=place)


def _name(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()
