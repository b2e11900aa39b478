"""`box.files` of an `AsyncRemoteSandbox`."""

from __future__ import annotations

from stockade.client import file_calls
from stockade.client.file_calls import Path
from stockade.client.transport import AsyncTransport
from stockade.client.values import RemoteFileInfo


class AsyncRemoteFiles:
    """The files of a sandbox or an isolated session: `RemoteFiles` with `await`."""

    def __init__(self, transport: AsyncTransport, base: str) -> None:
        self._transport = transport
        self._base = base

    async def read(self, path: Path, *, offset: int = 0, length: int | None = None) -> bytes:
        """Read a file, or `length` bytes of it from `offset` on."""
        if length == 0:
            return b""
        return await self._transport.send(file_calls.read(self._base, path, offset, length))

    async def write(self, path: Path, data: bytes | str, *, mode: int | None = None) -> None:
        """Write a file, and make the directories that lead to it."""
        await self._transport.send(file_calls.write(self._base, path, data, mode))

    async def replace(self, path: Path, old: str, new: str) -> int:
        """Replace every occurrence of a text in a file; return how many there were."""
        return await self._transport.send(file_calls.replace(self._base, path, old, new))

    async def info(self, path: Path) -> RemoteFileInfo:
        """Describe a file; a link is not followed."""
        return await self._transport.send(file_calls.info(self._base, path))

    async def list(self, path: Path = ".", *, depth: int | None = None) -> tuple[RemoteFileInfo, ...]:
        """List a directory, and with `depth` the directories in it, too."""
        return await self._transport.send(file_calls.list_directory(self._base, path, depth))

    async def search(self, pattern: str = "**", path: Path = ".") -> tuple[RemoteFileInfo, ...]:
        """Search below `path` for files whose names match; a pattern with a `/` is matched to paths."""
        return await self._transport.send(file_calls.search(self._base, pattern, path))

    async def move(self, source: Path, target: Path) -> None:
        """Rename a file or directory."""
        await self._transport.send(file_calls.move(self._base, source, target))

    async def remove(self, path: Path, *, recursive: bool = False) -> None:
        """Remove a file; with `recursive`, a directory and everything in it."""
        await self._transport.send(file_calls.remove(self._base, path, recursive=recursive))

    async def mkdir(self, path: Path, *, mode: int | None = None) -> None:
        """Make a directory, and those that lead to it."""
        await self._transport.send(file_calls.mkdir(self._base, path, mode))

    async def chmod(
        self, path: Path, mode: int, *, owner: str | None = None, group: str | None = None
    ) -> None:
        """Change the permission bits of a file, and its owner and group if you name them."""
        await self._transport.send(file_calls.chmod(self._base, path, mode, owner, group))
