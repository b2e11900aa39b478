"""`box.files` of an `AsyncSandbox`: the same calls, in threads."""

from __future__ import annotations

import asyncio
from typing import BinaryIO

from stockade.workspace.files.file_info import FileInfo, Listing
from stockade.workspace.files.files import DOWNLOAD_LIMIT, LIST_LIMIT, READ_LIMIT, SEARCH_LIMIT, Files, Path


class AsyncFiles:
    """`Files` with `await`. Cancelling a call does not stop it: it runs to its end in its thread."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def __repr__(self) -> str:
        return f"<Async{repr(self._files).removeprefix('<')}"

    def close(self) -> None:
        """Close the descriptors, as `Files.close` does."""
        self._files.close()

    async def read(
        self, path: Path, *, offset: int = 0, length: int | None = None, limit: int = READ_LIMIT
    ) -> bytes:
        """Read a file, as `Files.read` does."""
        return await asyncio.to_thread(self._files.read, path, offset=offset, length=length, limit=limit)

    async def write(
        self,
        path: Path,
        data: bytes | str,
        *,
        mode: int | None = None,
        parents: bool = False,
        replace: bool = False,
        sync: bool = False,
    ) -> None:
        """Write a file, as `Files.write` does."""
        await asyncio.to_thread(
            self._files.write, path, data, mode=mode, parents=parents, replace=replace, sync=sync
        )

    async def append(self, path: Path, data: bytes | str, *, parents: bool = False) -> None:
        """Append to a file, as `Files.append` does."""
        await asyncio.to_thread(self._files.append, path, data, parents=parents)

    async def replace(
        self, path: Path, old: bytes | str, new: bytes | str, *, count: int | None = None
    ) -> int:
        """Replace text in a file, as `Files.replace` does."""
        return await asyncio.to_thread(self._files.replace, path, old, new, count=count)

    async def info(self, path: Path) -> FileInfo:
        """Describe a file, as `Files.info` does."""
        return await asyncio.to_thread(self._files.info, path)

    async def list(self, path: Path = ".", *, limit: int = LIST_LIMIT) -> Listing:
        """List a directory, as `Files.list` does."""
        return await asyncio.to_thread(self._files.list, path, limit=limit)

    async def search(self, pattern: str = "**", path: Path = ".", *, limit: int = SEARCH_LIMIT) -> Listing:
        """Find files, as `Files.search` does."""
        return await asyncio.to_thread(self._files.search, pattern, path, limit=limit)

    async def move(
        self, source: Path, target: Path, *, overwrite: bool = False, parents: bool = False
    ) -> None:
        """Move a file or directory, as `Files.move` does."""
        await asyncio.to_thread(self._files.move, source, target, overwrite=overwrite, parents=parents)

    async def remove(self, path: Path, *, recursive: bool = False) -> None:
        """Remove a file or directory, as `Files.remove` does."""
        await asyncio.to_thread(self._files.remove, path, recursive=recursive)

    async def mkdir(self, path: Path, *, mode: int | None = None, parents: bool = False) -> None:
        """Create a directory, as `Files.mkdir` does."""
        await asyncio.to_thread(self._files.mkdir, path, mode=mode, parents=parents)

    async def chmod(self, path: Path, mode: int) -> None:
        """Set permission bits, as `Files.chmod` does."""
        await asyncio.to_thread(self._files.chmod, path, mode)

    async def upload(
        self,
        source: Path | BinaryIO,
        path: Path,
        *,
        mode: int | None = None,
        parents: bool = False,
        replace: bool = False,
        sync: bool = False,
        limit: int | None = None,
    ) -> int:
        """Write a file of the host or a stream, as `Files.upload` does; a thread reads the source."""
        return await asyncio.to_thread(
            self._files.upload,
            source,
            path,
            mode=mode,
            parents=parents,
            replace=replace,
            sync=sync,
            limit=limit,
        )

    async def download(
        self,
        path: Path,
        target: Path | BinaryIO,
        *,
        offset: int = 0,
        length: int | None = None,
        limit: int | None = DOWNLOAD_LIMIT,
    ) -> int:
        """Copy a file to the host or a stream, as `Files.download` does; a thread writes the target."""
        return await asyncio.to_thread(
            self._files.download, path, target, offset=offset, length=length, limit=limit
        )
