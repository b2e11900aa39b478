"""Errors of the system before a run, such as too few descriptors, turned into a `SetupError`."""

from __future__ import annotations

import errno
import os

from stockade.errors import SetupError, StockadeError

HINTS = dict.fromkeys(
    (errno.EMFILE, errno.ENOMEM, errno.EFBIG, errno.EAGAIN),
    "this process has reached one of its limits: see `ulimit -a`",
) | {
    errno.ENFILE: "this machine has no open files left: see `sysctl fs.file-max`",
    errno.ENOSPC: "free some space, or set STOCKADE_HOME to a directory elsewhere",
    errno.EDQUOT: "free some space, or set STOCKADE_HOME to a directory elsewhere",
}


class setup_errors:
    """Turn OSError and MemoryError of the statement into `SetupError`: the program has not been started."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, StockadeError):
            return
        if isinstance(error, OSError):
            number = error.errno or 0
            raise SetupError(
                f"nothing was run: {error.strerror}",
                stage="supervisor",
                errno=number,
                hint=HINTS.get(number, "`stockade doctor` shows what this machine can do"),
            ) from error
        if isinstance(error, MemoryError):
            why = os.strerror(errno.ENOMEM)
            raise SetupError(
                f"nothing was run: {why}", stage="supervisor", errno=errno.ENOMEM, hint=HINTS[errno.ENOMEM]
            ) from error
