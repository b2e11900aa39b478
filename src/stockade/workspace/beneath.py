"""Files beneath a root, by descriptor: what lies there can neither lead out nor make the caller wait.

Whoever is inside chose the names, the links and the kinds of what is looked
up here, and may swap them at any moment. So the kernel itself resolves each
path below the root (openat2), into a descriptor that has no effect on what it
names (O_PATH). Only when its kind is known is it opened, by the descriptor and
without waiting: a pipe, a device or a lease would otherwise hold the caller.
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
#: Below a directory, by real names.
STRAIGHT = BENEATH | NO_MAGICLINKS | NO_SYMLINKS

#: How much of a path one call resolves: PATH_MAX is 4096, a name at most 255.
PIECE = 3800
#: How often a path with `..` is tried again where a rename comes between.
ATTEMPTS = 200
#: How long the holder of a lease is waited for.
PATIENCE = 2.0

# Their files are windows on the kernel that open as far as the reader may look, not the program.
_PROC, _SYSFS = 0x9FA0, 0x62656572

_OPENAT2 = 437
_STATX, _RENAMEAT2 = {"x86_64": (332, 316)}.get(os.uname().machine, (291, 276))
_AT_SYMLINK_NOFOLLOW, _AT_NO_AUTOMOUNT, _AT_EMPTY_PATH = 0x100, 0x800, 0x1000
_STATX_BASIC, _STATX_BTIME, _ATTR_MOUNT_ROOT = 0x7FF, 0x800, 0x2000
_RENAME_NOREPLACE = 1
_CAPABILITIES_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


class Status(NamedTuple):
    """What the kernel says about a file; a link is itself."""

    mode: int
    size: int
    uid: int
    gid: int
    modified: float
    #: None where the file system does not know.
    created: float | None
    #: Something is mounted exactly there, so that it cannot be replaced.
    mounted: bool


def call(number: int, *arguments: object) -> int:
    """A system call that Python has no name for."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return result


def node(
    root: int, path: str, resolve: int = AS_INSIDE, *, directory: bool = False, follow: bool = True
) -> int:
    """An O_PATH descriptor of what `path` names below `root`, for the caller to close."""
    flags = (os.O_DIRECTORY if directory else 0) | (0 if follow else os.O_NOFOLLOW)
    rest, here = os.fsencode(path) or b".", root
    try:
        while len(rest) > PIECE:
            end = rest.rfind(b"/", 1, PIECE)
            if end < 0:
                raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), path)
            below = _resolved(here, rest[:end], os.O_DIRECTORY, resolve)
            if here != root:
                os.close(here)
            # What is left is relative to where we are; a link in it would count from the wrong root.
            here, rest, resolve = below, rest[end:].lstrip(b"/") or b".", resolve & ~IN_ROOT | STRAIGHT
        return _resolved(here, rest, flags, resolve)
    finally:
        if here != root:
            os.close(here)


def _resolved(root: int, path: bytes, flags: int, resolve: int) -> int:
    how = _How(os.O_PATH | os.O_CLOEXEC | flags, 0, resolve)
    for attempt in range(ATTEMPTS):
        try:
            return call(_OPENAT2, root, path, ctypes.byref(how), ctypes.sizeof(how))
        except BlockingIOError:  # something was renamed meanwhile, and the kernel cannot be sure of a `..`
            time.sleep(0.0001 * (attempt > 20))
    raise OSError(errno.EBUSY, "names on the way keep changing")


def status(directory: int, name: str = "") -> Status:
    """What a directory has under the name, or what the descriptor itself is."""
    buffer = ctypes.create_string_buffer(256)
    flags = _AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT | (0 if name else _AT_EMPTY_PATH)
    call(_STATX, directory, os.fsencode(name), flags, _STATX_BASIC | _STATX_BTIME, buffer)
    known, _, attributes, _, uid, gid, mode, _, size = struct.unpack_from("=IIQIIIH10sQ", buffer)
    born, born_part = struct.unpack_from("=qI", buffer, 80)
    changed, changed_part = struct.unpack_from("=qI", buffer, 112)
    created = born + born_part / 1e9 if known & _STATX_BTIME else None
    mounted = bool(attributes & _ATTR_MOUNT_ROOT)
    return Status(mode, size, uid, gid, changed + changed_part / 1e9, created, mounted)


def look(directory: int, name: str) -> Status | None:
    """What a directory has under the name; None if it has nothing."""
    try:
        return status(directory, name)
    except FileNotFoundError:
        return None


def not_mounted(directory: int, name: str) -> None:
    """Refuse what is mounted there: granted for itself, or protected.

    To a process that is not in the sandbox's mount namespace the kernel does not refuse it: what is removed
    or replaced from outside loses its mount (since 3.18). Nobody inside can mount, or rename what is mounted.
    """
    found = look(directory, name)
    if found is not None and found.mounted:
        raise OSError(errno.EBUSY, "it is mounted by the policy itself")


def opened(found: int, flags: int = os.O_RDONLY) -> int:
    """The regular file or directory of an O_PATH descriptor, opened without waiting."""
    mode = os.fstat(found).st_mode
    if not (stat.S_ISDIR(mode) if flags & os.O_DIRECTORY else stat.S_ISREG(mode)):
        wrong = (
            errno.ENOTDIR if flags & os.O_DIRECTORY else errno.EISDIR if stat.S_ISDIR(mode) else errno.ENXIO
        )
        raise OSError(wrong, os.strerror(wrong))
    if is_window(found):
        raise OSError(errno.EPERM, "it is a window on the kernel")
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return os.open(f"/proc/self/fd/{found}", flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except BlockingIOError:
            if time.monotonic() > until:
                raise OSError(errno.EBUSY, "a process holds a lease on it") from None
            time.sleep(0.01)


def is_window(found: int) -> bool:
    """Whether it lies in /proc or the like."""
    buffer = ctypes.create_string_buffer(256)
    if _libc.fstatfs(found, buffer) < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, os.strerror(failed))
    return ctypes.c_long.from_buffer(buffer).value in (_PROC, _SYSFS)


@contextlib.contextmanager
def held(descriptor: int) -> Iterator[int]:
    """A descriptor for as long as the statement lasts."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def listed(root: int, path: str, resolve: int = STRAIGHT) -> Iterator[int]:
    """The directory `path` below `root`, open for reading."""
    with (
        held(node(root, path, resolve, directory=True, follow=False)) as found,
        held(opened(found, os.O_RDONLY | os.O_DIRECTORY)) as directory,
    ):
        yield directory


def rename(source: int, name: str, target: int, new: str, *, overwrite: bool) -> None:
    """Give a file or directory another name, and unless `overwrite` one that is free."""
    if overwrite:
        os.rename(name, new, src_dir_fd=source, dst_dir_fd=target)
    else:
        call(_RENAMEAT2, source, os.fsencode(name), target, os.fsencode(new), _RENAME_NOREPLACE)


@contextlib.contextmanager
def unprivileged() -> Iterator[None]:
    """Let this thread act without its capabilities, as the program must.

    Root would else open on the program's behalf, through a link, what the program may not.
    """
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    before = (ctypes.c_uint32 * 6)()
    if _libc.capget(header, before) < 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be looked at")
    if not (before[0] or before[3]):
        yield
        return
    none = (ctypes.c_uint32 * 6)(*before)
    none[0] = none[3] = 0
    if _libc.capset(header, none) < 0:
        raise OSError(ctypes.get_errno(), "capabilities cannot be laid down")
    try:
        yield
    finally:
        if _libc.capset(header, before) < 0:
            raise OSError(ctypes.get_errno(), "capabilities cannot be taken up again")
