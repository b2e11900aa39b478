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

TYPE_CHECKING = False  # typing, where the name is from, takes as long to load as an interpreter to start
if TYPE_CHECKING:
    from typing import Any

    from stockade.agents.handler import agent
    from stockade.controls import Control
    from stockade.host import host
    from stockade.inside import delegate
    from stockade.live.background import Background
    from stockade.live.confine import confine
    from stockade.live.interpreter import Interpreter
    from stockade.live.pool import Pool
    from stockade.live.shell import Shell
    from stockade.live.spawner import Spawner
    from stockade.policy import Limits, Policy, Reuse, Syscalls, WorkspaceRule
    from stockade.receipt.statement import Receipt
    from stockade.receipt.verify import verify
    from stockade.sandbox.aio import AsyncProcess, AsyncSandbox
    from stockade.sandbox.process import Process
    from stockade.sandbox.result import Outcome, Result
    from stockade.sandbox.sandbox import Sandbox, run
    from stockade.worker.executor import SandboxExecutor
    from stockade.worker.functions import sandboxed
    from stockade.worker.secure import SecureBuffer
    from stockade.worker.warm import WarmPython
    from stockade.workspace.workspace import Workspace

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

#: Public names whose modules are loaded when they are first used: `import stockade` stays cheap.
_LAZY = {
    "Control": "stockade.controls",
    "Limits": "stockade.policy",
    "Policy": "stockade.policy",
    "Reuse": "stockade.policy",
    "Syscalls": "stockade.policy",
    "WorkspaceRule": "stockade.policy",
    "AsyncProcess": "stockade.sandbox.aio",
    "AsyncSandbox": "stockade.sandbox.aio",
    "Outcome": "stockade.sandbox.result",
    "Pool": "stockade.live.pool",
    "Process": "stockade.sandbox.process",
    "Receipt": "stockade.receipt.statement",
    "Result": "stockade.sandbox.result",
    "Background": "stockade.live.background",
    "Interpreter": "stockade.live.interpreter",
    "Shell": "stockade.live.shell",
    "Spawner": "stockade.live.spawner",
    "Sandbox": "stockade.sandbox.sandbox",
    "SandboxExecutor": "stockade.worker.executor",
    "SecureBuffer": "stockade.worker.secure",
    "WarmPython": "stockade.worker.warm",
    "Workspace": "stockade.workspace.workspace",
    "agent": "stockade.agents.handler",
    "delegate": "stockade.inside",
    "confine": "stockade.live.confine",
    "run": "stockade.sandbox.sandbox",
    "sandboxed": "stockade.worker.functions",
    "verify": "stockade.receipt.verify",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "host":
        return importlib.import_module("stockade.host")
    if name not in _LAZY:
        raise AttributeError(f"module 'stockade' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
