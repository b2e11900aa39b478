"""Stockade runs code you do not trust behind walls the kernel keeps.

>>> import stockade
>>> result = stockade.run(["python3", "-c", "print(6 * 7)"])
>>> result.outcome, result.text
(<Outcome.EXITED: 'exited'>, '42\\n')
"""

from __future__ import annotations

from stockade._version import __version__
from stockade.errors import (
    CommandError,
    ConflictError,
    DeniedError,
    LimitError,
    NotFoundError,
    PolicyError,
    ReceiptError,
    SetupError,
    StockadeError,
    TimeoutError,
    UnsupportedError,
)

TYPE_CHECKING = False  # importing it from typing takes as long as starting the interpreter
if TYPE_CHECKING:
    from typing import Any

    from stockade import functions, inside, policy, receipt, result, sandbox, workspace  # noqa: F401
    from stockade.agents.handler import agent
    from stockade.controls import Control
    from stockade.functions.executor import SandboxExecutor
    from stockade.functions.sandboxed_function import sandboxed
    from stockade.functions.secure_buffer import SecureBuffer
    from stockade.functions.warm_python import WarmPython
    from stockade.host import host
    from stockade.inside.delegate_request import delegate
    from stockade.policy import Limits, Policy, Reuse, Syscalls, WorkspaceRule
    from stockade.receipt.statement import Receipt
    from stockade.receipt.verify import verify
    from stockade.result import Outcome, Result
    from stockade.sandbox.async_sandbox import AsyncProcess, AsyncSandbox
    from stockade.sandbox.confine import confine
    from stockade.sandbox.pool import Pool
    from stockade.sandbox.process import Process
    from stockade.sandbox.sandbox import Sandbox, run
    from stockade.sandbox.spawner import Spawner
    from stockade.sandbox.workspace import Workspace
    from stockade.sessions.background import Background
    from stockade.sessions.interpreter import Interpreter
    from stockade.sessions.shell import Shell

__all__ = [
    "AsyncProcess",
    "AsyncSandbox",
    "Background",
    "CommandError",
    "ConflictError",
    "Control",
    "DeniedError",
    "Interpreter",
    "LimitError",
    "Limits",
    "NotFoundError",
    "Outcome",
    "Policy",
    "PolicyError",
    "Pool",
    "Process",
    "Receipt",
    "ReceiptError",
    "Result",
    "Reuse",
    "Sandbox",
    "SandboxExecutor",
    "SecureBuffer",
    "SetupError",
    "Shell",
    "Spawner",
    "StockadeError",
    "Syscalls",
    "TimeoutError",
    "UnsupportedError",
    "WarmPython",
    "Workspace",
    "WorkspaceRule",
    "__version__",
    "agent",
    "confine",
    "delegate",
    "host",
    "run",
    "sandboxed",
    "verify",
]

#: Public names and their modules, which load on first use, so that `import stockade` stays cheap.
_LAZY = {
    "Control": "stockade.controls",
    "Limits": "stockade.policy",
    "Policy": "stockade.policy",
    "Reuse": "stockade.policy",
    "Syscalls": "stockade.policy",
    "WorkspaceRule": "stockade.policy",
    "AsyncProcess": "stockade.sandbox.async_sandbox",
    "AsyncSandbox": "stockade.sandbox.async_sandbox",
    "Outcome": "stockade.result",
    "Pool": "stockade.sandbox.pool",
    "Process": "stockade.sandbox.process",
    "Receipt": "stockade.receipt.statement",
    "Result": "stockade.result",
    "Background": "stockade.sessions.background",
    "Interpreter": "stockade.sessions.interpreter",
    "Shell": "stockade.sessions.shell",
    "Spawner": "stockade.sandbox.spawner",
    "Sandbox": "stockade.sandbox.sandbox",
    "SandboxExecutor": "stockade.functions.executor",
    "SecureBuffer": "stockade.functions.secure_buffer",
    "WarmPython": "stockade.functions.warm_python",
    "Workspace": "stockade.sandbox.workspace",
    "agent": "stockade.agents.handler",
    "delegate": "stockade.inside.delegate_request",
    "confine": "stockade.sandbox.confine",
    "run": "stockade.sandbox.sandbox",
    "sandboxed": "stockade.functions.sandboxed_function",
    "verify": "stockade.receipt.verify",
}
#: The packages that have the other names which users write.
_PACKAGES = ("functions", "host", "inside", "policy", "receipt", "result", "sandbox", "workspace")


def __getattr__(name: str) -> Any:
    import importlib

    if name in _PACKAGES:
        return importlib.import_module(f"stockade.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'stockade' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
