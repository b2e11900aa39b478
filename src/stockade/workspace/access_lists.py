"""POSIX access control lists (`man 5 acl`), and which entries a commit keeps.

A list gives named users and groups permissions that the mode does not. A
program may have written it, so a commit lets no entry give more than the
host's own file does, or for a new file, more than the default list of its
directory does. If a file has a list, the group bits of its mode are the
list's mask: they say nothing about the group itself.
"""

from __future__ import annotations

import contextlib
import os
import stat
import struct

import msgspec

from stockade.linux import dirwalk
from stockade.workspace.diff.layer_walk import LISTS, LayerWalk, PathDifference
from stockade.workspace.holdback.screening import find_upwards

#: The attributes with the list of a file, and with the default list of a directory, which new files inherit.
ACCESS, HANDED_ON = LISTS

#: How many removed entries the notes name.
SHOWN = 5

# Tags of entries.
USER, GROUP, NAMED_GROUP, MASK = 0x02, 0x04, 0x08, 0x10
_NAMED = {USER: "user", NAMED_GROUP: "group"}
_NO_ID = 0xFFFFFFFF
_WRITE = 0o2
_HEAD, _ENTRY = struct.Struct("<I"), struct.Struct("<HHI")


class AccessList(msgspec.Struct, frozen=True):
    """One access list."""

    entries: dict[tuple[int, int], int]
    """The permission by tag and id."""

    @classmethod
    def of_mode(cls, mode: int) -> AccessList:
        """Return the list that is equivalent to the group bits of a mode."""
        return cls({(GROUP, _NO_ID): mode >> 3 & 0o7})

    @property
    def has_named_entries(self) -> bool:
        """Whether the list says something that a mode cannot."""
        return any(tag in _NAMED for tag, _ in self.entries)

    @property
    def group(self) -> int:
        """The permissions of the owning group itself."""
        return self.entries[GROUP, _NO_ID] & self.entries.get((MASK, _NO_ID), 0o7)

    def cut_to(self, host: AccessList) -> AccessList:
        """Return the list with named entries, and the group's write bit, cut to those of the host's list."""
        found: dict[tuple[int, int], int] = {}
        for (tag, who), permission in self.entries.items():
            kept = permission
            if tag in _NAMED:
                kept &= host.entries.get((tag, who), 0)
            elif tag == GROUP:
                kept &= ~_WRITE | host.group
            if kept or not permission or tag not in _NAMED:
                found[tag, who] = kept
        return AccessList(found)

    def removed(self, taken: AccessList) -> list[str]:
        """Describe the permissions of named entries that the other list lacks."""
        lost = (
            (tag, who, permission & ~taken.entries.get((tag, who), 0))
            for (tag, who), permission in self.entries.items()
            if tag in _NAMED
        )
        return [f"{_words(gone)} for {_NAMED[tag]} {who}" for tag, who, gone in lost if gone]

    def mode_without(self, mode: int) -> int:
        """Return the mode for a file without the list: with the group's own bits instead of the mask's."""
        return mode & (~0o070 | self.group << 3)

    def encode(self) -> bytes:
        """Return the list in the kernel's format."""
        return _HEAD.pack(2) + b"".join(
            _ENTRY.pack(tag, permission, who) for (tag, who), permission in self.entries.items()
        )


class HostLists(msgspec.Struct):
    """The access lists of the host's tree."""

    root: int
    walk: LayerWalk
    #: By directory, of the host's or new ones in it: the default list that applies there.
    _handed_on: dict[str, tuple[AccessList | None] | None] = {}

    def of_file(self, one: PathDifference) -> AccessList | None:
        """Return the list of the file that a change replaces, or the list that a new file inherits."""
        if is_new(one):
            found = find_upwards(one.directory, self._handed_on, self._default_list)
            return None if found is None else found[0]
        with contextlib.suppress(OSError), dirwalk.reached(self.root, one.directory) as directory:
            return read(f"/proc/self/fd/{directory}/{one.name}")
        return None

    def _default_list(self, directory: str) -> tuple[AccessList | None] | None:
        """Return the default list of a directory; None if the host does not have the directory."""
        if directory not in self.walk.merged:
            return None
        with contextlib.suppress(OSError), dirwalk.listed(self.root, directory) as opened:
            return (read(opened, HANDED_ON),)
        return (None,)


class Permissions(msgspec.Struct, frozen=True):
    """The mode and the access list that a committed file gets, and a description of what it loses."""

    mode: int
    access: AccessList | None = None
    removed: tuple[str, ...] = ()


def is_new(one: PathDifference) -> bool:
    """Return whether a path is new to the host, or of another type there."""
    return one.before is None or "type" in one.what


def permissions(one: PathDifference, file: int, mode: int, lists: HostLists) -> Permissions:
    """Return the permissions for a file of the layer; `mode` already lacks the bits that no commit keeps."""
    host, made = lists.of_file(one), read(file)
    if made is None and host is None:
        return Permissions(mode)
    if made is None:
        # The kernel gives a new file this list; overlayfs does not do so in its topmost directory.
        made = host if is_new(one) else AccessList.of_mode(mode)
        assert made is not None
    taken = made.cut_to(host or AccessList.of_mode(mode))
    removed = [f"{words} removed from its access list" for words in made.removed(taken)]
    if (more := len(removed) - SHOWN) > 0:
        removed[SHOWN:] = [f"{more} more entries removed from its access list"]
    if mode & stat.S_IWGRP and (made.group & ~taken.group) << 3 & stat.S_IWGRP:
        removed.append("write permission for its group removed")
    if taken.has_named_entries:
        return Permissions(mode, taken, tuple(removed))
    return Permissions(taken.mode_without(mode), None, tuple(removed))


def read(place: int | str, attribute: str = ACCESS) -> AccessList | None:
    """Return the access list of a file, or the default list of a directory; None without a list."""
    try:
        data = os.getxattr(place, attribute, follow_symlinks=isinstance(place, int))
    except OSError:  # also on file systems without access lists
        return None
    found = {(tag, who): permission for tag, permission, who in _ENTRY.iter_unpack(data[_HEAD.size :])}
    return AccessList(found) if (GROUP, _NO_ID) in found else None


def _words(permission: int) -> str:
    return "".join(letter if permission & bit else "-" for letter, bit in (("r", 4), ("w", 2), ("x", 1)))
