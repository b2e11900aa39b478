"""Python in sandboxes: functions, the sealed channel, the executor, and interpreters started ahead of use."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.functions.executor import BrokenSandboxError, SandboxExecutor
    from stockade.functions.reply import FunctionError, RemoteError, WorkerDiedError
    from stockade.functions.sandboxed_function import AsyncStream, SandboxedFunction, Stream, sandboxed
    from stockade.functions.secure_buffer import SecureBuffer
    from stockade.functions.warm_python import WarmPython

__all__ = [
    "AsyncStream",
    "BrokenSandboxError",
    "FunctionError",
    "RemoteError",
    "SandboxExecutor",
    "SandboxedFunction",
    "SecureBuffer",
    "Stream",
    "WarmPython",
    "WorkerDiedError",
    "sandboxed",
]

#: Public names and their modules, which load on first use.
_LAZY = {
    "AsyncStream": "stockade.functions.sandboxed_function",
    "BrokenSandboxError": "stockade.functions.executor",
    "FunctionError": "stockade.functions.reply",
    "RemoteError": "stockade.functions.reply",
    "SandboxExecutor": "stockade.functions.executor",
    "SandboxedFunction": "stockade.functions.sandboxed_function",
    "SecureBuffer": "stockade.functions.secure_buffer",
    "Stream": "stockade.functions.sandboxed_function",
    "WarmPython": "stockade.functions.warm_python",
    "WorkerDiedError": "stockade.functions.reply",
    "sandboxed": "stockade.functions.sandboxed_function",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value
