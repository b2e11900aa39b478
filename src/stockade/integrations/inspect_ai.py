"""Inspect's `SandboxEnvironment`: each sample of an evaluation has a sandbox of its own.

Inspect finds it by its entry point, so `Task(sandbox="stockade")` or `inspect eval --sandbox stockade` is all
that an evaluation needs; `("stockade", "policy.toml")` or a `StockadeConfig` gives it a policy. The process
that runs the evaluation supervises the sandboxes: they end with their samples, and at the latest with it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from typing import Any, Literal, overload

from stockade.errors import LimitError, SetupError
from stockade.integrations import needs_extra
from stockade.resolve.environment import Environment, IdMaps
from stockade.result import Outcome, Result
from stockade.runs.io.captured_output import CapturedOutput
from stockade.runs.options import LONGEST_NAME
from stockade.sandbox.async_sandbox import AsyncSandbox
from stockade.sandbox.attach_listener import AttachListener
from stockade.sandbox.identity import run_as

with needs_extra("inspect"):
    from inspect_ai.util import (
        ExecResult,
        OutputLimitExceededError,
        SandboxConnection,
        SandboxEnvironment,
        SandboxEnvironmentConfigType,
        SandboxEnvironmentLimits,
        SandboxUnavailableError,
        SandboxUserUnsupportedError,
        sandboxenv,
    )
    from inspect_ai.util import concurrency as limited
    from pydantic import BaseModel

__all__ = ["StockadeConfig", "StockadeSandboxEnvironment"]

#: The beginning of the names that `stockade ps` shows.
NAME = "inspect"
#: The users of a private environment that have names.
USERS = {"root": 0, "nobody": 65534}
#: The digits of the highest id.
LONGEST_ID = 10


class StockadeConfig(BaseModel, frozen=True, extra="forbid"):
    """The configuration of a task or sample: a policy file, or the clauses of a policy.

    `StockadeConfig(policy={"limits": {"memory": "512M"}})`, or `StockadeConfig(policy="policy.toml")`.

    Programs run as the caller and without any capability. With `users` they are root of a private environment
    instead, over ids that no user of the machine has, and `exec(user=…)` can name others: `"nobody"` or a
    number. The policy then has no workspace; an ordinary user needs subordinate ids for the others.
    """

    policy: str | dict[str, Any] = {}
    users: bool = False

    def __hash__(self) -> int:
        """Return the hash of what it serializes to: Inspect groups samples by their configuration."""
        return hash(self.model_dump_json())


@sandboxenv(name="stockade")
class StockadeSandboxEnvironment(SandboxEnvironment):
    """One sandbox for one sample. Relative paths count from the policy's workspace, else from a private home.

    Changes in an overlay workspace are discarded with the sandbox: an evaluation reads what it needs with
    `read_file`, and never changes files of the host.
    """

    def __init__(self, box: AsyncSandbox, ids: IdMaps | None = None) -> None:
        """Take an open sandbox, which `sample_cleanup` closes, and the users of a private environment."""
        super().__init__()
        self._box = box
        self._ids = ids
        self._files = box.files
        self._listener: AttachListener | None = None

    @property
    def id(self) -> str:
        """The sandbox's id, as `stockade ps` shows it."""
        return self._box.id

    @classmethod
    async def sample_init(
        cls, task_name: str, config: SandboxEnvironmentConfigType | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        """Open the sandbox of a sample."""
        chosen = StockadeConfig(policy=config or {}) if config is None or isinstance(config, str) else config
        if not isinstance(chosen, StockadeConfig):
            raise TypeError(
                f"the stockade sandbox takes a policy file or a StockadeConfig, not {type(config).__name__}"
            )
        ids = IdMaps.of_caller() if chosen.users else None
        box = AsyncSandbox(
            chosen.policy,
            on_exit="discard",
            name=_name(task_name),
            who={"agent": NAME},
            # Without mounts of its own: all that programs write is in memory, and nothing stays.
            _environment=None if ids is None else Environment((), ids),
        )
        await box.open()
        own = cls(box, ids)
        if ids is not None:
            await own._files.chmod(".", 0o755)  # other users start there too
        return {"default": own}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: SandboxEnvironmentConfigType | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        """End the sandboxes of a sample, with everything that runs in them."""
        for environment in environments.values():
            own = environment.as_type(cls)
            own._files.close()
            if own._listener is not None:
                await own._listener.close()
            await own._box.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """End one sandbox by its id, or remove what killed evaluations left behind."""
        import asyncio

        from stockade.linux.user import Caller
        from stockade.runs.register import register
        from stockade.state import state_dir

        caller = Caller.current()
        state = state_dir(caller.environ, caller.home)
        if id is None:
            await asyncio.to_thread(register.sweep, state)
        else:
            await asyncio.to_thread(register.stop, state, register.find(state, id), now=False)

    @classmethod
    def config_deserialize(cls, config: dict[str, Any]) -> BaseModel:
        """Return the configuration that a log has."""
        return StockadeConfig(**config)

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return the command that opens a shell in this sandbox; the first call lets people in."""
        if user is not None and self._as_user(user) is not self._box:
            raise NotImplementedError("shells in the sandbox are the default user's")
        if self._box.ended:
            raise ConnectionError("the sandbox has ended")
        if self._listener is None:
            self._listener = AttachListener(self._box)
        return SandboxConnection(type="stockade", command=f"stockade attach {self.id}")

    def default_polling_interval(self) -> float:
        """Ask often: a call into a sandbox on this machine takes a millisecond."""
        return 0.2

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command; of each stream the last part is kept.

        A command that timed out is not tried again: its time was used inside, not on a way there.
        """
        box = self._box if user is None else self._as_user(user)
        if box is not self._box:
            env = {"HOME": "/tmp", **(env or {})}
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        stdout, stderr = CapturedOutput(limit, keep="end"), CapturedOutput(limit, keep="end")
        try:
            async with _its_turn(concurrency):
                result = await box.run(
                    cmd,
                    input=b"" if input is None else input,
                    cwd=cwd,
                    env=env,
                    timeout=timeout,
                    on_stdout=stdout,
                    on_stderr=stderr,
                )
        except SetupError as error:
            raise SandboxUnavailableError(str(error)) from error
        _raise_unless_started(result)
        # What only Stockade knows, such as a limit that was exceeded, comes after what the program printed.
        words = "" if result.outcome in (Outcome.EXITED, Outcome.SIGNALLED) else f"{result.reason}\n"
        return ExecResult(result.ok, result.exit_code, stdout.text, stderr.text + words)

    def _as_user(self, user: str) -> AsyncSandbox:
        """Return the sandbox whose commands run as that user, by name or number."""
        if self._ids is None:
            if not _is_caller(user):
                raise SandboxUserUnsupportedError(
                    f"commands in this sandbox run as {_caller_name()}, and not as {user!r}: "
                    "StockadeConfig(users=True) makes one with other users"
                )
            return self._box
        number = user.isascii() and user.isdecimal() and len(user) <= LONGEST_ID
        uid = int(user) if number else USERS.get(user, -1)
        if not self._ids.has_uid(uid) or not self._ids.has_gid(uid):
            why = self._ids.reason or "it has root, nobody and the numbers up to 65535"
            raise SandboxUserUnsupportedError(f"this sandbox has no user {user!r}: {why}")
        return self._box if uid == 0 else run_as(self._box, uid, uid)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file, with the directories above it."""
        await self._files.write(file, contents, parents=True)

    @overload
    async def read_file(self, file: str, text: Literal[True] = True) -> str: ...

    @overload
    async def read_file(self, file: str, text: Literal[False]) -> bytes: ...

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Read a file up to Inspect's limit."""
        try:
            content = await self._files.read(file, limit=SandboxEnvironmentLimits.MAX_READ_FILE_SIZE)
        except LimitError as error:
            raise OutputLimitExceededError(SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR, None) from error
        return content.decode("utf-8") if text else content


def _its_turn(concurrency: bool) -> contextlib.AbstractAsyncContextManager[object]:
    """Wait until Inspect lets one more program run on this machine, if the caller asks for that."""
    if not concurrency:
        return contextlib.nullcontext()
    # The same name as for programs that Inspect starts itself, whose number `max_subprocesses` sets.
    return limited("subprocesses", os.cpu_count() or 1)


def _raise_unless_started(result: Result) -> None:
    """Raise what Inspect expects if a command timed out, may not be executed, or no command could start.

    A command that does not exist is a result like any other that fails.
    """
    if result.outcome is Outcome.TIMED_OUT:
        raise TimeoutError(result.reason)
    if result.outcome is Outcome.DENIED or (result.outcome, result.exit_code) == (Outcome.SETUP_FAILED, 126):
        raise PermissionError(result.reason)
    if result.outcome is Outcome.CANCELLED:
        raise SandboxUnavailableError(result.reason)


def _name(task: str) -> str:
    """Return the sandbox's name in `stockade ps`: that of the task, as far as a name may have it."""
    words = "".join(letter if letter.isalnum() or letter in "-_./" else "-" for letter in task)
    return f"{NAME}-{words}"[:LONGEST_NAME].strip()


def _is_caller(user: str) -> bool:
    """Whether a name or number is that of the user who runs the evaluation, as whom programs run inside."""
    return user in (str(os.geteuid()), _caller_name())


def _caller_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
