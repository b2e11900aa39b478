"""The errors that Stockade raises.

Each error says what was refused and why, and carries a `hint`: what to
write, install or change so that the next attempt succeeds. A traceback shows
the hint below the message.

If Python has a class for an error, Stockade's class derives from it: a file that
is missing inside raises a `FileNotFoundError`, and every call of `box.files`
that the kernel refuses raises an `OSError` with its `errno` and `filename`.
"""

from __future__ import annotations

import builtins
import errno
import os

import stockade

__all__ = [
    "CommandError",
    "ConflictError",
    "DeniedError",
    "DiskFullError",
    "FileError",
    "FileExistsError",
    "IsADirectoryError",
    "LimitError",
    "NotADirectoryError",
    "NotFoundError",
    "PolicyError",
    "ReceiptError",
    "SetupError",
    "StockadeError",
    "TimeoutError",
    "UnsupportedError",
]


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

    receipt: stockade.Receipt | None = None
    result: stockade.Result | None = None
    _hint = ""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def hint(self) -> str:
        """What to do so that the next attempt succeeds; empty if Stockade does not know."""
        return self._hint

    @hint.setter
    def hint(self, words: str) -> None:
        # A note is what tracebacks, notebooks and loggers print below the message; `str` stays the message.
        before = f"hint: {self._hint}"
        self.__notes__ = [note for note in getattr(self, "__notes__", ()) if note != before]
        self._hint = words
        if words:
            self.add_note(f"hint: {words}")

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        return self.message  # an OSError would write "[Errno 2]" and the path before its words

    def __reduce__(self) -> tuple[object, ...]:
        # Some kinds need more than a message to be made, and an OSError keeps its fields outside its dict.
        return _unpickle, (type(self), self.args), vars(self) | _os_fields(self)


def _unpickle(kind: type[StockadeError], args: tuple[object, ...]) -> StockadeError:
    """Make an error without its `__init__`; pickle sets its attributes afterwards."""
    error = kind.__new__(kind)
    error.args = args
    return error


def _os_fields(error: StockadeError) -> dict[str, object]:
    if not isinstance(error, OSError):
        return {}
    return {name: getattr(error, name) for name in ("errno", "strerror", "filename")}


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


def unmade_sandbox(hint: str) -> SetupError:
    """Return the error that a program or a model reads if its sandbox cannot be made.

    The reason itself may say where a link leads that a program made, and whether its target exists.
    """
    return SetupError("the sandbox could not be made", stage="sandbox", hint=hint)


class DeniedError(StockadeError, PermissionError):
    """A wall ended the run, or refused a file."""


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

    `failure` names the kind of failure for programs: "malformed", "signature", "unsigned", "unknown-key",
    "swapped", "missing-link", "broken-link", "policy", "weaker", "result", "damaged" or "not-made".
    `result` is the result of a run whose receipt could not be made.
    """

    def __init__(
        self, message: str, *, failure: str, hint: str = "", result: stockade.Result | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.failure = failure
        self.result = result


class NotFoundError(StockadeError, FileNotFoundError):
    """The named thing does not exist: a file inside, a workspace, a snapshot, a receipt."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.errno, self.strerror = errno.ENOENT, os.strerror(errno.ENOENT)


class FileError(StockadeError, OSError):
    """A file of a sandbox cannot be used in this way. `errno` is the kernel's reason, `filename` the path."""


class FileExistsError(FileError, builtins.FileExistsError):
    """A file of a sandbox exists already."""


class IsADirectoryError(FileError, builtins.IsADirectoryError):
    """A path of a sandbox names a directory where a file is needed."""


class NotADirectoryError(FileError, builtins.NotADirectoryError):
    """A path of a sandbox leads through a file, or names one where a directory is needed."""


class DiskFullError(LimitError, FileError):
    """A write of `box.files` found no room: limits.disk is used up, or the disk itself."""
