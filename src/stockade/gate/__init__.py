"""The gate: the small C program that every sandboxed process passes through.

`src/` is the program, `build` compiles it, `wire` has the numbers that it
shares with Python, `operations` and `bwrap_operations` are the steps of its
plans, `client` starts it and talks to it, and `template` is an interpreter
for it to live in.
"""

from __future__ import annotations

import os

from stockade.errors import SetupError


def executable() -> str:
    """Return the path of the gate's executable."""
    return _built("stockade-gate")


def library() -> str:
    """Return the path of the gate as a shared library."""
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
