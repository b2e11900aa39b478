"""The Python client of `stockade serve`: the library's names, on another machine or in another process.

    from stockade.client import Client

    with Client() as client, client.create(timeout=600) as box:
        print(box.run("echo hello").text)

`OPEN_SANDBOX_DOMAIN` names the server (`localhost:8080` by default), `STOCKADE_API_KEY` or
`OPEN_SANDBOX_API_KEY` has the key. The package needs the extra `client`.

The calls are values (`calls.py` and its neighbours). A transport sends them, with or without `await`; the
two faces of each object only name them.
"""

from __future__ import annotations

from stockade.lazy import loader

TYPE_CHECKING = False
if TYPE_CHECKING:
    from stockade.client.async_client import AsyncClient
    from stockade.client.async_remote_files import AsyncRemoteFiles
    from stockade.client.async_remote_sandbox import AsyncRemoteSandbox
    from stockade.client.async_remote_session import (
        AsyncRemoteBackground,
        AsyncRemoteInterpreter,
        AsyncRemoteSession,
        AsyncRemoteShell,
    )
    from stockade.client.client import Client
    from stockade.client.remote_errors import (
        RemoteConflictError,
        RemoteDeniedError,
        RemoteLimitError,
        RemoteNotFoundError,
        RemotePolicyError,
        RemoteUnsupportedError,
        ServerError,
        UnreachableError,
    )
    from stockade.client.remote_files import RemoteFiles
    from stockade.client.remote_sandbox import RemoteSandbox
    from stockade.client.remote_session import (
        RemoteBackground,
        RemoteInterpreter,
        RemoteSession,
        RemoteShell,
    )
    from stockade.client.run_calls import LogPiece, RemoteRunOptions, SessionOptions
    from stockade.client.sandbox_calls import CreateOptions
    from stockade.client.values import (
        BackgroundStatus,
        CodeFailure,
        Endpoint,
        RemoteCodeResult,
        RemoteCommit,
        RemoteFileInfo,
        RemoteReceipt,
        RemoteResult,
        SandboxInfo,
        SandboxStatus,
    )

__all__ = [
    "AsyncClient",
    "AsyncRemoteBackground",
    "AsyncRemoteFiles",
    "AsyncRemoteInterpreter",
    "AsyncRemoteSandbox",
    "AsyncRemoteSession",
    "AsyncRemoteShell",
    "BackgroundStatus",
    "Client",
    "CodeFailure",
    "CreateOptions",
    "Endpoint",
    "LogPiece",
    "RemoteBackground",
    "RemoteCodeResult",
    "RemoteCommit",
    "RemoteConflictError",
    "RemoteDeniedError",
    "RemoteFileInfo",
    "RemoteFiles",
    "RemoteInterpreter",
    "RemoteLimitError",
    "RemoteNotFoundError",
    "RemotePolicyError",
    "RemoteReceipt",
    "RemoteResult",
    "RemoteRunOptions",
    "RemoteSandbox",
    "RemoteSession",
    "RemoteShell",
    "RemoteUnsupportedError",
    "SandboxInfo",
    "SandboxStatus",
    "ServerError",
    "SessionOptions",
    "UnreachableError",
]

_MODULES = {
    "async_client": ("AsyncClient",),
    "async_remote_files": ("AsyncRemoteFiles",),
    "async_remote_sandbox": ("AsyncRemoteSandbox",),
    "async_remote_session": (
        "AsyncRemoteBackground",
        "AsyncRemoteInterpreter",
        "AsyncRemoteSession",
        "AsyncRemoteShell",
    ),
    "client": ("Client",),
    "remote_errors": (
        "RemoteConflictError",
        "RemoteDeniedError",
        "ServerError",
        "RemoteLimitError",
        "RemoteNotFoundError",
        "RemotePolicyError",
        "RemoteUnsupportedError",
        "UnreachableError",
    ),
    "remote_files": ("RemoteFiles",),
    "remote_sandbox": ("RemoteSandbox",),
    "remote_session": ("RemoteBackground", "RemoteInterpreter", "RemoteSession", "RemoteShell"),
    "run_calls": ("LogPiece", "RemoteRunOptions", "SessionOptions"),
    "sandbox_calls": ("CreateOptions",),
    "values": (
        "BackgroundStatus",
        "CodeFailure",
        "Endpoint",
        "RemoteCodeResult",
        "RemoteCommit",
        "RemoteFileInfo",
        "RemoteReceipt",
        "RemoteResult",
        "SandboxInfo",
        "SandboxStatus",
    ),
}

if not TYPE_CHECKING:
    __getattr__ = loader(
        __name__,
        {name: f"stockade.client.{module}" for module, names in _MODULES.items() for name in names},
    )
