"""Everything Stockade raises on purpose.

Each error says what was refused, by what, and carries a `hint`: what to
write, install or change so that the next attempt succeeds.
"""

from __future__ import annotations

import builtins

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.receipt.statement import Receipt
    from stockade.sandbox.result import Result


def one_line(text: str) -> str:
    """Text of which a file name is a part, where a newline in that must not begin a line of ours."""
    return text.replace("\n", "\\n")


class StockadeError(Exception):
    """The base of every error that Stockade raises itself.

    `receipt` is that of the run that was refused or failed, where there is one; `result` how that run ended.
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
    """The policy is malformed, contradicts itself, or asks for what is refused on principle."""


class UnsupportedError(StockadeError):
    """No backend on this host enforces the whole policy.

    `missing` maps each backend that was considered to the controls it lacks,
    and each of those to the reason.
    """

    def __init__(
        self, message: str, *, missing: dict[str, dict[str, str]] | None = None, hint: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.missing = missing or {}


class SetupError(StockadeError):
    """The walls could not be raised, so nothing was run.

    `stage` names the step that failed and `errno` the kernel's answer.
    """

    def __init__(self, message: str, *, stage: str = "", errno: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.stage = stage
        self.errno = errno


class DeniedError(StockadeError):
    """A wall ended the run."""


class LimitError(StockadeError):
    """The run was ended because it used more than its limits allow."""


class TimeoutError(StockadeError, builtins.TimeoutError):
    """The run was ended because its time was over."""


class CommandError(StockadeError):
    """The command failed by itself: a non-zero exit, or a signal."""


class ConflictError(StockadeError):
    """The host's files have changed since the workspace was opened, so nothing was committed.

    `paths` names them.
    """

    def __init__(self, message: str, *, paths: tuple[str, ...] = (), hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.paths = paths


class ReceiptError(StockadeError):
    """A receipt is not what it should be, or could not be made.

    `failure` names the way in which it fails, for programs: "malformed", "signature", "unknown-key",
    "swapped", "missing-link", "broken-link", "policy", "weaker", "result", "damaged" or "not-made".
    `result` is the result of a run whose receipt could not be made.
    """

    def __init__(self, message: str, *, failure: str, hint: str = "", result: Result | None = None) -> None:
        super().__init__(message, hint=hint)
        self.failure = failure
        self.result = result


class NotFoundError(StockadeError):
    """What was named is not there."""
