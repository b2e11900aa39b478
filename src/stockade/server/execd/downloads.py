"""Send a file, or bytes or lines of it. A program may change it meanwhile; an answer keeps its length."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator
from email.utils import formatdate
from typing import NamedTuple
from urllib.parse import quote

from litestar import Response
from litestar.response import Stream

from stockade.sandbox.file_worker import FileWorker
from stockade.server.wire.errors import INVALID_REQUEST, TOO_LARGE, UNKNOWN, ApiError

#: How much is read at once; a file up to this size is sent in one piece.
PIECE = 256 << 10
#: How much of a file is searched for lines.
MOST_SEARCHED = 4 << 30


class ByteRange(NamedTuple):
    """Some bytes of a file."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Their number."""
        return self.end - self.start


def parse_range(header: str, size: int) -> ByteRange:
    """Return the bytes that a `Range` header names, of a file of that size; only the first range counts.

    >>> parse_range("bytes=2-5", 10), parse_range("bytes=-3", 10), parse_range("bytes=8-", 10)
    (ByteRange(start=2, end=6), ByteRange(start=7, end=10), ByteRange(start=8, end=10))
    """
    unit, _, ranges = header.partition("=")
    first, dash, last = ranges.partition(",")[0].strip().partition("-")
    first, last = first.strip(), last.strip()
    numbers = [text for text in (first, last) if text]
    if unit.strip() != "bytes" or not dash or not numbers or not all(map(_is_number, numbers)):
        raise _unsatisfiable(size)
    if not first:
        found = ByteRange(max(0, size - int(last)), size)
    else:
        found = ByteRange(int(first), min(size, int(last) + 1) if last else size)
    if found.start >= found.end:
        raise _unsatisfiable(size)
    return found


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 19


def _unsatisfiable(size: int) -> ApiError:
    words = f"Range: the file has {size} bytes; write `bytes=FIRST-LAST` of them"
    return ApiError(416, UNKNOWN, words, headers={"content-range": f"bytes */{size}"})


async def send_file(worker: FileWorker, path: str, ranges: str) -> Response[bytes] | Stream:
    """Answer with a file, or with the bytes that a `Range` header names."""
    file = io.FileIO(await worker.open(path), closefd=True)
    try:
        found = os.fstat(file.fileno())
        part = parse_range(ranges, found.st_size) if ranges else ByteRange(0, found.st_size)
        name = quote(os.path.basename(os.fsencode(path)))
        headers = {
            "accept-ranges": "bytes",
            "content-disposition": f"attachment; filename=\"{name}\"; filename*=UTF-8''{name}",
        }
        if 0 <= found.st_mtime < 1 << 37:
            headers["last-modified"] = formatdate(found.st_mtime, usegmt=True)
        if ranges:
            headers["content-range"] = f"bytes {part.start}-{part.end - 1}/{found.st_size}"
        return await _answer(file, part, 206 if ranges else 200, headers, "application/octet-stream")
    except BaseException:
        file.close()
        raise


async def send_lines(
    worker: FileWorker, path: str, first: int, count: int | None
) -> Response[bytes] | Stream:
    """Answer with lines of a file, without the end of the last one; the first line is number 1."""
    file = io.FileIO(await worker.open(path), closefd=True)
    try:
        part = await asyncio.to_thread(find_lines, file, first, count)
        return await _answer(file, part, 200, {}, "text/plain")
    except BaseException:
        file.close()
        raise


def find_lines(file: io.FileIO, first: int, count: int | None) -> ByteRange:
    """Return where lines of a file begin and end; raise an error if that takes too long to find."""
    descriptor = file.fileno()
    start = _after_lines(descriptor, 0, first - 1)
    if count is not None:
        end = _after_lines(descriptor, start, count)
    else:
        end = max(start, os.fstat(descriptor).st_size)
    if end > start and os.pread(descriptor, 1, end - 1) == b"\n":
        end -= 1
    return ByteRange(start, end)


def _after_lines(descriptor: int, place: int, count: int) -> int:
    """Return the place after so many lines, or the end of the file."""
    searched = 0
    while count and (piece := os.pread(descriptor, PIECE, place)):
        lines = piece.count(b"\n")
        if lines >= count:
            end = -1
            for _ in range(count):
                end = piece.index(b"\n", end + 1)
            return place + end + 1
        count -= lines
        place += len(piece)
        searched += len(piece)
        if searched > MOST_SEARCHED:
            words = f"offset, limit: lines are searched in at most {MOST_SEARCHED >> 30} GiB of a file"
            raise ApiError(413, TOO_LARGE, words)
    return place


async def _answer(
    file: io.FileIO, part: ByteRange, status: int, headers: dict[str, str], media_type: str
) -> Response[bytes] | Stream:
    if part.size <= PIECE:
        with file:
            content = os.pread(file.fileno(), part.size, part.start)
        if len(content) == part.size or status == 200:
            return Response(content, status_code=status, headers=headers, media_type=media_type)
        raise ApiError(409, INVALID_REQUEST, "the file became shorter while it was read")
    headers["content-length"] = str(part.size)
    return Stream(_pieces(file, part), status_code=status, headers=headers, media_type=media_type)


async def _pieces(file: io.FileIO, part: ByteRange) -> AsyncIterator[bytes]:
    """Yield the bytes; if the file has become shorter, fail, which ends the connection."""
    place = part.start
    with file:
        while place < part.end:
            piece = await asyncio.to_thread(os.pread, file.fileno(), min(PIECE, part.end - place), place)
            if not piece:
                raise ConnectionAbortedError("the file became shorter while it was sent")
            yield piece
            place += len(piece)
