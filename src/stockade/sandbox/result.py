"""How a run ended, as a value."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

import msgspec

from stockade.controls import Grade
from stockade.errors import CommandError, DeniedError, LimitError, SetupError, TimeoutError
from stockade.sandbox.streams import Spilled
from stockade.workspace.layers import Change, Lost

if TYPE_CHECKING:
    from stockade.receipt.statement import Receipt
    from stockade.workspace.commit import Commit


#: How much of a text an error or a prompt shows, and how much of the errors is searched for the last line.
SHORT = 200
LAST = 10_000


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
    """One control: the clause that asked for it, how it is enforced, how that was seen, and how well."""

    requested: str
    mechanism: str
    observed: str
    grade: Grade


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
    #: What was enforced and how it ended, signed.
    receipt: Receipt | None = None

    @property
    def ok(self) -> bool:
        """Whether the command ran to its end and said that all was well."""
        return self.outcome is Outcome.EXITED and self.exit_code == 0

    @property
    def text(self) -> str:
        """Standard output as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode("utf-8", "replace")

    def __repr__(self) -> str:
        """What one wants to see at a prompt; everything else is there by name."""
        shown: dict[str, object] = {"outcome": str(self.outcome), "exit_code": self.exit_code}
        shown |= {"stdout": self.stdout, "stderr": self.stderr}
        if not self.ok:
            shown["reason"] = self.reason
        if self.changes:
            shown["changes"] = len(self.changes)
        return (
            f"{type(self).__name__}({', '.join(f'{name}={_short(value)}' for name, value in shown.items())})"
        )

    def check(self) -> Result:
        """Raise the error that matches the outcome, unless all is well.

        The error has this result as its `result`, and says what the command said last.
        """
        if self.ok:
            return self
        kinds = {
            Outcome.TIMED_OUT: TimeoutError,
            Outcome.OUT_OF_MEMORY: LimitError,
            Outcome.LIMIT_EXCEEDED: LimitError,
            Outcome.DENIED: DeniedError,
            Outcome.SETUP_FAILED: SetupError,
        }
        lines = [] if self.hint else self.stderr[-LAST:].decode("utf-8", "replace").split("\n")
        said = next((line.strip() for line in reversed(lines) if line.strip()), "")
        last = f"; its last words: {_short(said)}" if said else ""
        error = kinds.get(self.outcome, CommandError)(f"{self.reason}{last}", hint=self.hint)
        error.result, error.receipt = self, self.receipt
        raise error


def _short(value: object) -> str:
    """As Python writes it, which escapes control characters; cut where it is long."""
    text = repr(value)
    return text if len(text) <= SHORT else f"{text[: SHORT - 1]}…"
