"""The gate: the one small C program every natively sandboxed process passes through.

`plan` holds the operations it executes, `client` talks to it, and `src/` is
the program itself.
"""

from __future__ import annotations

import os

from stockade.errors import SetupError


def executable() -> str:
    """The path of the gate's executable."""
    return _built("stockade-gate")


def library() -> str:
    """The path of the gate as a shared library."""
    return _built("libstockade-gate.so")


def _built(name: str) -> str:
    path = os.path.join(os.path.dirname(__file__), "bin", name)
    if not os.path.exists(path):
        raise SetupError(
            f"the gate was not built: {path} is missing",
            stage="gate",
            hint="install a C compiler and reinstall Stockade: `pip install --force-reinstall stockade`",
        )
    return path
