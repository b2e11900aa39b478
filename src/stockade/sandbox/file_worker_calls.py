"""What a file worker can be asked to do.

Each function here runs in a worker, on the files of the sandbox, with the
rights of the worker's identity. Its arguments and its value are what
MessagePack can carry; a path is bytes, because a program chose the names.
A module that adds a call of its own, with `worker_call`, must be imported
before the worker starts: a worker is a copy of the supervisor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from stockade.workspace.files.atomic_write import UnfinishedFile
from stockade.workspace.files.file_info import FileInfo, Kind
from stockade.workspace.files.identity_files import IdentityFiles, Permission


class FileFacts(msgspec.Struct, frozen=True, array_like=True):
    """A file as a worker describes it: `FileInfo` whose paths are the bytes that the kernel has."""

    path: bytes
    kind: Kind
    size: int
    #: The permission bits.
    mode: int
    #: Seconds since 1970; `created` is None if the file system does not record it.
    modified: float
    created: float | None
    owner: str
    group: str
    #: The target of a link.
    target: bytes = b""

    @classmethod
    def of(cls, info: FileInfo) -> FileFacts:
        """Return the facts of a description."""
        return cls(
            path=os.fsencode(info.path), kind=info.kind, size=info.size, mode=info.mode,
            modified=info.modified, created=info.created, owner=info.owner, group=info.group,
            target=os.fsencode(info.target),
        )  # fmt: skip


class WorkerReply(NamedTuple):
    """The value of a call together with descriptors, which the worker closes once they are sent."""

    value: object
    descriptors: tuple[int, ...]


WorkerCall = Callable[..., object]
Function = TypeVar("Function", bound=WorkerCall)
#: Gets the files of the sandbox, the descriptors that came with the request, and its arguments.
CALLS: dict[str, WorkerCall] = {}


def worker_call(name: str) -> Callable[[Function], Function]:
    """Register a function under a name that `FileWorker.call` takes."""

    def register(function: Function) -> Function:
        CALLS[name] = function
        return function

    return register


@worker_call("info")
def _info(files: IdentityFiles, _: tuple[int, ...], paths: Sequence[bytes]) -> object:
    return [FileFacts.of(files.facts(os.fsdecode(path))) for path in paths]


@worker_call("open")
def _open(files: IdentityFiles, _: tuple[int, ...], path: bytes) -> object:
    return WorkerReply(None, (files.open_file(os.fsdecode(path)),))


@worker_call("begin")
def _begin(files: IdentityFiles, _: tuple[int, ...], items: Sequence[Sequence[Any]]) -> object:
    opened: list[tuple[str, int, UnfinishedFile]] = []
    try:
        for name, permission in items:
            path = os.fsdecode(name)
            opened.append((path, *files.begin(path, Permission(*permission))))
    except BaseException:
        for path, file, unfinished in opened:
            files.discard(path, file, unfinished)
            os.close(file)
        raise
    return WorkerReply([one[2] for one in opened], tuple(one[1] for one in opened))


@worker_call("finish")
def _finish(files: IdentityFiles, descriptors: tuple[int, ...], items: Sequence[Sequence[Any]]) -> object:
    for file, (path, unfinished) in zip(descriptors, items, strict=True):
        files.finish(os.fsdecode(path), file, UnfinishedFile(*unfinished))
    return None


@worker_call("discard")
def _discard(files: IdentityFiles, descriptors: tuple[int, ...], items: Sequence[Sequence[Any]]) -> object:
    for file, (path, unfinished) in zip(descriptors, items, strict=True):
        files.discard(os.fsdecode(path), file, UnfinishedFile(*unfinished))
    return None


@worker_call("remove_files")
def _remove_files(files: IdentityFiles, _: tuple[int, ...], paths: Sequence[bytes]) -> object:
    for path in paths:
        files.remove_file(os.fsdecode(path))
    return None


@worker_call("remove_directories")
def _remove_directories(files: IdentityFiles, _: tuple[int, ...], paths: Sequence[bytes]) -> object:
    for path in paths:
        files.remove_directory(os.fsdecode(path))
    return None


@worker_call("move")
def _move(files: IdentityFiles, _: tuple[int, ...], pairs: Sequence[Sequence[bytes]]) -> object:
    for source, target in pairs:
        files.move(os.fsdecode(source), os.fsdecode(target), parents=True)
    return None


@worker_call("set_permissions")
def _set_permissions(files: IdentityFiles, _: tuple[int, ...], items: Sequence[Sequence[Any]]) -> object:
    for path, permission in items:
        files.set_permission(os.fsdecode(path), Permission(*permission))
    return None


@worker_call("make_directories")
def _make_directories(files: IdentityFiles, _: tuple[int, ...], items: Sequence[Sequence[Any]]) -> object:
    for path, permission in items:
        files.make_directory(os.fsdecode(path), Permission(*permission))
    return None


@worker_call("replace")
def _replace(files: IdentityFiles, _: tuple[int, ...], items: Sequence[Sequence[bytes]]) -> object:
    return [files.replace_text(os.fsdecode(path), old, new) for path, old, new in items]


@worker_call("search")
def _search(files: IdentityFiles, _: tuple[int, ...], path: bytes, pattern: bytes) -> object:
    return [FileFacts.of(info) for info in files.find(os.fsdecode(path), os.fsdecode(pattern))]


@worker_call("list")
def _list(files: IdentityFiles, _: tuple[int, ...], path: bytes, depth: int) -> object:
    return [FileFacts.of(info) for info in files.list_tree(os.fsdecode(path), depth)]
