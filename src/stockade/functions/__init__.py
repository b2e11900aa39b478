"""Python functions in sandboxes, many calls at once, and interpreters that are started ahead of use.

>>> from stockade.functions import sandboxed
>>> @sandboxed
... def total(numbers):
...     return sum(numbers)
>>> total([1, 2, 3])
6
"""

from __future__ import annotations

from stockade.lazy import loader

TYPE_CHECKING = False  # importing it from typing takes longer than all of this
if TYPE_CHECKING:
    from stockade.functions.executor import BrokenSandboxError, SandboxExecutor
    from stockade.functions.reply import FunctionError, WorkerDiedError
    from stockade.functions.sandboxed_function import (
        AsyncStream,
        Call,
        CallOptions,
        SandboxedFunction,
        Stream,
        call,
        sandboxed,
        stream,
    )
    from stockade.functions.warm_python import WarmPython
    from stockade.linux.secure_buffer import SecureBuffer

__all__ = [
    "AsyncStream",
    "BrokenSandboxError",
    "Call",
    "CallOptions",
    "FunctionError",
    "SandboxExecutor",
    "SandboxedFunction",
    "SecureBuffer",
    "Stream",
    "WarmPython",
    "WorkerDiedError",
    "call",
    "sandboxed",
    "stream",
]

#: Public names and their modules, which load on first use.
_LAZY = dict.fromkeys(__all__, "stockade.functions.sandboxed_function") | {
    "BrokenSandboxError": "stockade.functions.executor",
    "FunctionError": "stockade.functions.reply",
    "SandboxExecutor": "stockade.functions.executor",
    "SecureBuffer": "stockade.linux.secure_buffer",
    "WarmPython": "stockade.functions.warm_python",
    "WorkerDiedError": "stockade.functions.reply",
}

if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = loader(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
