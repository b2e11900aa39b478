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

    from stockade import (  # noqa: F401
        client,
        functions,
        inside,
        pipeline,
        policy,
        receipt,
        result,
        sandbox,
        workspace,
    )
    from stockade.agents.handler import agent
    from stockade.functions import FunctionError, SandboxExecutor, sandboxed
    from stockade.host import Host
    from stockade.inside.inputs import inputs
    from stockade.pipeline import Gather, Pipeline, Stage
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
    "Gather",
    "Host",
    "LimitError",
    "NotFoundError",
    "Outcome",
    "Pipeline",
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
    "Stage",
    "StockadeError",
    "TimeoutError",
    "UnsupportedError",
    "Workspace",
    "__version__",
    "agent",
    "confine",
    "inputs",
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
    "Gather": "stockade.pipeline.pipeline",
    "Host": "stockade.host.capabilities",
    "Outcome": "stockade.result",
    "Pipeline": "stockade.pipeline.pipeline",
    "Policy": "stockade.policy.model",
    "Pool": "stockade.sandbox.pool",
    "Receipt": "stockade.receipt.statement",
    "Result": "stockade.result",
    "Sandbox": "stockade.sandbox.sandbox",
    "SandboxExecutor": "stockade.functions.executor",
    "Spawner": "stockade.sandbox.spawner",
    "Stage": "stockade.pipeline.stage",
    "Workspace": "stockade.sandbox.workspace",
    "agent": "stockade.agents.handler",
    "confine": "stockade.sandbox.confine",
    "inputs": "stockade.inside.inputs",
    "run": "stockade.sandbox.sandbox",
    "run_async": "stockade.sandbox.async_sandbox",
    "sandboxed": "stockade.functions.sandboxed_function",
    "verify": "stockade.receipt.verify",
}
#: The packages that have the other names which users write; they load on first use, too.
_ROOMS = (
    "client", "errors", "functions", "inside", "pipeline", "policy", "receipt", "result", "sandbox",
    "workspace",
)  # fmt: skip


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
