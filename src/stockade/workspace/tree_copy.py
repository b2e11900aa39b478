"""Copy a layer's tree exactly: the cost depends on what changed, not on the size of the host's tree.

The program made the tree, and may have been stopped in the middle of
anything. So we read it by descriptors, one name at a time: we follow no link,
open no pipe, and trust no name twice. The copy lies in Stockade's own state
and shares blocks with the original where the file system can.
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
from stockade.linux import dirwalk
from stockade.workspace.diff.layer_walk import PIECE, FileStat, is_whiteout
from stockade.workspace.journal import identity

FICLONE = 0x40049409
RENAME_EXCHANGE = 2
#: Each directory is opened from the top, so its cost is its depth.
DEEPEST = 1000
#: Attributes of overlayfs and of programs, and access lists.
KEPT = ("user.", "system.posix_acl_")
#: Why a file is not copied whose attributes are larger than the file system allows.
DO_NOT_FIT = "its attributes do not fit on the file system of Stockade's state"
#: The kernel's errors when there is no room.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
#: The kernel's errors when it cannot copy a file by itself.
_BY_HAND = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


#: How many paths without a copy are named, and their total length.
NAMED, NAMED_LENGTH = 1000, 1 << 20
#: How much memory the names of directories that wait to be copied may take in all.
ROOM = 16 << 20
#: The share of that for every directory, however deep.
LEAST = 4096
#: How many nested directories are open at once.
OPEN = 8


class OmittedPaths:
    """Paths that were not fully copied, each with the reason. Beyond a limit, they are only counted."""

    def __init__(self) -> None:
        self._named: list[tuple[str, str]] = []
        self._more = 0
        self._room = NAMED_LENGTH
        #: The kernel's errors about them.
        self.numbers: set[int] = set()

    def add(self, path: str, why: str, number: int = 0) -> None:
        self.numbers.add(number)
        self._room -= len(path)
        if self._room < 0 or len(self._named) == NAMED:
            self._more += 1
        else:
            self._named.append((path, why))

    def report(self) -> list[tuple[str, str]]:
        """Return the paths and reasons to report."""
        more = [(".", f"and {self._more} more paths, for the like reasons")] if self._more else []
        return self._named + more


def tree(source: int, place: int, name: str, left_out: OmittedPaths | None = None) -> None:
    """Copy the directory `source` with everything in it to a new `name` in the directory `place`.

    A file that cannot be copied is an error, or with `left_out`, is omitted and added to that.
    """
    os.mkdir(name, 0o700, dir_fd=place)
    with dirwalk.reached(place, name) as target:
        copy = _LayerCopy(source, target, left_out)
        try:
            copy.all()
        finally:
            copy.close()


class _Level:
    """A directory that is being copied, and the directories in it that are waiting."""

    def __init__(self, path: str, info: os.stat_result) -> None:
        self.path = path
        self.info = info
        self.below: list[str] = []
        #: Whether there are more directories than `below` had room for: those after the name `last`.
        self.more = False
        self.last = ""
        self.size = 0
        #: The directory and its copy, while they are open.
        self.nodes: tuple[int, int] | None = None

    def close(self) -> None:
        for node in self.nodes or ():
            os.close(node)
        self.nodes = None


class _LayerCopy:
    """One copy of a tree. Directories are writable to their owner until everything is in them."""

    def __init__(self, source: int, target: int, left_out: OmittedPaths | None) -> None:
        self._source = source
        self._target = target
        self._left_out = left_out
        self._room = ROOM
        #: A directory with a link to the copy of each file that has several names, by inode number: on the
        #: disk, since a program can make more such files than fit into memory. It is removed at the end.
        self._names = f"{dirwalk.REMOVED}{os.urandom(6).hex()}"
        self._has_names = False
        self._levels: list[_Level] = []

    def all(self) -> None:
        levels = self._levels = [_Level("", os.fstat(self._source))]
        self._read_directory(levels[0], files=True)
        while levels:
            here = levels[-1]
            if not here.below and here.more:
                self._read_directory(here, files=False)
            if not here.below:
                self._room += here.size
                levels.pop()
                if not levels:
                    self._forget_names()  # before the directory gets its times
                with self._omit_on_error(here.path), contextlib.closing(here):
                    settle(f"/proc/self/fd/{self._nodes(here)[1]}", here.info)
            elif (below := self._make_directory(here, here.below.pop())) is not None:
                levels.append(below)
                for far in levels[-OPEN - 1 : -OPEN]:
                    far.close()
                self._read_directory(below, files=True)

    def close(self) -> None:
        """Close the descriptors and remove the temporary links."""
        for level in self._levels:
            level.close()
        self._forget_names()

    def _nodes(self, level: _Level) -> tuple[int, int]:
        """Return the descriptors of a directory and of its copy."""
        if level.nodes is None:
            level.nodes = _open_pair(self._source, self._target, level.path)
        return level.nodes

    def _forget_names(self) -> None:
        """Remove the temporary links."""
        if self._has_names:
            dirwalk.remove(self._target, self._names)
            self._has_names = False

    def _read_directory(self, level: _Level, *, files: bool) -> None:
        """Copy the files of a directory and collect the names of directories that there is room for."""
        self._room += level.size
        most = max(LEAST, self._room // 2)
        names: list[str] = []
        level.size, level.more = 0, False
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._omit_on_error(level.path))
            source, to = self._nodes(level)
            above = stack.enter_context(dirwalk.listed(source, "", own=True))
            if files:
                attributes(above, f"/proc/self/fd/{to}")
            with os.scandir(above) as entries:
                for one in entries:
                    if not one.is_dir(follow_symlinks=False):
                        if files:
                            self._copy_file(level.path, one.name, above, to)
                    elif one.name > level.last:
                        names.append(one.name)
                        level.size += _weight(one.name)
                        if level.size > 2 * most:
                            self._drop_excess(level, names, most)
        self._drop_excess(level, names, most)
        level.last = names[0] if names else level.last
        level.below = names
        self._room -= level.size

    def _drop_excess(self, level: _Level, names: list[str], most: int) -> None:
        """Sort names in reverse, and drop those that there is no room for."""
        names.sort(reverse=True)
        dropped = 0
        while level.size > most and dropped < len(names) - 1:
            level.size -= _weight(names[dropped])
            dropped += 1
            level.more = True
        del names[:dropped]

    def _copy_file(self, path: str, name: str, above: int, to: int) -> None:
        below = f"{path}/{name}" if path else name
        with self._omit_on_error(below):
            self._copy_once(below, _stat_or_raise(path, name, above), above, to)

    def _make_directory(self, parent: _Level, name: str) -> _Level | None:
        """Create a directory in the copy; return None if that fails."""
        path = parent.path
        below = f"{path}/{name}" if path else name
        with self._omit_on_error(below):
            above, to = self._nodes(parent)
            if below.count("/") >= DEEPEST:
                raise SetupError(
                    f"{below[:80]}... is nested too deeply to be copied",
                    stage="workspace",
                    hint="remove it in a run",
                )
            with dirwalk.listed(above, "", own=True) as opened:
                level = _Level(below, _stat_or_raise(path, name, opened))
                os.mkdir(name, 0o700, dir_fd=to)
                level.nodes = _open_pair(opened, to, name)
            return level
        return None

    @contextlib.contextmanager
    def _omit_on_error(self, path: str) -> Iterator[None]:
        try:
            yield
        except (OSError, SetupError) as error:
            if self._left_out is None:
                raise
            words = error.message if isinstance(error, SetupError) else error.strerror or str(error)
            self._left_out.add(path or ".", words, error.errno or 0)

    def _copy_once(self, path: str, info: os.stat_result, above: int, to: int) -> None:
        name = dirwalk.split(path)[1]
        has_names = info.st_nlink > 1 and not is_whiteout(info)
        if has_names and self._has_names and self._link_copy(info, name, to):
            return
        try:
            copy_entry(path, info, above, to)
        except BaseException:
            dirwalk.remove(to, name)  # no partial copies
            raise
        if has_names:
            self._keep_link(info, name, to)

    def _link_copy(self, info: os.stat_result, name: str, to: int) -> bool:
        """Hard-link an existing copy of the file; return False if there is none."""
        with dirwalk.reached(self._target, self._names) as names:
            try:
                os.link(f"{info.st_ino}", name, src_dir_fd=names, dst_dir_fd=to, follow_symlinks=False)
            except FileNotFoundError:
                return False
            except OSError as error:
                if error.errno != errno.EMLINK:  # this file system allows fewer links: make another copy
                    raise
                os.unlink(f"{info.st_ino}", dir_fd=names)
                return False
        return True

    def _keep_link(self, info: os.stat_result, name: str, to: int) -> None:
        if not self._has_names:
            os.mkdir(self._names, 0o700, dir_fd=self._target)
            self._has_names = True
        with dirwalk.reached(self._target, self._names) as names:
            os.link(name, f"{info.st_ino}", src_dir_fd=to, dst_dir_fd=names, follow_symlinks=False)


def _open_pair(source: int, target: int, path: str) -> tuple[int, int]:
    """Open the same path below two directories."""
    above = dirwalk.down(source, path, own=True)
    try:
        return above, dirwalk.down(target, path)
    except BaseException:
        os.close(above)
        raise


def _weight(name: str) -> int:
    """Return roughly how many bytes a name takes in memory."""
    return 64 + len(name)


def _stat_or_raise(path: str, name: str, directory: int) -> os.stat_result:
    info = dirwalk.look(directory, name)
    if info is None:
        raise _changed_error(path, name)
    return info


def copy_entry(path: str, info: os.stat_result | FileStat, above: int, to: int) -> None:
    """Copy anything but a directory from one directory to another, under the same name."""
    name = dirwalk.split(path)[1]
    if stat.S_ISREG(info.st_mode):
        _copy_regular(path, info, above, to)
    elif stat.S_ISLNK(info.st_mode):
        os.symlink(os.readlink(name, dir_fd=above), name, dir_fd=to)
        if os.geteuid() == 0:
            os.chown(name, info.st_uid, info.st_gid, dir_fd=to, follow_symlinks=False)
        os.utime(name, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=to, follow_symlinks=False)
    elif is_whiteout(info) or stat.S_ISFIFO(info.st_mode) or stat.S_ISSOCK(info.st_mode):
        # The kernel lets every user make the device 0:0, a whiteout.
        os.mknod(name, stat.S_IFMT(info.st_mode) | 0o600, 0, dir_fd=to)
        settle(name, info, to)
    else:
        raise SetupError(
            f"{path} is a device, which Stockade never puts in a layer", stage="workspace", hint="discard it"
        )


def _copy_regular(path: str, info: os.stat_result | FileStat, above: int, to: int) -> None:
    name = dirwalk.split(path)[1]
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with dirwalk.content(above, name, own=True) as old:
        new = os.open(name, flags, 0o600, dir_fd=to)
        try:
            content(old, new, info.st_size)
            attributes(old, new)
            settle(new, info)
        finally:
            os.close(new)
        if identity(os.fstat(old)) != identity(info):
            raise _changed_error(*dirwalk.split(path))


def settle(place: int | str, info: os.stat_result | FileStat, directory: int | None = None) -> None:
    """Set the owner, mode and times of a copy. No one else can replace it meanwhile."""
    if os.geteuid() == 0:
        os.chown(place, info.st_uid, info.st_gid, dir_fd=directory)
    os.chmod(place, stat.S_IMODE(info.st_mode), dir_fd=directory)
    os.utime(place, ns=(info.st_atime_ns, info.st_mtime_ns), dir_fd=directory)


def attributes(old: int, new: int | str) -> None:
    """Copy the extended attributes of overlayfs and of programs, and access lists."""
    for name in os.listxattr(old):
        if not name.startswith(KEPT):
            continue
        try:
            os.setxattr(new, name, os.getxattr(old, name))
        except OSError as error:
            # ext4 reports a full disk when the attributes of a file take more than a block.
            if error.errno == errno.ENOSPC and os.statvfs(new).f_bavail:
                raise OSError(errno.E2BIG, DO_NOT_FIT) from error
            raise


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
        except OSError as error:  # a file system without support for holes reports none
            if error.errno == errno.ENXIO:
                return  # a hole up to the end
        while at < end:
            copied = _copy_piece(old, new, at, end)
            if not copied:
                return
            at += copied


def _copy_piece(old: int, new: int, at: int, end: int) -> int:
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
    """Exchange two names atomically."""
    libc = ctypes.CDLL(None, use_errno=True)
    words = (directory, os.fsencode(name), other_directory, os.fsencode(other), RENAME_EXCHANGE)
    if libc.renameat2(*words):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)


def _changed_error(path: str, name: str) -> SetupError:
    return SetupError(
        f"{path}/{name} changed while it was copied".lstrip("/"),
        stage="workspace",
        hint="stop the process that writes to it",
    )
