"""Read the entries of an untrusted tar archive into the root of an image.

Python's tarfile decodes the headers. It is given a file that hands out no more than a header may need at a
time, so that a header that claims to be gigabytes long takes no memory, and it forgets every entry that has
been read. A compressed archive is unpacked into a file first, up to what the limits allow.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import os
import stat
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from typing import IO, Any

from stockade.images.tree_writer import ImageError, TreeWriter

#: How much tarfile may read at once: content is copied in pieces, and no header is as long.
MOST_AT_ONCE = 1 << 20
#: How much it may read for one entry besides its content: a map of holes, names, attributes.
MOST_OF_HEADER = 4 << 20
_MAGIC: dict[bytes, Any] = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
_BROKEN = (
    *(tarfile.TarError, EOFError, lzma.LZMAError, zlib.error, ValueError, OverflowError),
    *(RecursionError, LookupError),  # from headers that contain headers, and from damaged ones
)


class _BoundedFile:
    """A file that refuses to hand out much at once, or to one header."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        #: How much may be read until `next_header` is called again.
        self._left = 0

    def next_header(self) -> None:
        """Say that what is read from now on is a header."""
        self._left = MOST_OF_HEADER

    def content(self, size: int) -> None:
        """Say that this much content is read next, besides what tarfile reads for itself."""
        self._left += size

    def read(self, size: int = -1) -> bytes:
        self._left -= max(size, 0)
        if not 0 <= size <= MOST_AT_ONCE or self._left < 0:
            raise ImageError("the archive has a header of an impossible size")
        return self._file.read(size)

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(place, whence)

    def tell(self) -> int:
        return self._file.tell()


def extract(path: str, writer: TreeWriter, place: str, *, most_bytes: int, most_entries: int) -> None:
    """Write the entries of an archive; `place` is a directory for what is unpacked meanwhile."""
    try:
        with _plain(path, place, most_bytes + 2048 * most_entries) as file:
            bounded: Any = _BoundedFile(file)  # tarfile needs only three functions of a file
            bounded.next_header()
            with tarfile.TarFile(fileobj=bounded, errorlevel=2) as archive:
                while (entry := archive.next()) is not None:
                    archive.members.clear()  # type: ignore[attr-defined]
                    bounded.content(max(entry.size, 0))
                    _write(archive, entry, writer)
                    bounded.next_header()
    except _BROKEN as error:
        raise ImageError(
            f"{path} is not a tar archive, or is damaged: {error}", hint="tar -tf shows what is in it"
        ) from None
    if not writer.entries:
        raise ImageError(f"{path} is empty")


@contextlib.contextmanager
def _plain(path: str, place: str, most: int) -> Iterator[IO[bytes]]:
    """Open an archive, unpacked if it is compressed."""
    # Not blocking: it could be a pipe by now.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ImageError(f"{path} is neither a directory nor a file")
        begins = file.read(8)
        file.seek(0)
        unpack = next((how for magic, how in _MAGIC.items() if begins.startswith(magic)), None)
        if unpack is None:
            yield file
            return
        with tempfile.TemporaryFile(dir=place) as unpacked, unpack(file) as packed:
            left = most
            while piece := packed.read(MOST_AT_ONCE):
                left -= len(piece)
                if left < 0:
                    raise ImageError(
                        f"{path} unpacks to more than {most} bytes", hint="allow more: --most-bytes"
                    )
                unpacked.write(piece)
            unpacked.seek(0)
            yield unpacked


def _write(archive: tarfile.TarFile, entry: tarfile.TarInfo, writer: TreeWriter) -> None:
    name, uid, gid = entry.name, entry.uid, entry.gid
    if entry.isdir():
        writer.directory(name, entry.mode, uid, gid)
    elif entry.isreg():
        content = archive.extractfile(entry)
        assert content is not None  # only links and devices have no content

        def copy(made: int) -> None:
            left = entry.size
            while left:
                piece = content.read(min(MOST_AT_ONCE, left))
                if not piece:
                    raise tarfile.ReadError("unexpected end of data")
                writer.wrote(len(piece))
                _write_all(made, piece)
                left -= len(piece)

        writer.file(name, entry.mode, uid, gid, entry.mtime, copy)
    elif entry.issym():
        writer.link(name, entry.linkname, uid, gid)
    elif entry.islnk():
        writer.same_file(name, entry.linkname)
    else:
        writer.skip()


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
