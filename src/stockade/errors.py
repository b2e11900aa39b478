"""The errors that Stockade raises.

Each error says what was refused and why, and carries a `hint`: what to
write, install or change so that the next attempt succeeds.
"""

from __future__ import annotations

import builtins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.receipt.statement import Receipt
    from stockade.result import Result


def one_line(text: str) -> str:
    """Escape newlines: one in a file name must not begin a line that looks like Stockade's own."""
    return text.replace("\n", "\\n")


def typed(path: str) -> str:
    """Quote a path for a shell command that an error suggests: the path may be untrusted."""
    import shlex

    return shlex.quote(path)


class StockadeError(Exception):
    """The base class of Stockade's errors.

    `receipt` and `result` are those of the run that was refused or failed, if it has them.
    """

    receipt: Receipt | None = None
    result: Result | None = None

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        return str(self.args[0])


class PolicyError(StockadeError):
    """The policy is malformed, contradicts itself, or asks for something that Stockade always refuses."""


class UnsupportedError(StockadeError):
    """No backend on this host enforces the whole policy.

    `missing` maps each backend that was considered to the controls it lacks, each with the reason.
    """

    def __init__(
        self, message: str, *, missing: dict[str, dict[str, str]] | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing or {}


class SetupError(StockadeError):
    """Stockade could not raise the walls, so it ran nothing.

    `stage` names the step that failed, `errno` is the kernel's error number.
    """

    def __init__(self, message: str, *, stage: str = "", errno: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stage = stage
        self.errno = errno


class DeniedError(StockadeError):
    """A wall ended the run."""


class LimitError(StockadeError):
    """Stockade ended the run because it used more than its limits allow."""


class TimeoutError(StockadeError, builtins.TimeoutError):
    """Stockade ended the run because it took too long."""


class CommandError(StockadeError):
    """The command itself failed: it exited with a non-zero code, or a signal killed it."""


class ConflictError(StockadeError):
    """The host's files have changed since the workspace was opened, so nothing was committed.

    `paths` names those files. If it is empty, the workspace itself has changed since it was shown.
    """

    def __init__(self, message: str, *, paths: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.paths = paths


class ReceiptError(StockadeError):
    """A receipt failed verification, or could not be made.

    `failure` names the kind of failure for programs: "malformed", "signature", "unknown-key",
    "swapped", "missing-link", "broken-link", "policy", "weaker", "result", "damaged" or "not-made".
    `result` is the result of a run whose receipt could not be made.
    """

    def __init__(self, message: str, *, failure: str, hint: str = "", result: Result | None = None) -> None:
        super().__init__(message, hint=hint)
        self.failure = failure
        self.result = result


class NotFoundError(StockadeError):
    """The named thing does not exist."""
