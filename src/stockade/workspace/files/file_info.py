"""Descriptions of a sandbox's files."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from typing import Literal, Protocol

import msgspec

from stockade.linux.openat2 import STRAIGHT, FileStatus, held, node
from stockade.workspace.diff.layer_walk import MOST_PATHS, length

Kind = Literal["file", "directory", "link", "pipe", "socket", "device"]

_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One file, directory, link or other node. For a link, it describes the link itself, not its target."""

    path: str
    kind: Kind
    size: int
    #: The permission bits.
    mode: int
    #: Seconds since 1970; `created` is None if the file system does not record it.
    modified: float
    created: float | None
    owner: str
    group: str
    #: The target of a link.
    target: str = ""


class Listing(msgspec.Struct, frozen=True):
    """The files found, sorted by name. `cut` says why some are missing; it is empty if none are."""

    entries: tuple[FileInfo, ...]
    cut: str = ""

    def __iter__(self) -> Iterator[FileInfo]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class ListingBuilder:
    """Collects a listing within a limit: a program chose how long paths are. `cut` says why it stopped."""

    def __init__(self) -> None:
        self.found: list[FileInfo] = []
        self.cut = ""
        self._room = MOST_PATHS

    def add(self, info: FileInfo) -> bool:
        """Add one file; return False if its path and link target exceed the limit."""
        self._room -= length(info.path) + length(info.target)
        if self._room < 0:
            self.cut = f"there are more: the paths of {len(self.found)} files take {MOST_PATHS >> 20} MiB"
            return False
        self.found.append(info)
        return True

    def listing(self) -> Listing:
        """Return the files sorted by path."""
        return Listing(tuple(sorted(self.found, key=lambda info: info.path)), self.cut)


class OwnerNames(Protocol):
    """Names of users and groups."""

    def user(self, uid: int) -> str:
        """Return the name of a user, or the number as text."""
        ...

    def group(self, gid: int) -> str:
        """Return the name of a group, or the number as text."""
        ...


class HostNames:
    """The names that the host has, which a sandbox without ids of its own shares."""

    def user(self, uid: int) -> str:
        """Return the name of a user, or the number as text."""
        return _user(uid)

    def group(self, gid: int) -> str:
        """Return the name of a group, or the number as text."""
        return _group(gid)


HOST_NAMES = HostNames()


def describe(
    shown: str, found: FileStatus, directory: int, name: str, names: OwnerNames = HOST_NAMES
) -> FileInfo:
    """Describe a file. A link is read at `directory` and `name`; without a name, `directory` is the link."""
    target = ""
    if stat.S_ISLNK(found.mode):
        parent, _, last = name.rpartition("/")
        if parent:
            with held(node(directory, parent, STRAIGHT, directory=True)) as here:
                target = os.readlink(last, dir_fd=here)
        else:
            target = os.readlink(last, dir_fd=directory)
    return FileInfo(
        path=shown,
        kind=_KINDS[stat.S_IFMT(found.mode)],
        size=found.size,
        mode=stat.S_IMODE(found.mode),
        modified=found.modified,
        created=found.created,
        owner=names.user(found.uid),
        group=names.group(found.gid),
        target=target,
    )


@functools.lru_cache(maxsize=256)
def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@functools.lru_cache(maxsize=256)
def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
