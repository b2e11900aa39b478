"""The `stockade` command as its users start it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

STOCKADE = str(Path(sys.executable).with_name("stockade"))


def stockade_command(
    *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, input: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with what it printed as text."""
    return subprocess.run(
        [STOCKADE, *arguments],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        input=input,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        timeout=60,
    )


def calls_in(directory: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return `stockade_command` as a user in that directory types it."""

    def call(*arguments: str, cwd: Path = directory) -> subprocess.CompletedProcess[str]:
        return stockade_command(*arguments, cwd=cwd)

    return call
