"""What is said about a file of a sandbox."""

from __future__ import annotations

import functools
import os
import stat
from collections.abc import Iterator
from typing import Literal

import msgspec

from stockade.workspace.beneath import STRAIGHT, Status, held, node

Kind = Literal["file", "directory", "link", "pipe", "socket", "device"]

_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "link", stat.S_IFIFO: "pipe",
    stat.S_IFSOCK: "socket", stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


class FileInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One file, directory, link or other node. A link is described itself, not what it leads to."""

    path: str
    kind: Kind
    size: int
    #: The permission bits.
    mode: int
    #: Seconds since 1970; `created` is None where the file system does not know.
    modified: float
    created: float | None
    owner: str
    group: str
    #: Where a link leads.
    target: str = ""


class Listing(msgspec.Struct, frozen=True):
    """What was found, by name. `cut` says why it is not everything; it is empty if it is."""

    entries: tuple[FileInfo, ...]
    cut: str = ""

    def __iter__(self) -> Iterator[FileInfo]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def describe(shown: str, found: Status, directory: int, name: str) -> FileInfo:
    """`directory` and `name` are where a link is read; without a name it is the link itself."""
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
        owner=_user(found.uid),
        group=_group(found.gid),
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
