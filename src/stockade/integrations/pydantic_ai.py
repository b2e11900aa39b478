"""A workspace backend of Pydantic AI: an agent's commands and files are those of one sandbox.

    agent = Agent(model, capabilities=[...], workspace=StockadeWorkspace(stockade.Policy(workspace=".")))

The first operation starts the sandbox, in a process of its own. It outlives the run and the program, as
Pydantic AI asks: `ref` names it, and `StockadeWorkspace(ref=ref)` in any process of the same user reaches it
again. It ends by `destroy()`, by `stockade kill ID`, and after `idle_timeout` without a call.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence

from stockade.integrations import needs_extra
from stockade.policy import values
from stockade.policy.model import PolicyLike
from stockade.result import Outcome
from stockade.sandbox.held_sandbox import HeldEntry, HeldRun, HeldSandbox, SandboxGoneError

with needs_extra("pydantic-ai"):
    from pydantic_ai.workspaces import (
        CommandResult,
        FileEntry,
        WorkspaceCommand,
        WorkspaceOutputLimitError,
        WorkspaceRef,
        WorkspaceTimeoutError,
        WorkspaceUnavailableError,
    )

__all__ = ["StockadeWorkspace"]

PROVIDER = "stockade"
#: The most bytes of each stream: an answer with both must fit into one message.
MOST_OUTPUT = 30 << 20
#: Models write bash, whatever /bin/sh is.
SHELL = ("bash", "-c")


class StockadeWorkspace:
    """A sandbox as a workspace; built without doing anything.

    `policy` is a `Policy`, its clauses as a dict, or the path of a policy file; a `ref` attaches to a sandbox
    that has one already. `idle_timeout` is in seconds or text such as "2h"; None lets an unused sandbox live
    until it is destroyed. `output_limit` bounds each stream of a command, in bytes.
    """

    def __init__(
        self,
        policy: PolicyLike | None = None,
        *,
        ref: WorkspaceRef | None = None,
        name: str = "pydantic-ai",
        idle_timeout: float | str | None = "24h",
        output_limit: int = 10 << 20,
    ) -> None:
        if ref is not None and (ref.provider != PROVIDER or policy is not None):
            raise ValueError(
                "a ref of another provider cannot be attached to"
                if policy is None
                else "a sandbox that exists has its policy: pass policy or ref, not both"
            )
        if not 0 < output_limit <= MOST_OUTPUT:
            raise ValueError(f"output_limit must be from 1 to {MOST_OUTPUT} bytes")
        self._policy = policy
        self._ref = ref
        self._name = name
        self._idle = None if idle_timeout is None else values.time("idle_timeout", idle_timeout)
        self._output_limit = output_limit
        self._box: HeldSandbox | None = None
        self._opening: asyncio.Task[HeldSandbox] | None = None

    @property
    def ref(self) -> WorkspaceRef | None:
        """The sandbox's identity; None until it has been started."""
        return self._ref

    async def working_dir(self) -> str:
        """Return where commands start: the policy's workspace, else the private home."""
        with _unavailable():
            return (await self._sandbox()).directory

    async def run(
        self,
        command: WorkspaceCommand,
        *,
        shell: bool = False,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> CommandResult:
        """Run a command, or with `shell` a line of bash, and return its exit code and all its output."""
        argv = _argv(command, shell)
        if timeout is not None and not 0 < timeout < float("inf"):
            raise ValueError("timeout must be a positive number of seconds, or None")
        with _unavailable():
            box = await self._sandbox()
            done = await box.run(argv, env=env, timeout=timeout, limit=self._output_limit)
        return _result(done, self._output_limit)

    async def read_bytes(self, path: str) -> bytes:
        """Read a file."""
        with _unavailable():
            return await (await self._sandbox()).read(path)

    async def write_bytes(self, path: str, data: bytes) -> None:
        """Write a file, with the directories above it; a link is followed."""
        with _unavailable():
            await (await self._sandbox()).write(path, data)

    async def stat(self, path: str) -> FileEntry:
        """Describe a file or directory."""
        with _unavailable():
            return _entry(await (await self._sandbox()).stat(path))

    async def list_dir(self, path: str) -> Sequence[FileEntry]:
        """List a directory."""
        with _unavailable():
            return [_entry(one) for one in await (await self._sandbox()).list(path)]

    async def make_dir(self, path: str) -> None:
        """Create a directory, with those above it."""
        with _unavailable():
            await (await self._sandbox()).mkdir(path)

    async def remove(self, path: str) -> None:
        """Remove a file, or a directory with its content, but never the working directory or one above."""
        with _unavailable():
            box = await self._sandbox()
            named = posixpath.normpath(path)
            if named == box.directory or box.directory.startswith(f"{named.rstrip('/')}/"):
                raise ValueError(f"{path} is the working directory or contains it")
            await box.remove(path)

    async def exists(self, path: str) -> bool:
        """Whether a file or directory is there."""
        try:
            await self.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    async def realpath(self, path: str) -> str:
        """Resolve links inside; names that do not exist stay as they are."""
        with _unavailable():
            found = await (await self._sandbox()).run(["realpath", "-mz", "--", path])
        if found.exit_code:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        return os.fsdecode(found.stdout.rstrip(b"\0"))

    async def destroy(self) -> None:
        """End the sandbox, if it has been started and lives. Changes in an overlay workspace are kept."""
        if self._ref is not None or self._opening is not None:
            with contextlib.suppress(SandboxGoneError):
                await (await self._sandbox()).end()

    async def _sandbox(self) -> HeldSandbox:
        """Return the sandbox; the first operation starts it or attaches to it, and the others wait."""
        if self._box is None:
            if self._opening is None:
                self._opening = asyncio.ensure_future(self._open())
            try:
                # A caller that is cancelled leaves the start alone: the sandbox and its ref stay known.
                self._box = await asyncio.shield(self._opening)
            except Exception:
                self._opening = None
                raise
        return self._box

    async def _open(self) -> HeldSandbox:
        if self._ref is not None:
            return await HeldSandbox.attach(self._ref.id)
        box = await HeldSandbox.start(
            self._policy, name=self._name, idle=self._idle, who={"agent": self._name}
        )
        self._ref = WorkspaceRef(provider=PROVIDER, id=box.id)
        return box


def _argv(command: WorkspaceCommand, shell: bool) -> list[str]:
    if isinstance(command, str) != shell:
        raise TypeError("a command is a list of words, or with shell=True one string")
    return [*SHELL, command] if isinstance(command, str) else list(command)


def _result(done: HeldRun, limit: int) -> CommandResult:
    stdout, stderr = (data.decode("utf-8", "replace") for data in (done.stdout, done.stderr))
    if done.outcome is Outcome.TIMED_OUT:
        raise WorkspaceTimeoutError(done.reason, stdout=stdout, stderr=stderr)
    if done.truncated:
        raise WorkspaceOutputLimitError(
            f"the command printed more than {limit} bytes", limit=limit, stdout=stdout, stderr=stderr
        )
    if done.outcome not in (Outcome.EXITED, Outcome.SIGNALLED):
        stderr += f"stockade: {done.reason}\n"
    return CommandResult(exit_code=done.exit_code, stdout=stdout, stderr=stderr)


def _entry(file: HeldEntry) -> FileEntry:
    return FileEntry(name=posixpath.basename(file.path), path=file.path, is_dir=file.is_dir, size=file.size)


@contextlib.contextmanager
def _unavailable() -> Iterator[None]:
    """Turn the end of the sandbox into the error that Pydantic AI has for it."""
    try:
        yield
    except SandboxGoneError as error:
        raise WorkspaceUnavailableError(str(error)) from error
