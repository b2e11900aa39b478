"""What is mounted in a tree: an overlay shows the tree's own file system, and none of these."""

from __future__ import annotations

import os
import sys

#: File systems that hold files and nothing else: no interface to the kernel, and none to another program.
HOLDING = (
    *("btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "nfs", "nfs4"),
    *("overlay", "squashfs", "tmpfs", "vfat", "virtiofs", "xfs", "zfs"),
)
_OPEN_TREE, _CLONE, _EMPTY_PATH = 428, 1, 0x1000


def mounted_below(tree: str) -> dict[str, str]:
    """The mount points in a tree, in order, and the kind of file system that is seen at each."""
    if sys.platform != "linux":
        return {}
    with open("/proc/self/mountinfo", "rb", buffering=0) as file:
        table = file.readall()
    start = _escaped(os.fsencode(tree)) + b"/"
    if b" " + start not in table:
        return {}
    found = {}
    for line in table.splitlines():
        point = line.split(b" ", 5)[4] if start in line else b""
        if point.startswith(start):
            kind = line.partition(b" - ")[2].split(b" ", 1)[0]
            found[os.fsdecode(_plain(point))] = kind.decode()  # the last one is on top
    return dict(sorted(found.items()))


def alone(directory: int) -> int | None:
    """A mount of an open directory, attached nowhere and without what is mounted in it; None if not allowed.

    For the caller to close. Only root can have one: for others every mount is locked with those in it. Of
    what is attached nowhere itself there is one since Linux 6.15.
    """
    from stockade.workspace import beneath

    try:
        return beneath.call(_OPEN_TREE, directory, b"", _CLONE | os.O_CLOEXEC | _EMPTY_PATH)
    except OSError:
        return None


def _escaped(path: bytes) -> bytes:
    """A path as the mount table writes it."""
    for char in b"\\ \t\n":
        path = path.replace(bytes([char]), b"\\%03o" % char)
    return path


def _plain(path: bytes) -> bytes:
    """A path of the mount table as it is; its backslash comes last."""
    for char in b"\n\t \\":
        path = path.replace(b"\\%03o" % char, bytes([char]))
    return path
