"""The layers of a session as a tar archive, in the form that container images use for their layers.

A deleted path is an empty file `.wh.NAME`, and a directory that hides
everything below it contains an empty file `.wh..wh..opq`: overlayfs itself
uses device files and attributes, which only root could unpack. Owners are the
ids inside the sandbox. The archive is written to a file without a name while
the session is frozen, and sent from there, so a slow client delays nobody.
"""

from __future__ import annotations

import gzip
import os
import stat
import tarfile
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from stockade.errors import SetupError
from stockade.linux import dirwalk
from stockade.server.isolated.with_ids import TooLargeError
from stockade.workspace.diff.layer_walk import OPAQUE, is_whiteout

if TYPE_CHECKING:
    from stockade.linux.id_maps import IdMaps, IdRow

WHITEOUT, OPAQUE_MARK = ".wh.", ".wh..wh..opq"
#: What a header and its padding take.
HEADER = 512
#: The owner that an unknown id is shown as: nobody.
NOBODY = 65534


class LayerArchive:
    """Writes the directories of layers into one archive."""

    def __init__(self, file: IO[bytes], ids: IdMaps | None, most: int, size: int = 0) -> None:
        """Go on with an archive of `size` bytes before compression; it may have `most`, 0 for no limit.

        `ids` are the sandbox's; None for a process that sees owners as they are inside.
        """
        self._file = file
        self._gzip = gzip.GzipFile(fileobj=file, mode="wb", compresslevel=1, mtime=0)
        self._tar = tarfile.TarFile(fileobj=self._gzip, mode="w", format=tarfile.PAX_FORMAT)
        self._ids, self._most, self._size = ids, most, size
        #: The first name of a file that has several, by its inode.
        self._names: dict[tuple[int, int], str] = {}

    def close(self) -> int:
        """Write everything that waits, and return the size so far. `end_archive` ends the file."""
        self._gzip.close()
        self._file.flush()
        return self._size

    def add_layer(self, upper: int, prefix: str) -> None:
        """Add everything of a layer, with names that begin with the prefix."""
        pending = [""]
        while pending:
            path = pending.pop()
            with dirwalk.listed(upper, path, own=True) as directory:
                inner = [
                    name for name in sorted(os.listdir(directory)) if self._add(directory, path, name, prefix)
                ]
            pending += [f"{path}/{name}" if path else name for name in reversed(inner)]

    def _add(self, directory: int, path: str, name: str, prefix: str) -> bool:
        """Add one entry of a directory; return whether it is a directory to walk."""
        info = os.stat(name, dir_fd=directory, follow_symlinks=False)
        if name.startswith(WHITEOUT):
            raise SetupError(
                f"{path}/{name}: an archive cannot hold a name that begins with {WHITEOUT}",
                stage="diff",
                hint="ask for the diff with ?format=json",
            )
        base = "/".join(filter(None, (prefix, path)))
        full = f"{base}/{name}" if base else name
        if is_whiteout(info):
            self._add_empty(f"{base}/{WHITEOUT}{name}" if base else f"{WHITEOUT}{name}", info)
            return False
        entry = self._entry(full, info)
        if stat.S_ISREG(info.st_mode):
            self._add_file(directory, name, entry, info)
        elif stat.S_ISDIR(info.st_mode):
            entry.type = tarfile.DIRTYPE
            self._write(entry)
            if _is_opaque(directory, name):
                self._add_empty(f"{full}/{OPAQUE_MARK}", info)
            return True
        elif stat.S_ISLNK(info.st_mode):
            entry.type, entry.linkname = tarfile.SYMTYPE, os.readlink(name, dir_fd=directory)
            self._write(entry)
        elif stat.S_ISFIFO(info.st_mode):
            entry.type = tarfile.FIFOTYPE
            self._write(entry)
        return False  # a socket means nothing without its process

    def _add_file(self, directory: int, name: str, entry: tarfile.TarInfo, info: os.stat_result) -> None:
        key = (info.st_dev, info.st_ino)
        if info.st_nlink > 1 and key in self._names:
            entry.type, entry.linkname = tarfile.LNKTYPE, self._names[key]
            self._write(entry)
            return
        self._names[key] = entry.name
        with (
            dirwalk.content(directory, name, own=True) as descriptor,
            os.fdopen(os.dup(descriptor), "rb") as file,
        ):
            entry.size = os.fstat(descriptor).st_size
            self._write(entry, file)

    def _add_empty(self, name: str, info: os.stat_result) -> None:
        entry = self._entry(name, info)
        entry.mode = 0o600
        self._write(entry)

    def _entry(self, name: str, info: os.stat_result) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(name)
        entry.mode, entry.mtime = stat.S_IMODE(info.st_mode), info.st_mtime
        entry.uid, entry.gid = info.st_uid, info.st_gid
        if self._ids is not None:
            entry.uid = _inside(self._ids.uids, info.st_uid)
            entry.gid = _inside(self._ids.gids, info.st_gid)
        return entry

    def _write(self, entry: tarfile.TarInfo, file: IO[bytes] | None = None) -> None:
        self._size += HEADER + entry.size
        if self._most and self._size > self._most:
            raise TooLargeError(f"the changes take more than the {self._most} bytes that the server sends")
        self._tar.addfile(entry, file)


def _is_opaque(directory: int, name: str) -> bool:
    try:
        found = os.getxattr(f"/proc/self/fd/{directory}/{name}", OPAQUE, follow_symlinks=False)
    except OSError:
        return False
    return found == b"y"


def _inside(rows: tuple[IdRow, ...], id: int) -> int:
    """Return what an id of the host is inside the sandbox."""
    for inside, outside, count in rows:
        if outside <= id < outside + count:
            return inside + id - outside
    return NOBODY


def end_archive(file: IO[bytes]) -> None:
    """Write the end of an archive: two empty blocks. Gzip files that follow each other are one file."""
    with gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as end:
        end.write(bytes(2 * tarfile.BLOCKSIZE))
    file.flush()


def file_pieces(file: IO[bytes], size: int = 1 << 18) -> Iterator[bytes]:
    """Yield the content of a file from its beginning, and close it."""
    with file:
        file.seek(0)
        while piece := file.read(size):
            yield piece
