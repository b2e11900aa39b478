"""Python functions in sandboxes, many calls at once, and interpreters that are started ahead of use.

>>> from stockade.functions import sandboxed
>>> @sandboxed
... def total(numbers):
...     return sum(numbers)
>>> total([1, 2, 3])
6
"""

from __future__ import annotations

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
    from stockade.functions.secure_buffer import SecureBuffer
    from stockade.functions.warm_python import WarmPython

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

#: Names whose module is not `sandboxed_function`; all load on first use.
_MODULES = {
    "BrokenSandboxError": "executor",
    "FunctionError": "reply",
    "SandboxExecutor": "executor",
    "SecureBuffer": "secure_buffer",
    "WarmPython": "warm_python",
    "WorkerDiedError": "reply",
}


def _load(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stockade.functions' has no attribute {name!r}")
    import importlib

    module = importlib.import_module(f"stockade.functions.{_MODULES.get(name, 'sandboxed_function')}")
    value: object = getattr(module, name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = _load


def __dir__() -> list[str]:
    return sorted(__all__)
