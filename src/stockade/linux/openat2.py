"""Files below a root, by descriptor: nothing there can lead out of the root or make the caller wait.

The program chose the names, the links and the kinds of the files that are
looked up here, and may swap them at any moment. So the kernel itself resolves
each path below the root (openat2), into a descriptor that has no effect on
what it names (O_PATH). We open the file for reading only when its kind is
known, through the descriptor and without blocking: a pipe, a device or a lease
would otherwise hold the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

# openat2(2): how a path is resolved.
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH, IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
#: The root is the sandbox's: absolute links and `..` stop there, as for the program.
AS_INSIDE = IN_ROOT | NO_MAGICLINKS
#: Below a directory, through no link.
STRAIGHT = BENEATH | NO_MAGICLINKS | NO_SYMLINKS

#: How much of a path one call resolves: PATH_MAX is 4096, a name at most 255.
PIECE = 3800
#: How often a path with `..` is tried again after a rename on the way.
ATTEMPTS = 200
#: How many seconds a process may keep a lease on a file that we open.
PATIENCE = 2.0

# Files of procfs and sysfs show what the reader may see, and the reader is not the program.
_PROC, _SYSFS = 0x9FA0, 0x62656572

_OPENAT2 = 437
_STATX, _RENAMEAT2 = {"x86_64": (332, 316)}.get(os.uname().machine, (291, 276))
_AT_SYMLINK_NOFOLLOW, _AT_NO_AUTOMOUNT, _AT_EMPTY_PATH = 0x100, 0x800, 0x1000
_STATX_BASIC, _STATX_BTIME, _ATTR_MOUNT_ROOT = 0x7FF, 0x800, 0x2000
_RENAME_NOREPLACE = 1
_CAPABILITIES_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class FileStatus(NamedTuple):
    """What the kernel says about a file; links are not followed."""

    mode: int
    size: int
    uid: int
    gid: int
    modified: float
    #: None if the file system does not record it.
    created: float | None
    #: Whether something is mounted exactly there, so that it cannot be replaced.
    mounted: bool


def call(number: int, *arguments: object) -> int:
    """Make a system call that Python has no function for."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return result


def node(
    root: int, path: str, resolve: int = AS_INSIDE, *, directory: bool = False, follow: bool = True
) -> int:
    """Open what `path` names below `root` as O_PATH; the caller closes the descriptor."""
    flags = (os.O_DIRECTORY if directory else 0) | (0 if follow else os.O_NOFOLLOW)
    rest, here = os.fsencode(path) or b".", root
    try:
        while len(rest) > PIECE:
            end = rest.rfind(b"/", 1, PIECE)
            if end < 0:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
            below = _open_path(here, rest[:end], os.O_DIRECTORY, resolve)
            if here != root:
                os.close(here)
            # The rest is relative to this directory; a link in it would count from the wrong root.
            here, rest, resolve = below, rest[end:].lstrip(b"/") or b".", resolve & ~IN_ROOT | STRAIGHT
        return _open_path(here, rest, flags, resolve)
    finally:
        if here != root:
            os.close(here)


def _open_path(root: int, path: bytes, flags: int, resolve: int) -> int:
    how = _OpenHow(os.O_PATH | os.O_CLOEXEC | flags, 0, resolve)
    for attempt in range(ATTEMPTS):
        try:
            return call(_OPENAT2, root, path, ctypes.byref(how), ctypes.sizeof(how))
        except BlockingIOError:  # after a rename meanwhile the kernel cannot be sure of a `..`
            time.sleep(0.0001 * (attempt > 20))
    raise OSError(errno.EBUSY, "directories on the way keep being renamed")


def status(directory: int, name: str = "") -> FileStatus:
    """The status of what a directory has under the name, or of the descriptor itself."""
    buffer = ctypes.create_string_buffer(256)
    flags = _AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT | (0 if name else _AT_EMPTY_PATH)
    call(_STATX, directory, os.fsencode(name), flags, _STATX_BASIC | _STATX_BTIME, buffer)
    known, _, attributes, _, uid, gid, mode, _, size = struct.unpack_from("=IIQIIIH10sQ", buffer)
    born, born_part = struct.unpack_from("=qI", buffer, 80)
    changed, changed_part = struct.unpack_from("=qI", buffer, 112)
    created = born + born_part / 1e9 if known & _STATX_BTIME else None
    mounted = bool(attributes & _ATTR_MOUNT_ROOT)
    return FileStatus(mode, size, uid, gid, changed + changed_part / 1e9, created, mounted)


def look(directory: int, name: str) -> FileStatus | None:
    """The status of what a directory has under the name; None if it has nothing."""
    try:
        return status(directory, name)
    except FileNotFoundError:
        return None


def not_mounted(directory: int, name: str) -> None:
    """Raise OSError if something is mounted there: a grant of its own, or a protected path.

    The kernel does not refuse this to a process outside the sandbox's mount namespace: what that process
    removes or replaces loses its mount (since 3.18). No process inside can mount, or rename a mount point.
    """
    there = look(directory, name)
    if there is not None and there.mounted:
        raise OSError(errno.EBUSY, "it is mounted by the policy")


def opened(found: int, flags: int = os.O_RDONLY) -> int:
    """Open the regular file or directory of an O_PATH descriptor, without blocking on what it is."""
    mode = os.fstat(found).st_mode
    if not (stat.S_ISDIR(mode) if flags & os.O_DIRECTORY else stat.S_ISREG(mode)):
        wrong = (
            errno.ENOTDIR if flags & os.O_DIRECTORY else errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        )
        raise OSError(wrong, os.strerror(wrong))
    if is_window(found):
        raise OSError(errno.EPERM, "it is a file of /proc or /sys")
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return os.open(f"/proc/self/fd/{found}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, "a process holds a lease on it") from None
            time.sleep(0.01)


def is_window(found: int) -> bool:
    """Whether a file lies on procfs or sysfs."""
    return file_system(found) in (_PROC, _SYSFS)


def file_system(found: int) -> int:
    """The magic number of the file system that a file lies on (`man 2 statfs`)."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(found, buffer) < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return ctypes.c_ulong.from_buffer(buffer).value


@contextlib.contextmanager
def held(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the statement."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def listed(root: int, path: str, resolve: int = STRAIGHT) -> Iterator[int]:
    """Open the directory `path` below `root` for reading."""
    with (
        held(node(root, path, resolve, directory=True, follow=False)) as found,
        held(opened(found, os.O_RDONLY | os.O_DIRECTORY)) as directory,
    ):
        yield directory


def rename(source: int, name: str, target: int, new: str, *, overwrite: bool) -> None:
    """Rename a file or directory; unless `overwrite`, fail if the new name exists."""
    if overwrite:
        os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)
    else:
        call(_RENAMEAT2, source, os.fsencode(name), target, os.fsencode(new), _RENAME_NOREPLACE)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Let this thread act without its capabilities, as the program must.

    Otherwise root would open for the program, through a link, what the program itself may not.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    before = (ctypes.c_uint32 * 6)()
    if _libc.capget(header, before) < 0:
        raise OSError(ctypes.get_errno(), "capget failed")
    if not (before[0] or before[3]):
        yield
        return
    none = (ctypes.c_uint32 * 6)(*before)
    none[0] = none[3] = 0
    if _libc.capset(header, none) < 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be dropped")
    try:
        yield
    finally:
        if _libc.capset(header, before) < 0:
            raise OSError(ctypes.get_errno(), "capabilities cannot be restored")
