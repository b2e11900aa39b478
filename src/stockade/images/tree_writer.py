"""Write the root file system of an image, by descriptor, from an untrusted source.

Every directory is reached from the root through no link, so nothing lands outside, whatever the names and
links of the source say. What is written is counted, and set-user-id bits are dropped. Modes of directories
are set at the end: a closed directory would otherwise keep its own entries out.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator

from stockade.errors import SetupError, StockadeError
from stockade.linux import openat2
from stockade.linux.id_maps import BASE, COUNT

#: The defaults of an import: bytes of all files, files and directories.
MOST_BYTES, MOST_ENTRIES = 20 << 30, 1_000_000
#: How deep directories may lie, and how long a path may be.
DEEPEST, LONGEST_PATH = 200, 4096
#: Set-user-id and set-group-id.
_SET_IDS = stat.S_ISUID | stat.S_ISGID
_NOBODY = 65534
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class ImageError(SetupError):
    """An image that cannot be imported, and why."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, stage="image", hint=hint)


class TreeWriter:
    """Writes one tree, below a directory that only the importer knows."""

    def __init__(
        self,
        root: int,
        *,
        most_bytes: int = MOST_BYTES,
        most_entries: int = MOST_ENTRIES,
        progress: Callable[[int, int], object] = lambda entries, size: None,
    ) -> None:
        self._root = root
        self._most_bytes, self._most_entries = most_bytes, most_entries
        self._progress = progress
        self._is_root = os.geteuid() == 0
        #: The final modes of directories, by path.
        self._modes: dict[str, int] = {}
        self.bytes = 0
        self.entries = 0
        #: Devices, pipes and sockets, which no image has.
        self.skipped = 0

    def skip(self) -> None:
        """Count an entry that is left out."""
        self._count()
        self.skipped += 1

    def directory(self, path: str, mode: int, uid: int = 0, gid: int = 0) -> None:
        """Make a directory, or give an existing one its mode and owner."""
        self._count()
        parts = _parts(path)
        if not parts:
            self._modes[""] = _mode(mode)
            return
        with self._parent(parts, path) as parent:
            with contextlib.suppress(FileExistsError):
                os.mkdir(parts[-1], 0o700, dir_fd=parent)
            with _trying(path), openat2.held(os.open(parts[-1], _DIRECTORY, dir_fd=parent)) as made:
                self._give(f"/proc/self/fd/{made}", uid, gid)
        self._modes["/".join(parts)] = _mode(mode)

    def file(
        self, path: str, mode: int, uid: int, gid: int, modified: float, copy: Callable[[int], None]
    ) -> None:
        """Make a file; `copy` writes its content to a descriptor, and calls `wrote` for what it wrote."""
        self._count()
        parts = _named(path)
        with self._parent(parts, path) as parent, _trying(path):
            self._make_way(parts[-1], parent, path)
            with openat2.held(os.open(parts[-1], _NEW, 0o600, dir_fd=parent)) as made:
                copy(made)
                self._give(made, uid, gid)
                os.fchmod(made, _mode(mode))
                with contextlib.suppress(OverflowError, ValueError):  # a time that no file can have
                    os.utime(made, (modified, modified))

    def link(self, path: str, target: str, uid: int = 0, gid: int = 0) -> None:
        """Make a symbolic link; where it leads is decided inside the sandbox."""
        self._count()
        parts = _named(path)
        if not target or "\0" in target or len(os.fsencode(target)) >= LONGEST_PATH:
            raise ImageError(f"{_shown(path)} is a link with an impossible target")
        with self._parent(parts, path) as parent, _trying(path):
            self._make_way(parts[-1], parent, path)
            os.symlink(target, parts[-1], dir_fd=parent)
            if self._is_root:
                os.chown(parts[-1], *_owner(uid, gid), dir_fd=parent, follow_symlinks=False)

    def same_file(self, path: str, target: str) -> None:
        """Make another name for a file that was written before."""
        self._count()
        parts, known = _named(path), _named(target)
        with (
            self._parent(known, target, make=False) as there,
            self._parent(parts, path) as parent,
            _trying(path),
        ):
            if not stat.S_ISREG(os.stat(known[-1], dir_fd=there, follow_symlinks=False).st_mode):
                raise ImageError(f"{_shown(path)} is another name of {_shown(target)}, which is not a file")
            if parts != known:
                self._make_way(parts[-1], parent, path)
                os.link(known[-1], parts[-1], src_dir_fd=there, dst_dir_fd=parent, follow_symlinks=False)

    def wrote(self, size: int) -> None:
        """Count bytes that were written; raises ImageError beyond the limit."""
        self.bytes += size
        if self.bytes > self._most_bytes:
            raise ImageError(
                f"the files are larger than {self._most_bytes} bytes together",
                hint="allow more: --most-bytes",
            )

    def finish(self) -> None:
        """Give directories their modes, the deepest first."""
        for path in sorted(self._modes, key=lambda one: one.count("/") + bool(one), reverse=True):
            with openat2.held(openat2.node(self._root, path, openat2.STRAIGHT, directory=True)) as found:
                os.chmod(f"/proc/self/fd/{found}", self._modes[path])

    def _count(self) -> None:
        self.entries += 1
        if self.entries > self._most_entries:
            raise ImageError(
                f"there are more than {self._most_entries} files and directories",
                hint="allow more: --most-entries",
            )
        self._progress(self.entries, self.bytes)

    @contextlib.contextmanager
    def _parent(self, parts: list[str], path: str, *, make: bool = True) -> Iterator[int]:
        """Open the directory of an entry, through no link; missing directories are made."""
        above = "/".join(parts[:-1])
        with _trying(path):
            try:
                found = openat2.node(self._root, above, openat2.STRAIGHT, directory=True)
            except FileNotFoundError:
                if not make:
                    raise
                found = self._make_above(parts[:-1])
        try:
            yield found
        finally:
            os.close(found)

    def _make_above(self, parts: list[str]) -> int:
        here = os.dup(self._root)
        for depth, name in enumerate(parts, 1):
            try:
                try:
                    os.mkdir(name, 0o700, dir_fd=here)
                except FileExistsError:
                    pass
                else:
                    self._count()
                    self._modes.setdefault("/".join(parts[:depth]), 0o755)
                below = os.open(name, _DIRECTORY, dir_fd=here)
            finally:
                os.close(here)
            here = below
        return here

    def _make_way(self, name: str, parent: int, path: str) -> None:
        """Remove what an earlier entry put at the same name: the later one counts."""
        try:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(found.st_mode):
            raise ImageError(f"{_shown(path)} is a directory and something else as well")
        os.unlink(name, dir_fd=parent)

    def _give(self, file: str | int, uid: int, gid: int) -> None:
        if self._is_root:
            os.chown(file, *_owner(uid, gid))


def _owner(uid: int, gid: int) -> tuple[int, int]:
    """Return the owner outside of a file with this owner inside; ids that no environment has are nobody."""
    users = [id if 0 <= id < COUNT else _NOBODY for id in (uid, gid)]
    return tuple(BASE + id if id else 0 for id in users)  # type: ignore[return-value]


def _mode(mode: int) -> int:
    return stat.S_IMODE(mode) & ~_SET_IDS


def _parts(path: str) -> list[str]:
    """Split the name of an entry, and refuse one that leads out of the root."""
    if path.startswith("/") or "\0" in path or len(os.fsencode(path)) >= LONGEST_PATH:
        raise ImageError(f"{_shown(path)} is not a path below the root", hint=_SUSPICIOUS)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ImageError(f"{_shown(path)} leads out of the root", hint=_SUSPICIOUS)
    if len(parts) > DEEPEST:
        raise ImageError(f"{_shown(path)} lies more than {DEEPEST} directories deep")
    return parts


def _named(path: str) -> list[str]:
    parts = _parts(path)
    if not parts:
        raise ImageError("the root itself is not a directory")
    return parts


_SUSPICIOUS = "do not use an archive that contains such names: it was made to write elsewhere"


def _shown(path: str) -> str:
    return repr(path[:200] + ("…" if len(path) > 200 else ""))


@contextlib.contextmanager
def _trying(path: str) -> Iterator[None]:
    """Explain why an entry cannot be written."""
    try:
        yield
    except StockadeError:
        raise
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV):
            through = f"{_shown(path)} would be written through a link or a file"
            raise ImageError(through, hint=_SUSPICIOUS) from None
        hint = "free some space, or set STOCKADE_HOME to a directory elsewhere"
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise ImageError(
            f"cannot write {_shown(path)}: {error.strerror}", hint=hint if full else ""
        ) from None
