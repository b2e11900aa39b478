"""Hostile bytes as an upload: every body ends with a refusal or with files, and nothing stays open.

The worker is a stand-in that keeps files in memory. The time is bounded;
`STOCKADE_FUZZ_SECONDS` asks for more, and `STOCKADE_FUZZ_SEED` repeats a failure.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from stockade.sandbox.file_worker import NewFile
from stockade.server.execd.uploads import FileMetadata, parse_metadata, receive_upload
from stockade.server.wire.errors import ApiError
from stockade.workspace.files.atomic_write import UnfinishedFile

SECONDS = float(os.environ.get("STOCKADE_FUZZ_SECONDS", "1.5"))
SEED = int(os.environ.get("STOCKADE_FUZZ_SEED", "0")) or random.SystemRandom().randrange(1 << 32)
HEAD = b"Content-Disposition: form-data"
PIECES = (
    b"--edge", b"\r\n", b"--", b"--edge--\r\n", b"\r\n--edge\r\n", b"\n", b"\r", b"\0", b"\xff\xfe",
    HEAD + b'; name="file"; filename="../../etc/passwd"\r\n', HEAD + b'; name="metadata"\r\n', HEAD + b"\r\n",
    HEAD + b"; name=file; filename*=utf-8''%00%ff\r\n", b"Content-Type: text/plain\r\n\r\n", b"x" * 5000,
    b'{"path":"a"}', b'{"path":"/a/../../b","mode":755}', b'{"path":1}', b"[" * 3000, b'{"path":"\\ud800"}',
    b'{"path":"a","mode":99999999999999999999}', b'{"path":"a","mode":-1}', b"{}", b"null",
)  # fmt: skip


class MemoryWorker:
    """Takes the place of a file worker."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    async def begin(self, items: list[tuple[str, object]]) -> list[NewFile]:
        nameless = UnfinishedFile("", None, True)
        return [NewFile(path, os.memfd_create("upload"), nameless) for path, _ in items]

    async def finish(self, new: list[NewFile]) -> None:
        self.files = {file.path: os.pread(file.descriptor, 1 << 20, 0) for file in new}

    async def discard(self, new: list[NewFile]) -> None:
        pass


def whole(files: dict[str, bytes]) -> bytes:
    """A body as it should be."""
    body = b""
    for path, content in files.items():
        metadata = msgspec.json.encode({"path": path, "mode": 644})
        body += b'--edge\r\nContent-Disposition: form-data; name="metadata"; filename="m"\r\n\r\n' + metadata
        body += b'\r\n--edge\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n' + content
        body += b"\r\n"
    return body + b"--edge--\r\n"


def mutated(chance: random.Random) -> bytes:
    """A body that is a whole one with damage, or made of pieces of the grammar."""
    if chance.random() < 0.4:
        return b"".join(chance.choices(PIECES, k=chance.randrange(12)))
    body = bytearray(
        whole({f"f{n}": chance.randbytes(chance.randrange(300)) for n in range(chance.randrange(4))})
    )
    for _ in range(chance.randrange(6)):
        place = chance.randrange(len(body))
        if chance.random() < 0.5:
            body[place : place + chance.randrange(9)] = chance.choice(PIECES)
        else:
            body[place] = chance.randrange(256)
    return bytes(body)


async def pieces(body: bytes, chance: random.Random) -> AsyncIterator[bytes]:
    """The body, cut anywhere."""
    while body:
        size = chance.choice((1, 7, 50, 5000))
        yield body[:size]
        body = body[size:]


async def uploaded(body: bytes, chance: random.Random) -> dict[str, bytes] | ApiError:
    worker: Any = MemoryWorker()
    try:
        await receive_upload(worker, "multipart/form-data; boundary=edge", pieces(body, chance), 1 << 20)
    except ApiError as refusal:
        assert 400 <= refusal.status < 500
        assert not worker.files
        return refusal
    found: dict[str, bytes] = worker.files
    return found


def test_an_upload_arrives_however_it_is_cut() -> None:
    chance = random.Random(SEED)
    files = {"a": b"1", "b/c": chance.randbytes(70_000), "d": b"\r\n--edg", "e": b""}
    for _ in range(3):
        assert asyncio.run(uploaded(whole(files), chance)) == files, SEED


def test_hostile_bytes_are_refused_or_written_and_nothing_stays_open() -> None:
    chance = random.Random(SEED)
    before = len(os.listdir("/proc/self/fd"))
    ends = {"refused": 0, "written": 0}

    async def rounds() -> None:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            found = await uploaded(mutated(chance), chance)
            ends["refused" if isinstance(found, ApiError) else "written"] += 1

    asyncio.run(rounds())
    assert len(os.listdir("/proc/self/fd")) == before, SEED
    assert all(ends.values()), (ends, SEED)


def test_hostile_metadata_is_refused_or_plain() -> None:
    chance = random.Random(SEED)
    until = time.monotonic() + SECONDS / 3
    while time.monotonic() < until:
        content = b"".join(chance.choices(PIECES, k=3))
        start = chance.randrange(len(content))
        try:
            found = parse_metadata(content[start:])
            assert isinstance(found, FileMetadata) and found.path
            found.permission()
        except ApiError as refusal:
            assert refusal.status == 400, SEED
