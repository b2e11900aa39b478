"""The mount table: what is mounted in a tree, which an overlay of it does not show, and what twice."""

from __future__ import annotations

import os
import sys

#: File systems that only store files: they are no interface to the kernel or to another program.
HOLDING = (
    *("btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "nfs", "nfs4"),
    *("overlay", "squashfs", "tmpfs", "vfat", "virtiofs", "xfs", "zfs"),
)
_OPEN_TREE, _CLONE, _EMPTY_PATH = 428, 1, 0x1000


def mount_table() -> bytes:
    with open("/proc/self/mountinfo", "rb", buffering=0) as file:
        return file.readall()


def mounted_below(tree: str) -> dict[str, str]:
    """The mount points in a tree, sorted, and the kind of file system on top at each."""
    if sys.platform != "linux":
        return {}
    table = mount_table()
    start = _escape(os.fsencode(tree)) + b"/"
    if b" " + start not in table:
        return {}
    kinds = {}
    for line in table.splitlines():
        point = line.split(b" ", 5)[4] if start in line else b""
        if point.startswith(start):
            kind = line.partition(b" - ")[2].split(b" ", 1)[0]
            kinds[os.fsdecode(_unescape(point))] = kind.decode()  # the last one is on top
    return dict(sorted(kinds.items()))


def mounted_names(path: str, table: bytes | None = None) -> list[str]:
    """Every name of what lies at a real path: the host may have mounted its tree, or part of it, twice."""
    if sys.platform != "linux":
        return [path]
    mounts = [line.split(b" ", 5)[2:5] for line in (table or mount_table()).splitlines()]
    names = [name := _escape(os.fsencode(path))]
    # The mount that it lies in: the longest mount point on the way, the last one there. A chroot may lack it.
    above = [mount for mount in reversed(mounts) if _covers(mount[2], name)]
    device, root, point = max(above, key=lambda mount: len(mount[2]), default=(b"", b"/", b"/"))
    place = _rebase(name, point, root)
    for other, top, at in mounts:
        if other == device and _covers(top, place):
            names.append(_rebase(place, top, at))
        elif other == device and _covers(place, top):
            names.append(at)
    return [os.fsdecode(_unescape(one)) for one in dict.fromkeys(names)]


def _covers(tree: bytes, path: bytes) -> bool:
    return path == tree or path.startswith(tree.rstrip(b"/") + b"/")


def _rebase(path: bytes, tree: bytes, to: bytes) -> bytes:
    """The name of a path in `tree` when the tree is at `to`."""
    return (to.rstrip(b"/") + b"/" + path[len(tree) :].lstrip(b"/")).rstrip(b"/") or b"/"


def alone(directory: int) -> int | None:
    """Clone the mount of an open directory without what is mounted in it; None if that is not allowed.

    The clone is attached nowhere; the caller closes it. Only root can make one: for other users every mount
    is locked together with those in it. Cloning a mount that is itself detached needs Linux 6.15.
    """
    from stockade.linux import openat2

    try:
        return openat2.call(_OPEN_TREE, directory, b"", _CLONE | os.O_CLOEXEC | _EMPTY_PATH)
    except OSError:
        return None


def _escape(path: bytes) -> bytes:
    """A path as the mount table writes it."""
    for char in b"\\ \t\n":
        path = path.replace(bytes([char]), b"\\%03o" % char)
    return path


def _unescape(path: bytes) -> bytes:
    """A path of the mount table in its own letters."""
    # The backslash last, or it would make new escapes.
    for char in b"\n\t \\":
        path = path.replace(b"\\%03o" % char, bytes([char]))
    return path
