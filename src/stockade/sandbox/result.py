"""How a run ended, as a value."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from stockade.errors import CommandError, DeniedError, LimitError, SetupError, TimeoutError
from stockade.sandbox.streams import Spilled
from stockade.workspace.layers import Change, Lost

if TYPE_CHECKING:
    from stockade.workspace.commit import Commit


class Outcome(enum.StrEnum):
    """Why a run ended. Compares equal to its name."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    TIMED_OUT = "timed-out"
    OUT_OF_MEMORY = "out-of-memory"
    LIMIT_EXCEEDED = "limit-exceeded"
    DENIED = "denied"
    SETUP_FAILED = "setup-failed"
    CANCELLED = "cancelled"


class Usage(msgspec.Struct, frozen=True):
    """What a run used, and who counted it.

    A cgroup counts every process; "rusage" counts those that were waited for, and its peak of memory is
    that of the largest one. What nobody counted is None.
    """

    wall: float = 0.0
    cpu_user: float = 0.0
    cpu_system: float = 0.0
    peak_memory: int = 0
    peak_tasks: int | None = None
    #: In the changed files of an overlay workspace, as they stand.
    bytes_written: int | None = None
    context_switches: int = 0
    source: dict[str, str] = msgspec.field(default_factory=lambda: {"cpu": "rusage", "memory": "rusage"})

    @property
    def cpu(self) -> float:
        """Processor time in all."""
        return self.cpu_user + self.cpu_system


class Enforced(msgspec.Struct, frozen=True):
    """One control: the clause that asked for it, how it is enforced, and how that was seen."""

    requested: str
    mechanism: str
    observed: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended, what it printed, used and changed, and what was enforced.

    >>> import stockade
    >>> stockade.run(["echo", "hello"]).text
    'hello\\n'
    """

    outcome: Outcome
    exit_code: int
    signal: int | None = None
    reason: str = ""
    hint: str = ""
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    spilled: tuple[Spilled, ...] = ()
    usage: Usage = Usage()
    controls: dict[str, Enforced] = {}
    changes: tuple[Change, ...] = ()
    workspace: str = ""
    #: Changes that could not be kept: under `limits.disk` they are in memory until the sandbox ends.
    lost: tuple[Lost, ...] = ()
    #: With `on_exit="commit"`: what was committed, or why nothing was.
    committed: Commit | None = None
    commit_error: str = ""
    plan: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command ran to its end and said that all was well."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")

    def check(self) -> Result:
        """Raise the error that matches the outcome, unless all is well."""
        if self.ok:
            return self
        kinds = {
            Outcome.TIMED_OUT: TimeoutError,
            Outcome.OUT_OF_MEMORY: LimitError,
            Outcome.LIMIT_EXCEEDED: LimitError,
            Outcome.DENIED: DeniedError,
            Outcome.SETUP_FAILED: SetupError,
        }
        raise kinds.get(self.outcome, CommandError)(self.reason, hint=self.hint)
