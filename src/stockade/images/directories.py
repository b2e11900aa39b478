"""Copy a directory of the host into the root of an image, by descriptor and through no link.

Another process may write there meanwhile. File systems that are mounted in it are left out, and so is
Stockade's own state.
"""

from __future__ import annotations

import errno
import os
import stat

from stockade.images.tree_writer import ImageError, TreeWriter
from stockade.linux import openat2

_PIECE = 1 << 20
#: The kernel's errors when it cannot copy from one file to another by itself.
_BY_HAND = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)


class DirectoryCopy:
    """One copy of a directory."""

    def __init__(self, writer: TreeWriter, without: tuple[int, int]) -> None:
        """`without` is the device and the inode of a directory that is left out."""
        self._writer, self._without = writer, without
        #: The first name of each file that has several.
        self._names: dict[tuple[int, int], str] = {}

    def copy(self, path: str) -> None:
        """Copy everything in a directory of the host."""
        try:
            with openat2.held(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as root:
                found = os.fstat(root)
                self._writer.directory("", found.st_mode)
                waiting = [""]
                while waiting:
                    waiting += self._one(root, waiting.pop(), found.st_dev)
        except OSError as error:
            if isinstance(error, ImageError):
                raise
            name = f" ({error.filename!r})" if error.filename else ""
            raise ImageError(f"cannot read {path}: {error.strerror}{name}") from None

    def _one(self, root: int, path: str, device: int) -> list[str]:
        """Copy one directory, and return those in it."""
        below = []
        with openat2.listed(root, path) as directory, os.scandir(directory) as entries:
            for entry in entries:
                name = f"{path}/{entry.name}" if path else entry.name
                with openat2.held(openat2.node(directory, entry.name, follow=False)) as node:
                    found = os.fstat(node)
                    if stat.S_ISDIR(found.st_mode):
                        if (found.st_dev, found.st_ino) == self._without:
                            self._writer.skip()
                            continue
                        self._writer.directory(name, found.st_mode, found.st_uid, found.st_gid)
                        if found.st_dev == device:
                            below.append(name)
                    elif stat.S_ISLNK(found.st_mode):
                        target = os.readlink(entry.name, dir_fd=directory)
                        self._writer.link(name, target, found.st_uid, found.st_gid)
                    elif stat.S_ISREG(found.st_mode):
                        self._file(node, name, found)
                    else:
                        self._writer.skip()
        return below

    def _file(self, node: int, name: str, found: os.stat_result) -> None:
        key = (found.st_dev, found.st_ino)
        if found.st_nlink > 1:
            first = self._names.setdefault(key, name)
            if first != name:
                self._writer.same_file(name, first)
                return
        with openat2.held(openat2.opened(node)) as source:
            self._writer.file(
                name,
                found.st_mode,
                found.st_uid,
                found.st_gid,
                found.st_mtime,
                lambda made: self._content(source, made),
            )

    def _content(self, source: int, made: int) -> None:
        """Copy the content in the kernel, which shares blocks where the file system can."""
        try:
            while size := os.copy_file_range(source, made, _PIECE * 64):
                self._writer.wrote(size)
            if os.lseek(made, 0, os.SEEK_CUR):
                return
        except OSError as error:
            if error.errno not in _BY_HAND:
                raise
        while data := os.read(source, _PIECE):
            self._writer.wrote(len(data))
            view = memoryview(data)
            while view:
                view = view[os.write(made, view) :]
