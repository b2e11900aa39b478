"""What is mounted in a tree, which an overlay of it does not show; and where the same is mounted twice."""

from __future__ import annotations

import os
import sys

#: File systems that hold files and nothing else: no interface to the kernel, and none to another program.
HOLDING = (
    *("btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "nfs", "nfs4"),
    *("overlay", "squashfs", "tmpfs", "vfat", "virtiofs", "xfs", "zfs"),
)
_OPEN_TREE, _CLONE, _EMPTY_PATH = 428, 1, 0x1000


def mount_table() -> bytes:
    with open("/proc/self/mountinfo", "rb", buffering=0) as file:
        return file.readall()


def mounted_below(tree: str) -> dict[str, str]:
    """The mount points in a tree, in order, and the kind of file system that is seen at each."""
    if sys.platform != "linux":
        return {}
    table = mount_table()
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


def mounted_names(path: str, table: bytes | None = None) -> list[str]:
    """Every name of what is at a real path: the host may have mounted its tree, or a part of it, twice."""
    if sys.platform != "linux":
        return [path]
    mounts = [line.split(b" ", 5)[2:5] for line in (table or mount_table()).splitlines()]
    found = [name := _escaped(os.fsencode(path))]
    # Where it is: the longest mount point on the way, what was mounted there last. A chroot may have none.
    above = [mount for mount in reversed(mounts) if _covers(mount[2], name)]
    device, root, point = max(above, key=lambda mount: len(mount[2]), default=(b"", b"/", b"/"))
    place = _moved(name, point, root)
    for other, top, at in mounts:
        if other == device and _covers(top, place):
            found.append(_moved(place, top, at))
        elif other == device and _covers(place, top):
            found.append(at)
    return [os.fsdecode(_plain(one)) for one in dict.fromkeys(found)]


def _covers(tree: bytes, path: bytes) -> bool:
    return path == tree or path.startswith(tree.rstrip(b"/") + b"/")


def _moved(path: bytes, tree: bytes, to: bytes) -> bytes:
    """What a path in a tree is called where the tree is elsewhere."""
    return (to.rstrip(b"/") + b"/" + path[len(tree) :].lstrip(b"/")).rstrip(b"/") or b"/"


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
