"""The sandbox behind the tools: opened by the first call that needs it, and the runs in it.

The sandbox has a shell and an interpreter that keep their state. It is closed while its workspace is put back
or committed, and after a time without calls; the next call opens it again over the same changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import shlex
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import anyio

from stockade.errors import NotFoundError, PolicyError, StockadeError, unmade_sandbox
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.workspace import Workspace

if TYPE_CHECKING:
    from stockade.resolve.discovery import PolicySource
    from stockade.result import Result
    from stockade.sessions.interpreter import AsyncInterpreter
    from stockade.sessions.shell import AsyncShell

T = TypeVar("T")

_log = logging.getLogger("stockade")

#: How many runs `explain` and `read` still know, and how many bytes of output they hold together: in memory,
#: and in the files beyond the policy's limit, which are deleted with the oldest runs.
KEPT_RUNS = 20
KEPT_BYTES = 64 << 20
KEPT_IN_FILES = 4 << 30
#: How the user learns why there is no sandbox.
UNMADE = "the server has written the reason to its stderr, for the user; `stockade run -- true` says it too"


class PastRun(NamedTuple):
    """A run that has ended, and its number, which answers name."""

    number: int
    result: Result


class Workbench:
    """One sandbox and its history, for all calls of one server."""

    def __init__(
        self,
        found: PolicySource,
        *,
        start: str | None = None,
        resume: Workspace | None = None,
        discard: bool = False,
        name: str = "mcp",
    ) -> None:
        self.found = found
        self._start, self._name, self._discard = start, name, discard
        #: The workspace to go on in, and whether the sandbox was opened before.
        self._workspace = "" if resume is None else resume.id
        self._box: AsyncSandbox | None = None
        self._shell: AsyncShell | None = None
        self._python: AsyncInterpreter | None = None
        self._lock = asyncio.Lock()
        self._runs: deque[PastRun] = deque()
        self._count = 0
        self._calls = 0
        self._last_call = time.monotonic()

    @property
    def is_open(self) -> bool:
        """Whether the sandbox lives now."""
        return self._box is not None

    async def box(self) -> AsyncSandbox:
        """Return the sandbox; open it if this is the first call, or if it has ended."""
        async with self._lock:
            if self._box is not None and _has_ended(self._box):
                await self._close()
            if self._box is None:
                self._box = await self._open()
            return self._box

    async def _open(self) -> AsyncSandbox:
        box = AsyncSandbox(
            self.found.policy,
            resume=self._kept(),
            name=self._name,
        )
        box._pinned = self.found.pinned
        try:
            await box.open()
        except StockadeError as error:
            _log.warning("the sandbox could not be made: %s\n%s", error.message, error.hint)
            raise unmade_sandbox(UNMADE) from error
        if _has_overlay(self.found):
            self._workspace = box.workspace.id
        return box

    def _kept(self) -> Workspace | None:
        """Return the workspace of the sandbox before this one; a workspace without changes is gone."""
        if not self._workspace:
            return None
        with contextlib.suppress(NotFoundError):
            return Workspace.open(self._workspace)
        return None

    async def close(self) -> None:
        """End everything inside. The next call opens the sandbox again."""
        async with self._lock:
            await self._close()

    async def end(self) -> None:
        """End everything inside for good, and delete the changes if the user wants none."""
        async with self._lock:
            await self._close()
            if self._discard and (workspace := self._kept()) is not None:
                await asyncio.to_thread(workspace.discard)

    async def _close(self) -> None:
        box, self._box = self._box, None
        self._shell = self._python = None
        if box is not None:
            await box.close()

    @contextlib.asynccontextmanager
    async def closed(self) -> AsyncIterator[Workspace]:
        """Close the sandbox and yield its workspace; calls that need the sandbox wait until this is over."""
        if not _has_overlay(self.found):
            raise PolicyError("the sandbox has no overlay workspace, so no changes are kept aside")
        async with self._lock:
            await self._close()
            workspace = self._kept()
            if workspace is None:
                raise PolicyError("there are no changes", hint="commands have changed nothing so far")
            yield workspace

    @property
    def workspace_id(self) -> str:
        """The workspace of the changes; "" if there is none yet, or if the policy has no overlay."""
        return self._workspace

    async def workspace(self) -> Workspace:
        """Return the changes of the living sandbox."""
        return (await self.box()).workspace

    async def run(self, argv: Sequence[str], *, stdin: str, cwd: str | None, timeout: float) -> PastRun:
        """Run a command to its end."""
        box = await self.box()
        place = cwd or self._start
        return self._past(await uncancelled(box.run(argv, input=stdin, cwd=place, timeout=timeout)))

    async def run_shell(self, code: str, *, timeout: float) -> PastRun:
        """Run code in the shell, whose directory, variables and functions stay."""
        box = await self.box()
        if self._shell is None:
            self._shell = box.shell()
            if self._start:
                await uncancelled(self._shell.run(f"cd {shlex.quote(self._start)}"))
        return self._past(await uncancelled(self._shell.run(code, timeout=timeout)))

    async def run_python(self, code: str, *, timeout: float) -> PastRun:
        """Run code in the interpreter, whose variables stay."""
        box = await self.box()
        if self._python is None:
            self._python = box.python()
            if self._start:
                await uncancelled(self._python.run(f"import os; os.chdir({self._start!r})"))
        return self._past(await uncancelled(self._python.run(code, timeout=timeout)))

    def _past(self, result: Result) -> PastRun:
        """Number a result and keep it; forget old ones whose output takes too much memory or disk."""
        self._count += 1
        self._runs.append(run := PastRun(self._count, result))
        while len(self._runs) > 1 and self._keeps_too_much():
            for file in self._runs.popleft().result.spilled:
                with contextlib.suppress(OSError):
                    os.unlink(file.path)
        return run

    def _keeps_too_much(self) -> bool:
        kept = [one.result for one in self._runs]
        in_files = sum(file.size for one in kept for file in one.spilled)
        return len(kept) > KEPT_RUNS or sum(map(_size, kept)) > KEPT_BYTES or in_files > KEPT_IN_FILES

    def past_run(self, number: int | None = None) -> PastRun:
        """Return an earlier run by its number, or the last one."""
        for one in reversed(self._runs):
            if number in (None, one.number):
                return one
        if not self._runs:
            raise NotFoundError("nothing was run yet", hint="use run, shell or python first")
        known = f"{self._runs[0].number} to {self._runs[-1].number}"
        raise NotFoundError(f"run {number} is not known", hint=f"the runs {known} are")

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Count a call, for `close_when_idle`."""
        self._calls += 1
        try:
            yield
        finally:
            self._calls -= 1
            self._last_call = time.monotonic()

    async def close_when_idle(self, seconds: float) -> None:
        """Close the sandbox whenever no call came for so long; never returns."""
        while True:
            left = self._last_call + seconds - time.monotonic()
            if self._calls or left > 0 or not self.is_open:
                await asyncio.sleep(max(left, min(seconds, 1.0)))
            else:
                await self.close()


async def uncancelled(work: Awaitable[T]) -> T:
    """Await work in a task of its own; a cancellation reaches it once, and it can end in good order.

    The SDK's cancellation is anyio's, which strikes every `await` again: a run could not wait for its end.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait({task})
        raise


def _has_ended(box: AsyncSandbox) -> bool:
    if box.gate is None:
        return True
    (poll := select.poll()).register(box.gate, select.POLLIN)
    return bool(poll.poll(0))


def _has_overlay(found: PolicySource) -> bool:
    rule = found.policy.workspace
    return rule is not None and rule.mode == "overlay"


def _size(result: Result) -> int:
    return len(result.stdout) + len(result.stderr)
