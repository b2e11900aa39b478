"""The file calls of one user inside a sandbox, as a file worker makes them.

The process that uses this has the ids and the capabilities of that user, in
the sandbox's user namespace. So the kernel decides what is allowed, owners are
the ids that programs inside see, and what is made belongs to that user. Names
of users come from the sandbox's own /etc/passwd.

Content does not pass through here: files are opened, and the descriptors
handed to the caller.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from stockade.errors import LimitError, PolicyError
from stockade.linux.openat2 import (
    STRAIGHT,
    FileStatus,
    held,
    is_window,
    listed,
    look,
    node,
    not_mounted,
    opened,
    status,
)
from stockade.workspace.files import tree_operations
from stockade.workspace.files.atomic_write import Sink, UnfinishedFile, temporary_name
from stockade.workspace.files.file_info import FileInfo, ListingBuilder, describe
from stockade.workspace.files.files import READ_LIMIT, Files
from stockade.workspace.files.inside_names import InsideNames
from stockade.workspace.files.sandbox_paths import Roots, SandboxPath, make_parents

#: How many files a listing or a search returns, and how many names a search examines.
MOST_FOUND = 50_000
MOST_EXAMINED = 1_000_000
#: How many nested directories a listing enters.
DEEPEST_LISTING = 100
#: The longest pattern of a search: more than any path has.
LONGEST_PATTERN = 8192
#: Mode bits that may be set from outside.
SETTABLE = 0o1777
NO_SUBORDINATE_IDS = (
    "the sandbox has no such user or group id; an ordinary user gets more than one with `newuidmap` and "
    "`newgidmap` (package uidmap) and a range of ids in /etc/subuid and /etc/subgid"
)


class Permission(NamedTuple):
    """A mode, or None to keep it, and the names or numbers of an owner and a group, or "" to keep them."""

    mode: int | None = None
    owner: str = ""
    group: str = ""


class IdentityFiles(Files):
    """The files of a sandbox for one of its users. Relative paths count from `start`, `~` is the home."""

    def __init__(self, root: int, *, start: str, home: str) -> None:
        super().__init__(Roots(root=root, home=home, uid=os.geteuid(), gid=os.getegid()), keeps_rights=True)
        self._start = start
        self._names = InsideNames(root)

    def refresh(self) -> None:
        """Read the names of users again if they have changed; once before each call."""
        self._names.refresh()

    def _place(self, path: str, *, writes: bool) -> SandboxPath:
        if path == "~" or path.startswith("~/"):
            path = self._roots.home + path[1:]
        return super()._place(os.path.join(self._start, path) if path else path, writes=writes)

    def facts(self, path: str) -> FileInfo:
        """Describe the file at a path; for a link, the link itself."""
        with self._acting(path) as place, held(place.node(follow=False)) as found:
            return self._describe(place.shown, status(found), found, "")

    def open_file(self, path: str) -> int:
        """Open a regular file for reading; the caller owns the descriptor."""
        with self._acting(path) as place, held(place.node()) as found:
            return opened(found)

    def begin(self, path: str, permission: Permission) -> tuple[int, UnfinishedFile]:
        """Open a file for new content, which appears at the path with `finish`.

        An existing file is replaced, whatever its mode. Missing directories above it are made at the end,
        where the file system has files without names; until then, the nearest one above has the new file.
        """
        mode = _check_mode(permission.mode)
        owner = self._names.ids(permission.owner, permission.group)
        with self._acting(path, writes=True) as place, _unknown_ids(owner):
            try:
                directory, name = self._follow(place)
            except FileNotFoundError:
                directory, name = _nearest(place), temporary_name()
                with contextlib.closing(Sink(directory, name, mode, owner=owner)) as sink:
                    if not sink.is_named:
                        return sink.suspend()
                make_parents(place)
                directory, name = self._follow(place)
            with contextlib.closing(Sink(directory, name, mode, replace=True, owner=owner)) as sink:
                return sink.suspend()

    def finish(self, path: str, file: int, unfinished: UnfinishedFile) -> None:
        """Put a file that `begin` opened at its path, and make missing directories above it."""
        with self._acting(path, writes=True) as place:
            make_parents(place)
        with self._resumed(path, file, unfinished, replaces=unfinished.replaces) as sink:
            sink.finish()

    def discard(self, path: str, file: int, unfinished: UnfinishedFile) -> None:
        """Forget a file that `begin` opened; only one with a temporary name leaves something to remove."""
        with self._resumed(path, file, unfinished):
            pass

    @contextlib.contextmanager
    def _resumed(
        self, path: str, file: int, unfinished: UnfinishedFile, *, replaces: bool = False
    ) -> Iterator[Sink]:
        with self._acting(path, writes=True) as place:
            directory, name = self._follow(place)
            with contextlib.closing(Sink.resume(directory, name, os.dup(file), unfinished)) as sink:
                if replaces:
                    not_mounted(directory, name)
                yield sink

    def replace_text(self, path: str, old: bytes, new: bytes) -> int:
        """Replace a text everywhere in a file, which keeps its mode and its owner; return how often."""
        if not old:
            raise PolicyError(f"{path}: the text to replace is empty", hint="`old` must not be empty")
        content = self.read(path)
        times = content.count(old)
        # This process counts against none of the sandbox's limits.
        if len(content) + times * (len(new) - len(old)) > READ_LIMIT:
            raise LimitError(
                f"{path}: with {times} replacements it is larger than {READ_LIMIT} bytes",
                hint="let a command inside do it",
            )
        if times:
            changed = content.replace(old, new)
            with self._acting(path, writes=True) as place:
                directory, name = self._follow(place)
                with contextlib.closing(Sink(directory, name, same_owner=True)) as sink:
                    sink.write(changed)
                    sink.finish()
        return times

    def set_permission(self, path: str, permission: Permission) -> None:
        """Change owner, group and mode of a file or directory; a link is followed."""
        mode = _check_mode(permission.mode)
        owner = self._names.ids(permission.owner, permission.group)
        with self._acting(path, writes=True) as place, held(place.node()) as found, _unknown_ids(owner):
            if is_window(found):
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            _set_permission(found, mode, owner)

    def remove_file(self, path: str) -> None:
        """Remove a file or a link; one that is missing is no error, a directory is."""
        with self._acting(path, writes=True) as place, contextlib.suppress(FileNotFoundError):
            directory, name = place.parent()
            with held(directory):
                not_mounted(directory, name)
                os.unlink(name, dir_fd=directory)

    def remove_directory(self, path: str) -> None:
        """Remove a directory with everything in it; one that is missing is no error."""
        with self._acting(path, writes=True) as place, contextlib.suppress(FileNotFoundError):
            directory, name = place.parent()
            with held(directory):
                not_mounted(directory, name)
                if not stat.S_ISDIR(status(directory, name).mode):
                    raise OSError(errno.ENOTDIR, "it is not a directory")
                tree_operations.remove(directory, name)

    def make_directory(self, path: str, permission: Permission) -> None:
        """Make a directory and those above it; one that exists stays as it is."""
        mode = _check_mode(permission.mode)
        owner = self._names.ids(permission.owner, permission.group)
        with self._acting(path, writes=True) as place, _unknown_ids(owner):
            with contextlib.suppress(FileNotFoundError):
                os.close(place.node(directory=True))
                return
            make_parents(place)
            directory, name = place.parent()
            with held(directory):
                os.mkdir(name, dir_fd=directory)
                with held(node(directory, name, STRAIGHT, directory=True, follow=False)) as made:
                    _set_permission(made, mode, owner)

    def list_tree(self, path: str, depth: int) -> tuple[FileInfo, ...]:
        """List a directory and those in it up to a depth, each directory before what is in it."""
        if depth > DEEPEST_LISTING:
            raise PolicyError(
                f"depth = {depth}: is more than {DEEPEST_LISTING}",
                hint="list a directory further down, or let a command inside list them",
            )
        found: list[FileInfo] = []
        with self._acting(path) as place:
            plain = msgspec.structs.replace(place, path=place.path.rstrip("/") or "/")
            with held(plain.node(follow=False)) as seen:
                if stat.S_ISLNK(os.fstat(seen).st_mode):
                    raise OSError(errno.ENOTDIR, "it is a symbolic link")
            with held(place.node(directory=True)) as top:
                self._list_below(top, "", place.shown, depth, found)
        return tuple(found)

    def _list_below(self, top: int, here: str, shown: str, depth: int, found: list[FileInfo]) -> None:
        if depth < 1:
            return
        with listed(top, here) as directory:
            with os.scandir(directory) as entries:
                names = [entry.name for _, entry in zip(range(MOST_FOUND + 1), entries, strict=False)]
            if len(names) + len(found) > MOST_FOUND:
                raise _too_many(shown)
            for name in sorted(names):
                seen = look(directory, name)
                if seen is None:
                    continue  # removed meanwhile
                with contextlib.suppress(FileNotFoundError):
                    found.append(self._describe(_join(shown, name), seen, directory, name))
                if stat.S_ISDIR(seen.mode):
                    # Removed, replaced or closed to this user: there is nothing to list below it.
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
                        self._list_below(top, f"{here}{name}/", _join(shown, name), depth - 1, found)

    def find(self, path: str, pattern: str) -> tuple[FileInfo, ...]:
        """Find files below a directory: by base name, or by path from there if the pattern has a `/`."""
        if len(pattern) > LONGEST_PATTERN:
            raise PolicyError(
                f"pattern: has more than {LONGEST_PATTERN} characters", hint="write a shorter one"
            )
        glob = tree_operations.Glob(pattern if "/" in pattern.strip("/") else f"**/{pattern.strip('/')}")
        gathered = ListingBuilder()
        with self._acting(path) as place, held(place.node(directory=True)) as top:
            for count, (below, seen) in enumerate(tree_operations.search(top, glob)):
                if count >= MOST_EXAMINED or len(gathered.found) > MOST_FOUND:
                    raise _too_many(place.shown)
                if seen is not None and not stat.S_ISDIR(seen.mode):
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile
                        gathered.add(self._describe(_join(place.shown, below), seen, top, below))
        if len(gathered.found) > MOST_FOUND or gathered.cut:
            raise _too_many(path)
        return gathered.listing().entries

    def _describe(self, shown: str, found: FileStatus, directory: int, name: str) -> FileInfo:
        return describe(shown, found, directory, name, self._names)


@contextlib.contextmanager
def _unknown_ids(owner: tuple[int, int]) -> Iterator[None]:
    """Explain the kernel's answer to an id that the namespace does not map."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EINVAL or owner == (-1, -1):
            raise
        raise OSError(errno.EPERM, NO_SUBORDINATE_IDS) from None


def _nearest(place: SandboxPath) -> int:
    """Return the lowest directory above a path that exists."""
    above = place.path
    while above := above.rstrip("/").rpartition("/")[0]:
        with contextlib.suppress(FileNotFoundError):
            return node(place.root, above, place.resolve, directory=True)
    return node(place.root, "/", place.resolve, directory=True)


def _set_permission(found: int, mode: int | None, owner: tuple[int, int]) -> None:
    kind = os.fstat(found).st_mode
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
        raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
    place = f"/proc/self/fd/{found}"
    if owner != (-1, -1):
        os.chown(place, *owner)
    if mode is not None:
        os.chmod(place, mode)


def _check_mode(mode: int | None) -> int | None:
    if mode is not None and mode & ~SETTABLE:
        raise PolicyError(
            f"mode = {mode:o}: is not a set of permission bits",
            hint="use 0 to 1777: set-uid and set-gid bits cannot be set from outside",
        )
    return mode


def _too_many(path: str) -> LimitError:
    return LimitError(
        f"{path}: there are more than {MOST_FOUND:,} files, or too many names to look at",
        hint="name a directory with fewer files, or let a command inside list them",
    )


def _join(directory: str, name: str) -> str:
    return f"{directory.rstrip('/')}/{name}"
