"""The sandbox of an isolated session, from its mounts to a shell that has run something."""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import SetupError, StockadeError
from stockade.resolve.environment import Environment, IdMaps
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.file_worker import FileWorkers
from stockade.sandbox.identity import run_as
from stockade.server.isolated.secret_names import passed_variables
from stockade.server.isolated.session_mounts import SessionMounts, session_mounts
from stockade.server.isolated.session_request import InvalidFieldError, SessionSpec
from stockade.server.wire.identity import require_ids
from stockade.server.wire.request_policy import narrowed
from stockade.sessions.bash import quoted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stockade.linux.cgroups import CgroupParents
    from stockade.policy import Policy
    from stockade.sandbox import AsyncShell
    from stockade.sandbox.workspace import Workspace

#: Seconds that a new shell has to answer for the first time.
READY = 30


class SandboxGround(msgspec.Struct, frozen=True):
    """What the sessions of one sandbox have in common."""

    #: The policy of the sandbox's own commands.
    policy: Policy
    #: The environment of the sandbox's own commands.
    environment: Environment
    #: The descriptors of the sandbox's directories, by path inside.
    trees: Mapping[str, int]
    #: Where sources of binds and writable paths may lie.
    writable_paths: Sequence[str]
    #: The variables of the sandbox that sessions may get.
    variables: Mapping[str, str]
    #: How many bytes the changes of one session may take; 0 for no limit.
    upper_max_bytes: int = 0
    #: The sandbox's cgroups, whose limits hold for its sessions too; None without.
    within: CgroupParents | None = None
    #: The descriptor of the sandbox's network namespace; -1 if the sandbox shares the host's.
    network: int = -1
    #: By what receipts of its runs are found.
    agent: str = ""


class SessionSandbox:
    """A living sandbox with a shell that is ready."""

    def __init__(
        self, box: AsyncSandbox, view: AsyncSandbox, mounts: SessionMounts, ids: IdMaps, start: str
    ) -> None:
        #: The sandbox itself, and the same sandbox as the session's user sees it.
        self.box, self.view = box, view
        self.shell: AsyncShell = view.shell(first=True)
        #: The users and groups inside.
        self.ids = ids
        #: For the file calls of the session.
        self.workers = FileWorkers(box, start=start)
        self._mounts = mounts

    @classmethod
    async def open(cls, spec: SessionSpec, ground: SandboxGround, name: str) -> SessionSandbox:
        """Raise the walls, start the shell, and return when it has run something."""
        require_ids(ground.environment.ids, spec.uid, spec.gid)
        mounts = session_mounts(spec, ground.trees, ground.writable_paths)
        box = AsyncSandbox(
            session_policy(spec, ground),
            on_exit="discard",
            name=name,
            who={"agent": ground.agent} if ground.agent else None,
            _environment=session_environment(spec, ground, mounts),
        )
        try:
            await box.open()
            try:
                view = box if spec.uid is None else run_as(box, spec.uid, spec.gid)
                opened = cls(box, view, mounts, ground.environment.ids, spec.directory)
                await opened._greet(spec)
                return opened
            except BaseException:
                await box.close()
                raise
        except BaseException:
            mounts.close()
            raise

    async def _greet(self, spec: SessionSpec) -> None:
        """Run the first command, which enters the session's directory."""
        try:
            result = await self.shell.run(f"builtin cd -- {quoted(spec.directory)}", timeout=READY)
        except SetupError as error:
            if error.errno not in (errno.ENOENT, errno.EACCES):
                raise
            raise SetupError(
                "isolated sessions need bash, and the sandbox's image has none",
                stage="session",
                hint="commands run in sh; ask for an image with bash",
            ) from None
        if result.ok:
            return
        if self.ended:
            raise SetupError(f"the session's shell did not start: {result.reason}", stage="session")
        why = result.stderr_text.strip().rpartition(": ")[2] or result.reason
        raise InvalidFieldError("workspace", f"the session cannot enter {spec.directory}: {why}")

    @property
    def ended(self) -> bool:
        """Whether the shell has ended."""
        return self.shell.ended

    def overlays(self) -> dict[str, Workspace]:
        """Return the changes of each overlay, by its path inside."""
        return self.box._overlays()

    async def restore(self, state: bytes) -> None:
        """Give the shell the state of an earlier one."""
        await self.shell.run(state.decode("utf-8", "surrogateescape"), timeout=READY)

    async def close(self) -> None:
        """End everything inside and remove the layers."""
        try:
            with contextlib.suppress(StockadeError):  # what could not be removed is swept later
                await self.workers.close()
                await self.shell.close()
                await self.box.close()
        finally:
            self._mounts.close()


def session_policy(spec: SessionSpec, ground: SandboxGround) -> Policy:
    """Return the policy of a session: the sandbox's, with the session's variables and disk limit."""
    policy = ground.policy
    limits = policy.limits
    if ground.upper_max_bytes and any(one.mode == "overlay" for one in spec.overlays):
        most = min(filter(None, (limits.disk, ground.upper_max_bytes)))
        limits = msgspec.structs.replace(limits, disk=most)
    net = policy.net if spec.share_net and ground.network < 0 else ()
    variables = passed_variables(ground.variables, spec.env_passthrough)
    policy = msgspec.structs.replace(policy, limits=limits, net=net, env=variables)
    return narrowed(policy, spec.policy) if spec.policy is not None else policy


def session_environment(spec: SessionSpec, ground: SandboxGround, mounts: SessionMounts) -> Environment:
    """Return the environment of a session: the sandbox's, with the session's mounts and network."""
    return msgspec.structs.replace(
        ground.environment,
        mounts=mounts.mounts,
        network=ground.network if spec.share_net else -1,
        within=ground.within,
    )
