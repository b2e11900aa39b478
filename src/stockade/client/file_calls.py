"""Calls about files: of a sandbox, or of one of its isolated sessions.

`base` is where the calls are: the path of the sandbox's endpoints, or of the session below it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from stockade.client.calls import ServerCall, content, decoded, nothing, present
from stockade.client.values import RemoteFileInfo

if TYPE_CHECKING:
    import httpx

Path = str | os.PathLike[str]


class _WireInfo(msgspec.Struct):
    """A file as the wire has it: the mode is octal digits in a decimal number."""

    path: str
    type: Literal["file", "directory", "symlink", "other"]
    size: int
    mode: int
    modified_at: datetime
    created_at: datetime
    owner: str
    group: str

    def info(self) -> RemoteFileInfo:
        return RemoteFileInfo(
            path=self.path, kind=self.type, size=self.size, mode=int(str(self.mode), 8),
            modified=self.modified_at, created=self.created_at, owner=self.owner, group=self.group,
        )  # fmt: skip


def _digits(mode: int | None) -> int | None:
    return None if mode is None else int(f"{mode:o}")


def _infos(answer: httpx.Response) -> tuple[RemoteFileInfo, ...]:
    return tuple(one.info() for one in decoded(list[_WireInfo])(answer))


def read(base: str, path: Path, offset: int, length: int | None) -> ServerCall[bytes]:
    """Read a file, or `length` bytes of it from `offset` on."""
    headers: dict[str, str] = {}
    if offset or length is not None:
        last = "" if length is None else offset + length - 1
        headers["Range"] = f"bytes={offset}-{last}"
    return ServerCall(
        method="GET", path=f"{base}/files/download", query=[("path", os.fspath(path))], headers=headers,
        read=content,
    )  # fmt: skip


def write(base: str, path: Path, data: bytes | str, mode: int | None) -> ServerCall[None]:
    """Write a file, and the directories that lead to it."""
    metadata = msgspec.json.encode(present(path=os.fspath(path), mode=_digits(mode)))
    body = data.encode() if isinstance(data, str) else data
    parts = [
        ("metadata", ("metadata", metadata, "application/json")),
        ("file", ("file", body, "application/octet-stream")),
    ]
    return ServerCall(method="POST", path=f"{base}/files/upload", files=parts, read=nothing)


def info(base: str, path: Path) -> ServerCall[RemoteFileInfo]:
    """Describe a file."""
    name = os.fspath(path)
    decode = decoded(dict[str, _WireInfo])
    return ServerCall(
        method="GET", path=f"{base}/files/info", query=[("path", name)],
        read=lambda answer: next(iter(decode(answer).values())).info(),
    )  # fmt: skip


def list_directory(base: str, path: Path, depth: int | None) -> ServerCall[tuple[RemoteFileInfo, ...]]:
    """List a directory."""
    query: list[tuple[str, str | int]] = [("path", os.fspath(path))]
    if depth is not None:
        query.append(("depth", depth))
    return ServerCall(method="GET", path=f"{base}/directories/list", query=query, read=_infos)


def search(base: str, pattern: str, path: Path) -> ServerCall[tuple[RemoteFileInfo, ...]]:
    """Search for files by their names."""
    query = [("path", os.fspath(path)), ("pattern", pattern)]
    return ServerCall(method="GET", path=f"{base}/files/search", query=query, read=_infos)


def move(base: str, source: Path, target: Path) -> ServerCall[None]:
    """Rename a file or directory."""
    body = [{"src": os.fspath(source), "dest": os.fspath(target)}]
    return ServerCall(method="POST", path=f"{base}/files/mv", json=body, read=nothing)


def remove(base: str, path: Path, *, recursive: bool) -> ServerCall[None]:
    """Remove a file, or a directory with everything in it."""
    kind = "directories" if recursive else "files"
    return ServerCall(method="DELETE", path=f"{base}/{kind}", query=[("path", os.fspath(path))], read=nothing)


def mkdir(base: str, path: Path, mode: int | None) -> ServerCall[None]:
    """Make a directory, and those that lead to it."""
    body = {os.fspath(path): present(mode=_digits(mode))}
    return ServerCall(method="POST", path=f"{base}/directories", json=body, read=nothing)


def chmod(base: str, path: Path, mode: int, owner: str | None, group: str | None) -> ServerCall[None]:
    """Change the mode of a file, and its owner and group if they are given."""
    body = {os.fspath(path): present(mode=_digits(mode), owner=owner, group=group)}
    return ServerCall(method="POST", path=f"{base}/files/permissions", json=body, read=nothing)


def replace(base: str, path: Path, old: str, new: str) -> ServerCall[int]:
    """Replace every occurrence of a text; return how many there were."""
    body: Mapping[str, Any] = {os.fspath(path): {"old": old, "new": new}}
    decode = decoded(dict[str, dict[str, int]])
    return ServerCall(
        method="POST", path=f"{base}/files/replace", query=[("verbose", "true")], json=body,
        read=lambda answer: next(iter(decode(answer).values()))["replacedCount"],
    )  # fmt: skip
