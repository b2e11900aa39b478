"""A view of a living sandbox whose programs run as another user inside, for the rooms above."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import msgspec

from stockade.runs.launch import LaunchedSandbox
from stockade.runs.prepare import RunPreparation
from stockade.sandbox.async_sandbox import AsyncSandbox


class AsyncSandboxView(AsyncSandbox):
    """The same sandbox as another `AsyncSandbox`: only the user of what it starts differs.

    Both share every attribute, so a view opens, closes and counts nothing of its own.
    """

    __slots__ = ("_ids",)

    def __init__(self, whole: AsyncSandbox, uid: int | None, gid: int | None) -> None:
        self.__dict__ = whole.__dict__
        self._ids = (uid, gid)

    def __del__(self) -> None:
        """Leave the sandbox open: it is not this object's."""

    def _require_open(self) -> tuple[LaunchedSandbox, RunPreparation]:
        box, prepared = super()._require_open()
        return box, msgspec.structs.replace(prepared, ids=self._ids)

    @contextlib.asynccontextmanager
    async def _in_use(self) -> AsyncIterator[tuple[LaunchedSandbox, RunPreparation]]:
        async with super()._in_use() as (box, prepared):
            yield box, msgspec.structs.replace(prepared, ids=self._ids)


def run_as(sandbox: AsyncSandbox, uid: int | None, gid: int | None = None) -> AsyncSandbox:
    """Return a view of a sandbox whose runs, processes, shells and backgrounds are another user's inside."""
    return sandbox._run_as(uid, gid)
