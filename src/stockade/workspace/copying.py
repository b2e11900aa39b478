"""Copies of a layer's tree: everything in it, as it is, for what changed and not for what exists.

The program inside made the tree, and may have been stopped in the middle of
anything. So it is read by descriptors, one name at a time: no link is
followed, no pipe opened, no name trusted twice. The copy lies in Stockade's
own state and shares blocks with the original where the file system can.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import stat
from collections.abc import Iterator

from stockade.errors import SetupError
from stockade.workspace import descend
from stockade.workspace.journal import identity
from stockade.workspace.walk import PIECE, is_whiteout

FICLONE = 0x40049409
RENAME_EXCHANGE = 2
#: Each directory is reached from the top, so it costs as much as it is deep.
DEEPEST = 1000
#: What the kernel's overlay needs, what programs write, and who may do what.
KEPT = ("user.", "system.posix_acl_")
#: Where a file cannot be copied by the kernel alone.
_BY_HAND = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


#: Paths, each with why there is no copy of it or of what is in it.
LeftOut = list[tuple[str, str]]


def tree(source: int, place: int, name: str, left_out: LeftOut | None = None) -> None:
    """Copy the directory `source` with everything in it to a new `name` in the directory `place`.

    What cannot be copied is an error, or if there is a list for it, left out and added to that.
    """
    os.mkdir(name, 0o700, dir_fd=place)
    with descend.reached(place, name) as target:
        _Copy(source, target, left_out).all()


class _Copy:
    """One copy of a tree. Directories are open to their owner until everything is in them."""

    def __init__(self, source: int, target: int, left_out: LeftOut | None) -> None:
        self._source = source
        self._target = target
        self._left_out = left_out
        #: By number, where the first name of a file with several was put.
        self._names: dict[int, str] = {}

    def all(self) -> None:
        made = [("", os.fstat(self._source))]
        for path, _ in made:  # which grows meanwhile
            with (
                self._or_left_out(path),
                descend.listed(self._source, path, own=True) as above,
                descend.reached(self._target, path) as to,
            ):
                attributes(above, f"/proc/self/fd/{to}")
                for name in os.listdir(above):
                    self._named(path, name, above, to, made)
        for path, info in reversed(made):
            with self._or_left_out(path), descend.reached(self._target, path) as to:
                settle(f"/proc/self/fd/{to}", info)

    def _named(
        self, path: str, name: str, above: int, to: int, made: list[tuple[str, os.stat_result]]
    ) -> None:
        below = f"{path}/{name}" if path else name
        with self._or_left_out(below):
            info = descend.look(above, name)
            if info is None:
                raise _moved(path, name)
            if not stat.S_ISDIR(info.st_mode):
                self._entry(below, info, above, to)
                return
            if below.count("/") >= DEEPEST:
                raise SetupError(
                    f"{below[:80]}... has directories too deep in one another to be copied",
                    stage="workspace",
                    hint="remove them in a run",
                )
            os.mkdir(name, 0o700, dir_fd=to)
            made.append((below, info))

    @contextlib.contextmanager
    def _or_left_out(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SetupError) as error:
            if self._left_out is None:
                raise
            words = error.message if isinstance(error, SetupError) else error.strerror or str(error)
            self._left_out.append((path or ".", words))

    def _entry(self, path: str, info: os.stat_result, above: int, to: int) -> None:
        name = descend.split(path)[1]
        has_names = info.st_nlink > 1 and not is_whiteout(info)
        if has_names and info.st_ino in self._names:
            parent, first = descend.split(self._names[info.st_ino])
            with descend.reached(self._target, parent) as at:
                os.link(first, name, src_dir_fd=at, dst_dir_fd=to, follow_symlinks=False)
            return
        try:
            entry(path, info, above, to)
        except BaseException:
            descend.remove(to, name)  # half of it is nothing
            raise
        if has_names:
            self._names[info.st_ino] = path


def entry(path: str, info: os.stat_result, above: int, to: int) -> None:
    """Copy one thing that is no directory, from a directory to another under the same name."""
    name = descend.split(path)[1]
    if stat.S_ISREG(info.st_mode):
        _file(path, info, above, to)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=above), name, dir_fd=to)
        if os.geteuid() == 0:
            os.chown(name, info.st_uid, info.st_gid, dir_fd=to, follow_symlinks=False)
        os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=to, follow_symlinks=False)
    elif is_whiteout(info) or stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
        # The kernel lets everybody make the device 0:0, which stands for a deleted name.
        os.mknod(name, stat.S_IFMT(info.st_mode) | 0o600, 0, dir_fd=to)
        settle(name, info, to)
    else:
        raise SetupError(
            f"{path} is a device, which no layer of Stockade's has", stage="workspace", hint="discard it"
        )


def _file(path: str, info: os.stat_result, above: int, to: int) -> None:
    name = descend.split(path)[1]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with descend.content(above, name, own=True) as old:
        new = os.open(name, flags, 0o600, dir_fd=to)
        try:
            content(old, new, info.st_size)
            attributes(old, new)
            settle(new, info)
        finally:
            os.close(new)
        if identity(os.fstat(old)) != identity(info):
            raise _moved(*descend.split(path))


def settle(place: int | str, info: os.stat_result, directory: int | None = None) -> None:
    """Give what was copied its owner, mode and times. Nobody else can change what is there meanwhile."""
    if os.geteuid() == 0:
        os.chown(place, info.st_uid, info.st_gid, dir_fd=directory)
    os.chmod(place, stat.S_IMODE(info.st_mode), dir_fd=directory)
    os.utime(place, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=directory)


def attributes(old: int, new: int | str) -> None:
    """Copy what the kernel's overlay, programs and access lists keep beside a file."""
    for name in os.listxattr(old):
        if name.startswith(KEPT):
            os.setxattr(new, name, os.getxattr(old, name))


def content(old: int, new: int, size: int) -> None:
    """Copy the content of a file: by sharing its blocks, or at least by the kernel. Holes stay holes."""
    try:
        fcntl.ioctl(new, FICLONE, old)
        return
    except OSError:
        os.ftruncate(new, size)
    at = 0
    while at < size:
        end = size
        try:
            at = os.lseek(old, at, os.SEEK_DATA)
            end = min(os.lseek(old, at, os.SEEK_HOLE), size)
        except OSError as error:  # a file system that does not know its holes has none
            if error.errno == errno.ENXIO:
                return  # nothing but a hole to the end
        while at < end:
            copied = _piece(old, new, at, end)
            if not copied:
                return
            at += copied


def _piece(old: int, new: int, at: int, end: int) -> int:
    try:
        return os.copy_file_range(old, new, end - at, at, at)
    except OSError as error:
        if error.errno not in _BY_HAND:
            raise
    piece = os.pread(old, min(PIECE, end - at), at)
    written = 0
    while written < len(piece):
        written += os.pwrite(new, piece[written:], at + written)
    return written


def exchange(directory: int, name: str, other_directory: int, other: str) -> None:
    """Let two names change places at one moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (directory, os.fsencode(name), other_directory, os.fsencode(other), RENAME_EXCHANGE)
    if libc.renameat2(*words):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _moved(path: str, name: str) -> SetupError:
    return SetupError(
        f"{path}/{name} changed while it was copied".lstrip("/"),
        stage="workspace",
        hint="end what writes to it",
    )
