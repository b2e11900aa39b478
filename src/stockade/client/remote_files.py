"""`box.files`: the files of a sandbox of the server."""

from __future__ import annotations

from stockade.client import file_calls
from stockade.client.file_calls import Path
from stockade.client.transport import Transport
from stockade.client.values import RemoteFileInfo


class RemoteFiles:
    """The files of a sandbox, or of an isolated session, as programs in it see them.

    >>> box.files.write("/tmp/greeting", "hello")
    >>> box.files.read("/tmp/greeting")
    b'hello'

    Relative paths count from where commands start, in a session from its workspace.
    """

    def __init__(self, transport: Transport, base: str) -> None:
        self._transport = transport
        self._base = base

    def read(self, path: Path, *, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or `length` bytes of it from `offset` on."""
        if length == 0:
            return b""
        return self._transport.send(file_calls.read(self._base, path, offset, length))

    def write(self, path: Path, data: bytes | str, *, mode: int | None = None) -> None:
        """Write a file, and make the directories that lead to it."""
        self._transport.send(file_calls.write(self._base, path, data, mode))

    def replace(self, path: Path, old: str, new: str) -> int:
        """Replace every occurrence of a text in a file; return how many there were."""
        return self._transport.send(file_calls.replace(self._base, path, old, new))

    def info(self, path: Path) -> RemoteFileInfo:
        """Describe a file; a link is not followed."""
        return self._transport.send(file_calls.info(self._base, path))

    def list(self, path: Path = ".", *, depth: int | None = None) -> tuple[RemoteFileInfo, ...]:
        """List a directory, and with `depth` the directories in it, too."""
        return self._transport.send(file_calls.list_directory(self._base, path, depth))

    def search(self, pattern: str = "**", path: Path = ".") -> tuple[RemoteFileInfo, ...]:
        """Search below `path` for files whose names match; a pattern with a `/` is matched to paths."""
        return self._transport.send(file_calls.search(self._base, pattern, path))

    def move(self, source: Path, target: Path) -> None:
        """Rename a file or directory."""
        self._transport.send(file_calls.move(self._base, source, target))

    def remove(self, path: Path, *, recursive: bool = False) -> None:
        """Remove a file; with `recursive`, a directory and everything in it."""
        self._transport.send(file_calls.remove(self._base, path, recursive=recursive))

    def mkdir(self, path: Path, *, mode: int | None = None) -> None:
        """Make a directory, and those that lead to it."""
        self._transport.send(file_calls.mkdir(self._base, path, mode))

    def chmod(self, path: Path, mode: int, *, owner: str | None = None, group: str | None = None) -> None:
        """Change the permission bits of a file, and its owner and group if you name them."""
        self._transport.send(file_calls.chmod(self._base, path, mode, owner, group))
