"""Directories by descriptor, one name at a time.

A path is trusted nowhere: the program inside named what is in the layer, and
the host's tree can change while it is looked at. So every directory is
reached from a descriptor of its root, component by component, and a link on
the way is an error instead of a way out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


def split(path: str) -> tuple[str, str]:
    """The directory of a path and the last name; the directory of a top name is empty."""
    parent, _, name = path.rpartition("/")
    return parent, name


def parents(path: str) -> list[str]:
    """Every directory above a path, the workspace first."""
    parts = path.split("/")
    return ["/".join(parts[:index]) for index in range(len(parts))] if path else []


def down(root: int, path: str, *, own: bool = False) -> int:
    """An O_PATH descriptor of the directory `path` below `root`, for the caller to close.

    `own` says that the tree is a layer of ours: a directory there that a program has closed to its owner
    is opened all the same, and left as it was.
    """
    here = os.dup(root)
    try:
        for part in path.split("/") if path else ():
            if part in ("", ".", ".."):
                raise OSError(errno.EINVAL, "not a name", path)
            below = _step(here, part, own)
            os.close(here)
            here = below
        return here
    except BaseException:
        os.close(here)
        raise


def _step(here: int, part: str, own: bool) -> int:
    try:
        return os.open(part, NODE | os.O_DIRECTORY, dir_fd=here)
    except PermissionError:
        if not own:
            raise
    with _unlocked(here):
        return os.open(part, NODE | os.O_DIRECTORY, dir_fd=here)


@contextlib.contextmanager
def _unlocked(node: int) -> Iterator[None]:
    """Let its owner read a file or directory of ours meanwhile."""
    here = f"/proc/self/fd/{node}"
    mode = stat.S_IMODE(os.fstat(node).st_mode)
    os.chmod(here, mode | 0o500)
    try:
        yield
    finally:
        os.chmod(here, mode)


@contextlib.contextmanager
def _opened(node: int, flags: int, own: bool) -> Iterator[int]:
    """The same file or directory, open for reading."""
    with contextlib.ExitStack() as stack:
        if own and not os.access(f"/proc/self/fd/{node}", os.R_OK | (os.X_OK if flags else 0)):
            stack.enter_context(_unlocked(node))
        opened = os.open(f"/proc/self/fd/{node}", os.O_RDONLY | os.O_CLOEXEC | flags)
        stack.callback(os.close, opened)
        yield opened


@contextlib.contextmanager
def listed(root: int, path: str, *, own: bool = False) -> Iterator[int]:
    """The directory `path` below `root`, open for reading."""
    with reached(root, path, own=own) as node, _opened(node, os.O_DIRECTORY, own) as directory:
        yield directory


@contextlib.contextmanager
def reached(root: int, path: str, *, own: bool = False) -> Iterator[int]:
    """The directory `path` below `root`, to name things in."""
    node = down(root, path, own=own)
    try:
        yield node
    finally:
        os.close(node)


@contextlib.contextmanager
def content(directory: int, name: str, *, own: bool = False) -> Iterator[int]:
    """A regular file of the directory, open for reading: never another kind, never through a link."""
    # O_PATH first: opening a pipe or a device has effects, and may never return.
    node = os.open(name, NODE, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(node).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        with _opened(node, 0, own) as file:
            yield file
    finally:
        os.close(node)


def look(directory: int | None, name: str) -> os.stat_result | None:
    """What is there under the name; a link is itself. None if nothing is, or the caller may not know."""
    if directory is None:
        return None
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (FileNotFoundError, PermissionError):
        return None


def remove(directory: int, name: str) -> None:
    """Remove what the directory has under the name, with everything in it."""
    pending = [name]
    while pending:
        _remove(pending.pop(), directory, directory, 0, pending)


#: How the name of what is being removed begins, or is not finished yet: it is nothing.
REMOVED = ".removed-"


def remove_doomed(directory: int) -> None:
    """Remove what was being made or removed in a directory when its maker was killed."""
    for name in os.listdir(directory):
        if name.startswith(REMOVED):
            remove(directory, name)


#: How deep a tree is removed in place: neither descriptors nor the stack may run out.
_DEEPEST = 100


def _remove(name: str, parent: int, top: int, depth: int, pending: list[str]) -> None:
    try:
        os.unlink(name, dir_fd=parent)
        return
    except FileNotFoundError:
        return
    except IsADirectoryError:
        pass
    # By descriptor: whoever else can write here may put a link in its place.
    node = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        os.chmod(f"/proc/self/fd/{node}", 0o700)
        if depth > _DEEPEST:
            # Moved up and removed later.
            pending.append(f"{REMOVED}{os.urandom(6).hex()}")
            os.rename(name, pending[-1], src_dir_fd=parent, dst_dir_fd=top)
            return
        directory = os.open(f"/proc/self/fd/{node}", DIRECTORY & ~os.O_NOFOLLOW)
    finally:
        os.close(node)
    try:
        for entry in os.listdir(directory):
            _remove(entry, directory, top, depth + 1, pending)
    finally:
        os.close(directory)
    os.rmdir(name, dir_fd=parent)
