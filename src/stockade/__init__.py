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

    from stockade import client, functions, inside, policy, receipt, result, sandbox, workspace  # noqa: F401
    from stockade.agents.handler import agent
    from stockade.functions import FunctionError, SandboxExecutor, sandboxed
    from stockade.host import Host
    from stockade.policy import Policy
    from stockade.receipt import Receipt, verify
    from stockade.result import Change, Outcome, Result
    from stockade.sandbox import (
        AsyncSandbox,
        Pool,
        Sandbox,
        Spawner,
        Workspace,
        confine,
        run,
        run_async,
    )

__all__ = [
    "AsyncSandbox",
    "Change",
    "CommandError",
    "ConflictError",
    "DeniedError",
    "FunctionError",
    "Host",
    "LimitError",
    "NotFoundError",
    "Outcome",
    "Policy",
    "PolicyError",
    "Pool",
    "Receipt",
    "ReceiptError",
    "Result",
    "Sandbox",
    "SandboxExecutor",
    "SetupError",
    "Spawner",
    "StockadeError",
    "TimeoutError",
    "UnsupportedError",
    "Workspace",
    "__version__",
    "agent",
    "confine",
    "run",
    "run_async",
    "sandboxed",
    "verify",
]

#: Public names and their modules, which load on first use, so that `import stockade` stays cheap.
_LAZY = {
    "AsyncSandbox": "stockade.sandbox.async_sandbox",
    "Change": "stockade.result",
    "FunctionError": "stockade.functions.reply",
    "Host": "stockade.host.capabilities",
    "Outcome": "stockade.result",
    "Policy": "stockade.policy.model",
    "Pool": "stockade.sandbox.pool",
    "Receipt": "stockade.receipt.statement",
    "Result": "stockade.result",
    "Sandbox": "stockade.sandbox.sandbox",
    "SandboxExecutor": "stockade.functions.executor",
    "Spawner": "stockade.sandbox.spawner",
    "Workspace": "stockade.sandbox.workspace",
    "agent": "stockade.agents.handler",
    "confine": "stockade.sandbox.confine",
    "run": "stockade.sandbox.sandbox",
    "run_async": "stockade.sandbox.async_sandbox",
    "sandboxed": "stockade.functions.sandboxed_function",
    "verify": "stockade.receipt.verify",
}
#: The packages that have the other names which users write; they load on first use, too.
_ROOMS = ("client", "errors", "functions", "inside", "policy", "receipt", "result", "sandbox", "workspace")


def _load(name: str) -> Any:
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f"stockade.{name}")
    if name not in _LAZY:
        meant = _elsewhere(name) if name[:1].isupper() or name in ("delegate", "public_key") else ""
        raise AttributeError(f"module 'stockade' has no attribute {name!r}{meant}", name=name)
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = _load


def _elsewhere(name: str) -> str:
    """Return where a name is that is not at the top."""
    import importlib

    for room in _ROOMS:
        if name in importlib.import_module(f"stockade.{room}").__all__:
            return f"; it is stockade.{room}.{name}"
    return ""


def __dir__() -> list[str]:
    return sorted(__all__)
