"""Work on a session's layers with rights over every id of the sandbox.

Root has them. An ordinary user does not: a file that a program inside gave to
another user belongs to a subordinate id outside, and may be closed to the
supervisor. There a child does the work that is root over those ids, while the
supervisor keeps the session frozen.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stockade.errors import ConflictError, NotFoundError, PolicyError, SetupError, StockadeError
from stockade.linux import foreign_files
from stockade.linux.id_maps import as_root_inside
from stockade.sandbox.file_worker_channel import printable
from stockade.sandbox.workspace import frozen

if TYPE_CHECKING:
    from stockade.sandbox.workspace import Workspace

T = TypeVar("T")


class TooLargeError(StockadeError):
    """The changes take more bytes than the server sends."""


class ChildFailure(msgspec.Struct, frozen=True):
    """An error of the child: enough to raise it again."""

    kind: str
    message: str
    hint: str = ""
    paths: tuple[str, ...] = ()
    stage: str = ""
    errno: int = 0

    def error(self) -> StockadeError:
        """Return the error."""
        if self.kind == "ConflictError":
            return ConflictError(self.message, paths=self.paths, hint=self.hint)
        for known in (NotFoundError, PolicyError, TooLargeError):
            if self.kind == known.__name__:
                return known(self.message, hint=self.hint)
        return SetupError(self.message, stage=self.stage or "workspace", errno=self.errno, hint=self.hint)


class ChildAnswer(msgspec.Struct, frozen=True):
    """What the child has found, encoded, or why it failed."""

    value: bytes = b""
    failure: ChildFailure | None = None


def with_ids(workspace: Workspace, work: Callable[[Workspace], T], kind: type[T]) -> T:
    """Do some work on a workspace, in a child if this process lacks the rights; return its value."""
    maps = foreign_files.maps()
    if maps is None:
        return work(workspace)
    with frozen(workspace) as held, os.fdopen(os.memfd_create("answer"), "w+b") as answer:
        as_root_inside(maps, lambda: _answer(answer.fileno(), lambda: work(held)))
        answer.seek(0)
        content = answer.read()
    if not content:
        raise SetupError("the changes cannot be read: no process for the sandbox's ids", stage="workspace")
    found = msgspec.msgpack.decode(content, type=ChildAnswer)
    if found.failure is not None:
        raise found.failure.error()
    return msgspec.msgpack.decode(found.value, type=kind)


def _answer(file: int, work: Callable[[], object]) -> None:
    """Do the work and write its value or its error, in the child."""
    try:
        answer = ChildAnswer(msgspec.msgpack.encode(work()))
    except StockadeError as error:
        failure = ChildFailure(
            type(error).__name__,
            printable(error.message),
            printable(error.hint),
            tuple(map(printable, getattr(error, "paths", ()))),
            str(getattr(error, "stage", "")),
            int(getattr(error, "errno", 0) or 0),
        )
        answer = ChildAnswer(failure=failure)
    except OSError as error:
        words = f"the changes cannot be read: {error.strerror}"
        answer = ChildAnswer(failure=ChildFailure("SetupError", words, errno=error.errno or 0))
    data = memoryview(msgspec.msgpack.encode(answer))
    while data:
        data = data[os.write(file, data) :]
