"""Atomic writes: new content replaces a file's old content at once or not at all.

The content goes to an unnamed file where the file system supports that, so no
program inside sees a half-written file and a killed supervisor leaves nothing
behind. A file that cannot be replaced, because it is a mount point or its
directory is read-only, is written in place, as the program would have to.

Replacing a file needs rights to its directory only. So a file that the program
could not write is opened in place too, which the kernel refuses with its
reason, unless the caller asks to replace it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import NamedTuple

from stockade.linux.openat2 import STRAIGHT, held, look, node, opened, rename

#: The prefix of the names of unfinished files.
UNFINISHED = ".stockade-"
#: The mode bits that an overwritten file passes on: never set-uid or set-gid.
KEPT_MODE = 0o777

_NAMELESS = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
_NAMED = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def temporary_name() -> str:
    """Return a random name for an unfinished file."""
    return f"{UNFINISHED}{os.urandom(8).hex()}"


def _may_write(directory: int, name: str) -> bool:
    """Return whether a file's permission bits and owner let this thread write it."""
    # Opening it to find out would copy it into the overlay.
    return os.access(name, os.W_OK, dir_fd=directory, effective_ids=True, follow_symlinks=False)


class UnfinishedFile(NamedTuple):
    """What another process of the same user needs, besides the open file, to finish a `Sink`."""

    temporary: str
    mode: int | None
    replaces: bool


class Sink:
    """A file to write. It owns the descriptor of the directory from now on.

    The new file belongs to `owner`, a uid and a gid, or with `same_owner` to the owner of the old one.
    """

    def __init__(
        self,
        directory: int,
        name: str,
        mode: int | None = None,
        *,
        replace: bool = False,
        owner: tuple[int, int] = (-1, -1),
        same_owner: bool = False,
    ) -> None:
        self._directory = directory
        self._name = name
        self._temporary = ""
        self._fd = -1
        try:
            before = look(directory, name)
            if before is None:
                self._mode = mode
                self._create()
                self._replaces = True
                self._give_to(owner)
                return
            if not stat.S_ISREG(before.mode):
                wrong = errno.EISDIR if stat.S_ISDIR(before.mode) else errno.ENXIO
                raise OSError(wrong, os.strerror(wrong))
            self._mode = stat.S_IMODE(before.mode) & KEPT_MODE if mode is None else mode
            replaceable = not before.mounted and (replace or _may_write(directory, name))
            self._replaces = replaceable and self._try_create()
            if self._replaces and same_owner and (before.uid, before.gid) != (os.geteuid(), os.getegid()):
                try:
                    os.fchown(self._fd, before.uid, before.gid)
                except PermissionError:
                    self._discard()
                    self._replaces = False
            if not self._replaces:
                self._mode = mode
                self._open_in_place()
            self._give_to(owner)
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        # Without a requested mode the umask decides, as for any program.
        mode = 0o666 if self._mode is None else 0o600
        try:
            self._fd = os.open(".", _NAMELESS, mode, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
            name = temporary_name()
            self._fd = os.open(name, _NAMED, mode, dir_fd=self._directory)
            self._temporary = name

    def _give_to(self, owner: tuple[int, int]) -> None:
        if owner != (-1, -1):
            os.fchown(self._fd, *owner)

    def _try_create(self) -> bool:
        try:
            self._create()
            return True
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            return False

    @classmethod
    def resume(cls, directory: int, name: str, file: int, unfinished: UnfinishedFile) -> Sink:
        """Go on with a sink that another process has begun; it owns both descriptors from now on."""
        sink = cls.__new__(cls)
        sink._directory, sink._name, sink._fd = directory, name, file
        sink._temporary, sink._mode, sink._replaces = unfinished
        return sink

    @property
    def is_named(self) -> bool:
        """Whether the new file has a temporary name, for lack of files without one."""
        return bool(self._temporary)

    def suspend(self) -> tuple[int, UnfinishedFile]:
        """Return the open file, which the caller now owns, and what `resume` needs besides it."""
        file, unfinished = self._fd, UnfinishedFile(self._temporary, self._mode, self._replaces)
        self._fd, self._temporary = -1, ""
        return file, unfinished

    def _open_in_place(self) -> None:
        with held(node(self._directory, self._name, STRAIGHT, follow=False)) as found:
            self._fd = opened(found, os.O_RDWR)

    def write(self, data: bytes | memoryview) -> None:
        """Add to the new content."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self, *, sync: bool = False) -> None:
        """Replace the old content by the new."""
        if self._mode is not None:
            os.fchmod(self._fd, self._mode)
        if not self._replaces:
            os.ftruncate(self._fd, os.lseek(self._fd, 0, os.SEEK_CUR))
        if sync:
            os.fsync(self._fd)
        if self._replaces:
            self._publish()
        if sync:
            with held(
                os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self._directory)
            ) as here:
                os.fsync(here)

    def _publish(self) -> None:
        if not self._temporary:
            try:
                self._link(self._name)
                return
            except FileExistsError:
                self._temporary = temporary_name()
                self._link(self._temporary)
        rename(self._directory, self._temporary, self._directory, self._name, overwrite=True)
        self._temporary = ""

    def _link(self, name: str) -> None:
        os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=self._directory, follow_symlinks=True)

    def close(self) -> None:
        """Close the descriptors and discard an unfinished file."""
        self._discard()
        if self._directory >= 0:
            os.close(self._directory)
        self._directory = -1

    def _discard(self) -> None:
        if self._temporary:
            # The program may have removed it already.
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._directory)
            self._temporary = ""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
