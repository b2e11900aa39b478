"""Directories by descriptor, one name at a time.

No path is trusted: the program chose the names in the layer, and the host's
tree can change while we read it. So every directory is reached from a
descriptor of its root, component by component, and a link on the way is an
error, not a way out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
NODE = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
#: Up to this depth, directories are entered one by one.
SHALLOW = 8
_NO_NAMES = frozenset(("", ".", ".."))


def split(path: str) -> tuple[str, str]:
    """Split a path into its directory, empty for a top name, and its last name."""
    parent, _, name = path.rpartition("/")
    return parent, name


def parents(path: str) -> list[str]:
    """Every directory above a relative path, the top first."""
    parts = path.split("/")
    return ["/".join(parts[:index]) for index in range(len(parts))] if path else []


def beginnings(path: str, longest: int) -> Iterator[str]:
    """The path and every directory above it, the innermost first, without those longer than `longest`.

    The bound matters: a program can make thousands of files hundreds of directories deep, and spelling out
    every directory above each of them takes minutes.
    """
    end = len(path) if len(path) <= longest else path.rfind("/", 0, longest + 1)
    while end >= 0:
        yield path[:end]
        end = path.rfind("/", 0, end)


def add_above(known: set[str], directory: str) -> None:
    """Add a directory and every one above it, up to the top."""
    while directory not in known:
        known.add(directory)
        directory = split(directory)[0]


def down(root: int, path: str, *, own: bool = False) -> int:
    """Open the directory `path` below `root` as O_PATH; the caller closes the descriptor.

    `own` says that the tree is a layer of ours: there a directory is opened even if a program took its
    owner's permissions away, and its mode is restored.
    """
    parts = path.split("/") if path else []
    if not _NO_NAMES.isdisjoint(parts):
        raise OSError(errno.EINVAL, "not a name", path)
    if len(parts) > SHALLOW:
        from stockade.linux import openat2

        # One call for all steps; if it fails, the steps one by one say why.
        with contextlib.suppress(OSError):
            return openat2.node(root, path, openat2.STRAIGHT, directory=True, follow=False)
    here = os.dup(root)
    try:
        for part in parts:
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
    with _owner_may_read(here):
        return os.open(part, NODE | os.O_DIRECTORY, dir_fd=here)


@contextlib.contextmanager
def _owner_may_read(node: int) -> Iterator[None]:
    """Let the owner read and enter a file or directory for as long as the statement lasts."""
    here = f"/proc/self/fd/{node}"
    mode = stat.S_IMODE(os.fstat(node).st_mode)
    os.chmod(here, mode | 0o500)
    try:
        yield
    finally:
        os.chmod(here, mode)


@contextlib.contextmanager
def _open_for_reading(node: int, flags: int, own: bool) -> Iterator[int]:
    """Open the file or directory of an O_PATH descriptor for reading."""
    with contextlib.ExitStack() as stack:
        if own and not os.access(f"/proc/self/fd/{node}", os.R_OK | (os.X_OK if flags else 0)):
            stack.enter_context(_owner_may_read(node))
        descriptor = os.open(f"/proc/self/fd/{node}", os.O_RDONLY | os.O_CLOEXEC | flags)
        stack.callback(os.close, descriptor)
        yield descriptor


@contextlib.contextmanager
def listed(root: int, path: str, *, own: bool = False) -> Iterator[int]:
    """Open the directory `path` below `root` for reading."""
    with reached(root, path, own=own) as node, _open_for_reading(node, os.O_DIRECTORY, own) as directory:
        yield directory


@contextlib.contextmanager
def reached(root: int, path: str, *, own: bool = False) -> Iterator[int]:
    """Open the directory `path` below `root` as O_PATH, for calls that take a `dir_fd`."""
    node = down(root, path, own=own)
    try:
        yield node
    finally:
        os.close(node)


class Directories:
    """Opens the directories of a tree one after another, and keeps the last one open.

    Files come sorted by directory, and reaching one from the top costs as much as it is deep.
    """

    def __init__(self, root: int, *, own: bool = False) -> None:
        self.own = own
        self._root = root
        self._path = ""
        self._opened = -1
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Directories:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def listed(self, path: str) -> int:
        """Return the directory `path`, open for reading until the next call asks for another one."""
        if self._opened < 0 or path != self._path:
            self._close()
            self._opened = self._stack.enter_context(listed(self._root, path, own=self.own))
            self._path = path
        return self._opened

    def _close(self) -> None:
        self._opened = -1
        self._stack.close()


@contextlib.contextmanager
def content(directory: int, name: str, *, own: bool = False) -> Iterator[int]:
    """Open a regular file of the directory for reading: never another kind, never through a link."""
    # O_PATH first: opening a pipe or a device has effects, and may never return.
    node = os.open(name, NODE, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(node).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", name)
        with _open_for_reading(node, 0, own) as file:
            yield file
    finally:
        os.close(node)


def look(directory: int | None, name: str) -> os.stat_result | None:
    """The status of what a directory has under the name, links not followed; None if absent or forbidden."""
    if directory is None:
        return None
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except (FileNotFoundError, PermissionError):
        return None


#: How the name of a file begins that is being removed, or not finished: readers skip it.
REMOVED = ".removed-"


#: How deep a tree is removed in place, so that neither descriptors nor the stack run out.
_DEEPEST = 100
#: How many subdirectories of one directory are remembered at a time.
BATCH = 256


def remove(directory: int, name: str) -> None:
    """Remove what the directory has under the name, with everything in it."""
    _Removal(directory).all(name)


class _Removal:
    """One removal. A program made the tree, so it copes with any depth, any size and closed directories."""

    def __init__(self, top: int) -> None:
        self._top = top
        #: Directories that lie too deep are moved to the top under this and a number, and removed later.
        self._prefix = f"{REMOVED}{os.urandom(6).hex()}-"
        self._moved = 0

    def all(self, name: str) -> None:
        self._one(name, self._top, 0)
        done = 0
        while done < self._moved:
            self._one(f"{self._prefix}{done}", self._top, 0)
            done += 1

    def _one(self, name: str, parent: int, depth: int) -> None:
        try:
            os.unlink(name, dir_fd=parent)
            return
        except FileNotFoundError:
            return
        except IsADirectoryError:
            pass
        # By descriptor: another process that can write here may put a link in its place.
        node = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
        try:
            os.chmod(f"/proc/self/fd/{node}", 0o700)
            if depth > _DEEPEST:
                os.rename(name, f"{self._prefix}{self._moved}", src_dir_fd=parent, dst_dir_fd=self._top)
                self._moved += 1
                return
            directory = os.open(f"/proc/self/fd/{node}", DIRECTORY & ~os.O_NOFOLLOW)
        finally:
            os.close(node)
        try:
            while below := _remove_files(directory):
                for entry in below:
                    self._one(entry, directory, depth + 1)
        finally:
            os.close(directory)
        os.rmdir(name, dir_fd=parent)


def _remove_files(directory: int) -> list[str]:
    """Remove the files of a directory and return up to `BATCH` of its subdirectories."""
    below: list[str] = []
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                below.append(entry.name)
                if len(below) == BATCH:
                    break
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(entry.name, dir_fd=directory)
    return below


def remove_doomed(directory: int) -> None:
    """Remove what a killed process left half made or half removed in a directory."""
    for name in os.listdir(directory):
        if name.startswith(REMOVED):
            remove(directory, name)
