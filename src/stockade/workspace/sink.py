"""New content for a file, which takes the old one's place at once or not at all.

It is written to a file without a name, where the file system has such, so
that nobody inside meets it half done and nothing is left of it if the
supervisor is killed. A file that cannot be replaced, because it is mounted or
its directory is closed, is written in place, as the program would have to.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from stockade.workspace.beneath import STRAIGHT, held, look, node, opened, rename

#: How the names of what is not done yet begin.
UNFINISHED = ".stockade-"
#: What a file that is overwritten hands on: never the bits that lend its owner's rights.
KEPT_MODE = 0o777

_NAMELESS = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
_NAMED = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)


def unfinished() -> str:
    """A name that nobody else has."""
    return f"{UNFINISHED}{os.urandom(8).hex()}"


class Sink:
    """A file to be written. It takes over the descriptor of the directory."""

    def __init__(self, directory: int, name: str, mode: int | None = None) -> None:
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
                return
            if not stat.S_ISREG(before.mode):
                wrong = errno.EISDIR if stat.S_ISDIR(before.mode) else errno.ENXIO
                raise OSError(wrong, os.strerror(wrong))
            self._mode = stat.S_IMODE(before.mode) & KEPT_MODE if mode is None else mode
            self._replaces = not before.mounted and self._creates()
            if not self._replaces:
                self._mode = mode
                self._in_place()
        except BaseException:
            self.close()
            raise

    def _create(self) -> None:
        # A mode that is not asked for is what the umask leaves, as for any program.
        mode = 0o666 if self._mode is None else 0o600
        try:
            self._fd = os.open(".", _NAMELESS, mode, dir_fd=self._directory)
        except OSError as error:
            if error.errno not in _NO_NAMELESS:
                raise
            name = unfinished()
            self._fd = os.open(name, _NAMED, mode, dir_fd=self._directory)
            self._temporary = name

    def _creates(self) -> bool:
        try:
            self._create()
            return True
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            return False

    def _in_place(self) -> None:
        with held(node(self._directory, self._name, STRAIGHT, follow=False)) as found:
            self._fd = opened(found, os.O_RDWR)

    def write(self, data: bytes | memoryview) -> None:
        """Add to the new content."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]

    def finish(self, *, sync: bool = False) -> None:
        """Put the new content in the old one's place."""
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
                self._temporary = unfinished()
                self._link(self._temporary)
        rename(self._directory, self._temporary, self._directory, self._name, overwrite=True)
        self._temporary = ""

    def _link(self, name: str) -> None:
        os.link(f"/proc/self/fd/{self._fd}", name, dst_dir_fd=self._directory, follow_symlinks=True)

    def close(self) -> None:
        """Let go; what is not finished is gone."""
        if self._temporary:
            # Whoever is inside may have been faster.
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._directory)
            self._temporary = ""
        for descriptor in (self._fd, self._directory):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd = self._directory = -1
