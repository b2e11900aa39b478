"""Stockade for the OpenAI Agents SDK: an executor of its `ShellTool`, and a client of its sandbox agents.

The agent runs in your process, with the key of its model. What the model asks for runs in a sandbox: commands
through the gate, files through `box.files`, which resolves each path inside. The SDK's own local client runs
commands on Linux without walls.

    async with AsyncSandbox(Policy(workspace=".")) as box:
        agent = Agent(name="fixer", tools=[ShellTool(executor=shell_executor(box))])

    sandbox = SandboxRunConfig(client=StockadeSandboxClient(Policy(workspace=".")))
    await Runner.run(SandboxAgent(name="fixer"), "…", run_config=RunConfig(sandbox=sandbox))
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import subprocess
import tempfile
import uuid
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import IO, Any, Literal, cast

from stockade.errors import NotFoundError, PolicyError, StockadeError
from stockade.integrations import needs_extra
from stockade.policy.model import Policy, PolicyLike, policy_or_default
from stockade.result import Outcome, Result
from stockade.runs.options import OnExit, valid_on_exit
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.workspace import Workspace
from stockade.workspace.files.files import DOWNLOAD_LIMIT

with needs_extra("openai-agents"):
    from agents.sandbox.errors import (
        ExecTimeoutError,
        ExecTransportError,
        WorkspaceArchiveReadError,
        WorkspaceArchiveWriteError,
        WorkspaceReadNotFoundError,
    )
    from agents.sandbox.manifest import Manifest
    from agents.sandbox.session import SandboxSession, SandboxSessionState
    from agents.sandbox.session.base_sandbox_session import BaseSandboxSession
    from agents.sandbox.session.sandbox_client import BaseSandboxClient, BaseSandboxClientOptions
    from agents.sandbox.session.workspace_payloads import coerce_write_payload
    from agents.sandbox.snapshot import SnapshotBase, SnapshotSpec, resolve_snapshot
    from agents.sandbox.types import ExecResult, User
    from agents.tool import ShellCallOutcome, ShellCommandOutput, ShellCommandRequest, ShellResult

#: Where the files of a session are if the policy has no workspace: in the private /tmp.
PRIVATE_ROOT = "/tmp/workspace"
_DEFAULT_ROOT = cast(str, Manifest.model_fields["root"].default)
_PIECE = 1 << 20


def shell_executor(
    box: AsyncSandbox, *, timeout: float | None = None
) -> Callable[[ShellCommandRequest], Awaitable[ShellResult]]:
    """Return an executor for `ShellTool` that runs the model's commands in an open sandbox.

    `timeout` is in seconds and holds for each command for which the model does not choose one. After a
    command that took too long, the rest of its list does not run.
    """

    async def execute(request: ShellCommandRequest) -> ShellResult:
        action = request.data.action
        allowed = timeout if action.timeout_ms is None else action.timeout_ms / 1000
        outputs = list[ShellCommandOutput]()
        for command in action.commands:
            result = await box.run(["bash", "-c", command], timeout=allowed, grace=1)
            outputs.append(_shell_output(command, _ran(result)))
            if result.outcome is Outcome.TIMED_OUT:
                break
        return ShellResult(output=outputs, max_output_length=action.max_output_length)

    return execute


def _shell_output(command: str, result: Result) -> ShellCommandOutput:
    late = result.outcome is Outcome.TIMED_OUT
    ended = ShellCallOutcome(type="timeout" if late else "exit", exit_code=None if late else result.exit_code)
    return ShellCommandOutput(
        command=command, stdout=result.text, stderr=_errors(result).decode("utf-8", "replace"), outcome=ended
    )


def _ran(result: Result) -> Result:
    """Return the result of a command that ran; raise an error if the sandbox failed instead."""
    return result.check() if result.outcome in (Outcome.SETUP_FAILED, Outcome.CANCELLED) else result


def _errors(result: Result) -> bytes:
    """Return what a command wrote to stderr, and why Stockade ended it, if it did."""
    if result.outcome in (Outcome.EXITED, Outcome.SIGNALLED):
        return result.stderr
    return result.stderr + f"stockade: {result.reason}\n".encode()


class StockadeSandboxClientOptions(BaseSandboxClientOptions):
    """Nothing: what a session may do is the client's policy. Neither a run nor a saved state can widen it."""

    type: Literal["stockade"] = "stockade"


class StockadeSandboxSessionState(SandboxSessionState):
    """What another process needs to go on with a session."""

    type: Literal["stockade"] = "stockade"
    #: The workspace that keeps the session's changes; "" if its files are private to the sandbox.
    workspace_id: str = ""


class StockadeSandboxSession(BaseSandboxSession):
    """A session of the SDK in one living sandbox. `StockadeSandboxClient` makes it."""

    state: StockadeSandboxSessionState

    def __init__(self, state: StockadeSandboxSessionState, policy: Policy, on_exit: OnExit) -> None:
        self.state = state
        self._policy = policy
        self._on_exit = on_exit
        self._box: AsyncSandbox | None = None

    @property
    def box(self) -> AsyncSandbox:
        """The living sandbox."""
        if self._box is None:
            raise PolicyError(
                "the session has not been started",
                hint="write `async with session:`, or give the client to Runner.run",
            )
        return self._box

    async def _ensure_backend_started(self) -> None:
        if self._box is not None:
            return
        kept = self._kept_workspace()
        box = AsyncSandbox(self._policy, on_exit=self._on_exit, resume=kept, name="openai-agents")
        await box.open()
        self._box = box
        self._set_start_state_preserved(kept is not None)
        if (rule := self._policy.workspace) is not None and rule.mode == "overlay":
            self.state.workspace_id = box.workspace.id

    def _kept_workspace(self) -> Workspace | None:
        """Return the workspace of an earlier session, if it still exists and is one of the same directory."""
        if not self.state.workspace_id:
            return None
        try:
            found = Workspace.open(self.state.workspace_id)
        except NotFoundError:
            return None  # it had no changes, or the user committed or discarded them
        if found.path != self.state.manifest.root:
            raise PolicyError(
                f"the saved session names workspace {found.id}, which is not of {self.state.manifest.root}",
                hint="start a new session",
            )
        return found

    async def _prepare_backend_workspace(self) -> None:
        if self._policy.workspace is None:
            await self.box.files.mkdir(self.state.manifest.root, parents=True)

    async def _after_start_failed(self) -> None:
        await self._shutdown_backend()

    async def provision_manifest_accounts(self) -> None:
        """Refuse users and groups: inside there is only your own user."""
        if self.state.manifest.users or self.state.manifest.groups:
            raise PolicyError(
                "the manifest has users or groups, but a sandbox has only your own user",
                hint="remove `users` and `groups` from the manifest",
            )

    async def _shutdown_backend(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()

    async def running(self) -> bool:
        """Whether the sandbox lives."""
        gate = None if self._box is None else self._box.gate
        return gate is not None and not select.select([gate], [], [], 0)[0]

    def _prepare_exec_command(
        self, *command: str | Path, shell: bool | list[str], user: str | User | None
    ) -> list[str]:
        _refuse_user(user)
        return super()._prepare_exec_command(*command, shell=shell, user=None)

    async def _exec_internal(self, *command: str | Path, timeout: float | None = None) -> ExecResult:
        argv = [str(word) for word in command]
        try:
            result = _ran(
                await self.box.run(
                    argv,
                    cwd=self.state.manifest.root,
                    env=await self.state.manifest.environment.resolve(),
                    timeout=timeout,
                    grace=1,
                )
            )
        except StockadeError as error:
            raise ExecTransportError(command=argv, cause=error) from error
        if result.outcome is Outcome.TIMED_OUT:
            raise ExecTimeoutError(command=argv, timeout_s=timeout)
        return ExecResult(stdout=result.stdout, stderr=_errors(result), exit_code=result.exit_code)

    async def read(self, path: Path, *, user: str | User | None = None) -> io.IOBase:
        """Read a file below the workspace root, or below another path that the manifest grants."""
        return io.BytesIO(await self._read(path, user=user))

    async def _read_bounded(self, path: Path, *, max_bytes: int) -> bytes:
        return await self._read(path, length=max_bytes)

    async def _read(self, path: Path, *, length: int | None = None, user: str | User | None = None) -> bytes:
        _refuse_user(user)
        place = await self._validate_path_access(path)
        try:
            return await self.box.files.read(place, length=length)
        except FileNotFoundError as error:
            raise WorkspaceReadNotFoundError(path=place, cause=error) from error
        except StockadeError as error:
            raise WorkspaceArchiveReadError(path=place, cause=error) from error

    async def write(self, path: Path, data: io.IOBase, *, user: str | User | None = None) -> None:
        """Write a file below the workspace root; missing directories are made."""
        _refuse_user(user)
        place = await self._validate_path_access(path, for_write=True)
        content = await asyncio.to_thread(coerce_write_payload(path=place, data=data).stream.read)
        try:
            await self.box.files.write(place, content, parents=True)
        except StockadeError as error:
            raise WorkspaceArchiveWriteError(path=place, cause=error) from error

    async def persist_workspace(self) -> io.IOBase:
        """Return the files below the root as a tar stream, which a tar inside writes."""
        skipped = (f"--exclude=./{path.as_posix()}" for path in self._persist_workspace_skip_relpaths())
        root = Path(self.state.manifest.root)
        archive = cast(IO[bytes], tempfile.TemporaryFile())  # noqa: SIM115
        try:
            words = ["tar", "--no-wildcards", *sorted(skipped), "-cf", "-", "."]
            async with await self.box.start(words, cwd=root, stderr=subprocess.DEVNULL) as process:
                assert process.stdout is not None
                while piece := await process.stdout.read(_PIECE):
                    if archive.tell() + len(piece) > DOWNLOAD_LIMIT:
                        raise PolicyError(f"the workspace is larger than {DOWNLOAD_LIMIT} bytes")
                    await asyncio.to_thread(archive.write, piece)
                (await process.wait()).check()
            archive.seek(0)
        except StockadeError as error:
            archive.close()
            raise WorkspaceArchiveReadError(path=root, cause=error) from error
        return cast(io.IOBase, archive)

    async def hydrate_workspace(self, data: io.IOBase) -> None:
        """Unpack a tar stream below the root. A tar inside does it: a hostile one stays there."""
        root = Path(self.state.manifest.root)
        source = coerce_write_payload(path=root, data=data).stream
        try:
            words = ["tar", "--no-same-owner", "-xf", "-"]
            async with await self.box.start(
                words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            ) as process:
                assert process.stdin is not None
                while piece := await asyncio.to_thread(source.read, _PIECE):
                    process.stdin.write(piece)
                    await process.stdin.drain()
                process.stdin.close()
                (await process.wait()).check()
        except (StockadeError, ConnectionError) as error:
            raise WorkspaceArchiveWriteError(path=root, cause=error) from error


class StockadeSandboxClient(BaseSandboxClient[StockadeSandboxClientOptions | None]):
    """Makes sessions for sandbox agents, each in its own sandbox with the policy of this client.

    The files of a session are in the policy's workspace, else in a directory that is private to the sandbox.
    `on_exit` says what happens to the changes in an overlay workspace when a session ends: "keep"
    (the default) them for `stockade diff` and `stockade commit`, "discard" or "commit" them.
    """

    backend_id = "stockade"
    supports_default_options = True

    def __init__(self, policy: PolicyLike | None = None, *, on_exit: OnExit = "keep") -> None:
        self._policy = policy_or_default(policy)
        self._on_exit = valid_on_exit(on_exit)

    async def create(
        self,
        *,
        snapshot: SnapshotSpec | SnapshotBase | None = None,
        manifest: Manifest | None = None,
        options: StockadeSandboxClientOptions | None = None,
    ) -> SandboxSession:
        """Make a session; its start opens the sandbox."""
        manifest = manifest if manifest is not None else Manifest()
        self._validate_manifest_for_create(manifest)
        root = self._root(manifest.root)
        session_id = uuid.uuid4()
        state = StockadeSandboxSessionState(
            session_id=session_id,
            manifest=manifest.model_copy(update={"root": root}, deep=True),
            snapshot=resolve_snapshot(snapshot, str(session_id)),
        )
        return self._session(state)

    def _root(self, wanted: str) -> str:
        """Return where a session's files are. A manifest or a saved state cannot choose another directory."""
        rule = self._policy.workspace
        root = PRIVATE_ROOT if rule is None else os.path.realpath(rule.path)
        if wanted not in (_DEFAULT_ROOT, root):
            raise PolicyError(
                f"the manifest's root is {wanted}, but the files of this client's sessions are in {root}",
                hint=f"leave the root out, or write StockadeSandboxClient(Policy(workspace={wanted!r}))",
            )
        return root

    def _session(self, state: StockadeSandboxSessionState) -> SandboxSession:
        if any(grant.host_path is not None for grant in state.manifest.extra_path_grants):
            raise PolicyError(
                "the manifest grants paths of the host", hint="write them in the policy: Policy(read=[...])"
            )
        return self._wrap_session(StockadeSandboxSession(state, self._policy, self._on_exit))

    async def delete(self, session: SandboxSession) -> SandboxSession:
        """End the sandbox of a session. What happens to its changes was decided by `on_exit`."""
        await session.shutdown()
        return session

    async def resume(self, state: SandboxSessionState) -> SandboxSession:
        """Go on with a saved session: in its kept workspace, or in a new one that its snapshot fills."""
        if not isinstance(state, StockadeSandboxSessionState):
            raise TypeError(f"StockadeSandboxClient cannot resume a session of type {state.type!r}")
        state.assert_path_grants_rebound()
        self._root(state.manifest.root)
        return self._session(state)

    def deserialize_session_state(self, payload: dict[str, object]) -> SandboxSessionState:
        """Return the state that `serialize_session_state` wrote."""
        return self._deserialize_session_state_payload(
            cast(Mapping[str, object], payload), StockadeSandboxSessionState
        )


def _refuse_user(user: str | User | None) -> None:
    if user is not None:
        name: Any = user.name if isinstance(user, User) else user
        raise PolicyError(f"user = {name!r}: a sandbox has only your own user", hint="leave `user` out")
