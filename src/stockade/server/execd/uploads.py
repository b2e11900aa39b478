"""Uploads: a multipart body, written to disk as it comes.

Each part `metadata` (JSON) is followed, at once or later, by its part `file`.
The content goes into files without a name, opened by the worker with the
rights of its user; they appear at their paths when the whole body has arrived.
So half an upload leaves nothing, and no upload is ever whole in memory.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import os
from collections.abc import AsyncIterator

import msgspec
from multipart import MultipartError, MultipartSegment, PushMultipartParser, parse_options_header

from stockade.errors import SetupError, StockadeError
from stockade.sandbox.file_worker import MOST_AT_ONCE, FileWorker, NewFile
from stockade.server.execd.file_bodies import PermissionBody
from stockade.server.wire.errors import INVALID_FILE, TOO_LARGE, ApiError

INVALID_METADATA, INVALID_CONTENT = "INVALID_FILE_METADATA", "INVALID_FILE_CONTENT"
#: How many files one upload may have, each of which is an open file here.
MOST_FILES = 1000
#: How long metadata may be, and files that are gathered before they are written.
LONGEST_GATHERED = 64 << 10
#: The longest boundary between parts; the standard allows 70 characters.
LONGEST_BOUNDARY = 200
#: How much is gathered before it is written, in a thread.
PIECE = 1 << 20
#: How many bytes an upload may have, unless its caller says otherwise.
MOST_BYTES = 16 << 30
#: How much of a body is read on after an error: a client that is still sending does not see an early answer.
DRAINED = 16 << 20


class FileMetadata(PermissionBody, frozen=True, kw_only=True):
    """The JSON of a part `metadata`."""

    path: str


async def receive_upload(
    worker: FileWorker, content_type: str, body: AsyncIterator[bytes], most: int = MOST_BYTES
) -> None:
    """Write the files of a multipart body."""
    upload = _Upload(worker, _boundary(content_type), most)
    try:
        async for piece in body:
            await upload.feed(piece)
        await upload.finish()
    except (ApiError, StockadeError):
        await _drain(body)
        raise
    finally:
        await upload.close()


async def _drain(body: AsyncIterator[bytes]) -> None:
    left = DRAINED
    async for piece in body:
        left -= len(piece)
        if left < 0:
            return


def _boundary(content_type: str) -> str:
    try:
        kind, options = parse_options_header(content_type)
    except (MultipartError, ValueError):
        kind, options = "", {}
    boundary = options.get("boundary", "")
    if kind != "multipart/form-data" or not 0 < len(boundary) <= LONGEST_BOUNDARY:
        raise ApiError(400, INVALID_FILE, "the body must be multipart/form-data, with a boundary")
    return str(boundary)


class _Upload:
    """One upload. Small files are gathered and opened together: each call to the worker is two switches."""

    def __init__(self, worker: FileWorker, boundary: str, most: int) -> None:
        self._worker = worker
        self._left = most
        try:
            self._parser = PushMultipartParser(boundary, max_segment_count=4 * MOST_FILES)
        except MultipartError as error:
            raise _malformed(error) from None
        #: Metadata without its file so far.
        self._pending: collections.deque[FileMetadata] = collections.deque()
        #: Whole files that are not opened yet, and the bytes of them all.
        self._gathered: list[tuple[FileMetadata, bytes]] = []
        self._gathered_bytes = 0
        self._files: list[NewFile] = []
        self._counts = {"metadata": 0, "file": 0}
        self._part = ""
        #: Whether the last of the open files is the one of this part.
        self._open = False
        self._buffer = bytearray()

    async def feed(self, piece: bytes) -> None:
        """Take the next piece of the body."""
        self._left -= len(piece)
        if self._left < 0:
            raise ApiError(413, TOO_LARGE, "the upload is larger than the server allows")
        if not piece:
            return
        try:
            events = list(self._parser.parse(piece))
        except MultipartError as error:
            raise _malformed(error) from None
        for event in events:
            if isinstance(event, MultipartSegment):
                self._begin_part(event.name)
            elif event is None:
                await self._end_part()
            elif self._part:
                await self._content(event)

    async def finish(self) -> None:
        """Put all files at their paths, once everything has arrived."""
        try:
            self._parser.close()
        except MultipartError as error:
            raise _malformed(error) from None
        if not self._counts["metadata"]:
            raise ApiError(400, INVALID_METADATA, "metadata: there is no such part")
        if not self._counts["file"]:
            raise ApiError(400, INVALID_CONTENT, "file: there is no such part")
        if self._pending:
            words = "there are {metadata} parts metadata and {file} parts file".format(**self._counts)
            raise ApiError(400, INVALID_FILE, words)
        await self._write_gathered()
        await self._worker.finish(self._files)

    async def close(self) -> None:
        """Forget what is not finished."""
        self._parser.close(check_complete=False)
        try:
            # After the end of the sandbox there is nothing left to remove.
            with contextlib.suppress(OSError, SetupError):
                await self._worker.discard(self._files)
        finally:
            while self._files:
                os.close(self._files.pop().descriptor)

    def _begin_part(self, name: str) -> None:
        self._part = name if name in self._counts else ""
        self._open = False
        self._buffer.clear()
        if not self._part:
            return
        self._counts[name] += 1
        if name == "file" and not self._pending:
            if not self._counts["metadata"]:
                raise ApiError(400, INVALID_METADATA, "metadata: each file needs such a part before it")
            raise ApiError(400, INVALID_FILE, "there are more parts file than parts metadata before them")
        if self._counts[name] > MOST_FILES:
            words = f"an upload has at most {MOST_FILES} files; send the others in another one"
            raise ApiError(400, INVALID_FILE, words)

    async def _content(self, content: bytes) -> None:
        self._buffer += content
        if len(self._buffer) <= LONGEST_GATHERED:
            return
        if self._part == "metadata":
            raise ApiError(400, INVALID_METADATA, "metadata: it is too long")
        if not self._open:
            await self._write_gathered()
            await self._open_files([self._pending.popleft()])
            self._open = True
        if len(self._buffer) >= PIECE:
            await self._write_buffer()

    async def _end_part(self) -> None:
        if self._part == "metadata":
            self._pending.append(parse_metadata(bytes(self._buffer)))
        elif self._part == "file" and self._open:
            await self._write_buffer()
        elif self._part == "file":
            self._gathered.append((self._pending.popleft(), bytes(self._buffer)))
            self._gathered_bytes += len(self._buffer)
            if len(self._gathered) == MOST_AT_ONCE or self._gathered_bytes > PIECE:
                await self._write_gathered()
        self._part = ""

    async def _write_buffer(self) -> None:
        await asyncio.to_thread(_write, self._files[-1].descriptor, self._buffer)
        self._buffer.clear()

    async def _write_gathered(self) -> None:
        first = len(self._files)
        if self._gathered:
            await self._open_files([metadata for metadata, _ in self._gathered])
        for file, (_, content) in zip(self._files[first:], self._gathered, strict=True):
            _write(file.descriptor, content)
        self._gathered.clear()
        self._gathered_bytes = 0

    async def _open_files(self, several: list[FileMetadata]) -> None:
        try:
            self._files += await self._worker.begin([(one.path, one.permission()) for one in several])
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            words = f"no more than {len(self._files)} files can be open; send the others in another upload"
            raise ApiError(400, INVALID_FILE, words) from None


def _write(descriptor: int, content: bytes | bytearray) -> None:
    with memoryview(content) as view:
        written = 0
        while written < len(view):
            written += os.write(descriptor, view[written:])


def parse_metadata(content: bytes) -> FileMetadata:
    """Return the metadata of a file; raise the error that answers a malformed one."""
    try:
        metadata = msgspec.json.decode(content, type=FileMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, INVALID_METADATA, f"metadata: {error}") from None
    if not metadata.path:
        raise ApiError(400, INVALID_METADATA, "metadata: path must not be empty")
    return metadata


def _malformed(error: MultipartError) -> ApiError:
    return ApiError(400, INVALID_FILE, f"the multipart body is malformed: {error}")
