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
        """As `Files.close`."""
        self._files.close()

    async def read(
        self, path: Path, *, offset: int = 0, length: int | None = None, limit: int = READ_LIMIT
    ) -> bytes:
        """As `Files.read`."""
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
        """As `Files.write`."""
        await asyncio.to_thread(
            self._files.write, path, data, mode=mode, parents=parents, replace=replace, sync=sync
        )

    async def append(self, path: Path, data: bytes | str, *, parents: bool = False) -> None:
        """As `Files.append`."""
        await asyncio.to_thread(self._files.append, path, data, parents=parents)

    async def replace(
        self, path: Path, old: bytes | str, new: bytes | str, *, count: int | None = None
    ) -> int:
        """As `Files.replace`."""
        return await asyncio.to_thread(self._files.replace, path, old, new, count=count)

    async def info(self, path: Path) -> FileInfo:
        """As `Files.info`."""
        return await asyncio.to_thread(self._files.info, path)

    async def list(self, path: Path = ".", *, limit: int = LIST_LIMIT) -> Listing:
        """As `Files.list`."""
        return await asyncio.to_thread(self._files.list, path, limit=limit)

    async def search(self, pattern: str = "**", path: Path = ".", *, limit: int = SEARCH_LIMIT) -> Listing:
        """As `Files.search`."""
        return await asyncio.to_thread(self._files.search, pattern, path, limit=limit)

    async def move(
        self, source: Path, target: Path, *, overwrite: bool = False, parents: bool = False
    ) -> None:
        """As `Files.move`."""
        await asyncio.to_thread(self._files.move, source, target, overwrite=overwrite, parents=parents)

    async def remove(self, path: Path, *, recursive: bool = False) -> None:
        """As `Files.remove`."""
        await asyncio.to_thread(self._files.remove, path, recursive=recursive)

    async def mkdir(self, path: Path, *, mode: int | None = None, parents: bool = False) -> None:
        """As `Files.mkdir`."""
        await asyncio.to_thread(self._files.mkdir, path, mode=mode, parents=parents)

    async def chmod(self, path: Path, mode: int) -> None:
        """As `Files.chmod`."""
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
        """As `Files.upload`; the source is read in a thread."""
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
        """As `Files.download`; the target is written in a thread."""
        return await asyncio.to_thread(
            self._files.download, path, target, offset=offset, length=length, limit=limit
        )
