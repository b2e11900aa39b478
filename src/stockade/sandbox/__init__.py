"""The objects that users hold: Sandbox, Process, Workspace, Pool, Spawner; and delegation.

`stockade.runs` does the work behind them: `launch` raises the walls, `evidence`
inspects them, `supervise` watches a run, `finish` makes its result.
"""

from __future__ import annotations

from stockade.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.runs.network.published_ports import PublishedPort
    from stockade.runs.options import (
        BackgroundOptions,
        CodeOptions,
        OneShotOptions,
        ProcessOptions,
        RunOptions,
        SandboxOptions,
        ShellOptions,
    )
    from stockade.sandbox.async_sandbox import AsyncProcess, AsyncSandbox, run_async
    from stockade.sandbox.confine import Confinement, confine
    from stockade.sandbox.network import AsyncSandboxNetwork, SandboxNetwork
    from stockade.sandbox.pool import Pool
    from stockade.sandbox.process import Process
    from stockade.sandbox.sandbox import Sandbox, run
    from stockade.sandbox.secrets import AsyncSandboxSecrets, SandboxSecrets
    from stockade.sandbox.spawner import Spawner
    from stockade.sandbox.workspace import Workspace
    from stockade.sessions.background import AsyncBackground, Background
    from stockade.sessions.interpreter import AsyncInterpreter, CodeResult, Interpreter
    from stockade.sessions.shell import AsyncShell, Shell

__all__ = [
    "AsyncBackground",
    "AsyncInterpreter",
    "AsyncProcess",
    "AsyncSandbox",
    "AsyncSandboxNetwork",
    "AsyncSandboxSecrets",
    "AsyncShell",
    "Background",
    "BackgroundOptions",
    "CodeOptions",
    "CodeResult",
    "Confinement",
    "Interpreter",
    "OneShotOptions",
    "Pool",
    "Process",
    "ProcessOptions",
    "PublishedPort",
    "RunOptions",
    "Sandbox",
    "SandboxNetwork",
    "SandboxOptions",
    "SandboxSecrets",
    "Shell",
    "ShellOptions",
    "Spawner",
    "Workspace",
    "confine",
    "run",
    "run_async",
]

#: Public names and their modules, which load on first use.
_LAZY = {
    "AsyncBackground": "stockade.sessions.background",
    "AsyncInterpreter": "stockade.sessions.interpreter",
    "AsyncProcess": "stockade.sandbox.async_sandbox",
    "AsyncSandbox": "stockade.sandbox.async_sandbox",
    "AsyncSandboxNetwork": "stockade.sandbox.network",
    "AsyncSandboxSecrets": "stockade.sandbox.secrets",
    "AsyncShell": "stockade.sessions.shell",
    "Background": "stockade.sessions.background",
    "BackgroundOptions": "stockade.runs.options",
    "CodeOptions": "stockade.runs.options",
    "CodeResult": "stockade.sessions.interpreter",
    "Confinement": "stockade.sandbox.confine",
    "Interpreter": "stockade.sessions.interpreter",
    "OneShotOptions": "stockade.runs.options",
    "Pool": "stockade.sandbox.pool",
    "Process": "stockade.sandbox.process",
    "ProcessOptions": "stockade.runs.options",
    "PublishedPort": "stockade.runs.network.published_ports",
    "RunOptions": "stockade.runs.options",
    "Sandbox": "stockade.sandbox.sandbox",
    "SandboxNetwork": "stockade.sandbox.network",
    "SandboxSecrets": "stockade.sandbox.secrets",
    "SandboxOptions": "stockade.runs.options",
    "Shell": "stockade.sessions.shell",
    "ShellOptions": "stockade.runs.options",
    "Spawner": "stockade.sandbox.spawner",
    "Workspace": "stockade.sandbox.workspace",
    "confine": "stockade.sandbox.confine",
    "run": "stockade.sandbox.sandbox",
    "run_async": "stockade.sandbox.async_sandbox",
}

if not TYPE_CHECKING:  # otherwise type checkers would believe that every name exists
    __getattr__ = loader(__name__, _LAZY)
