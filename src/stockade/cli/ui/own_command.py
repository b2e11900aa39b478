"""How other programs start this command."""

from __future__ import annotations

import os
import shutil
import sys


def own_command() -> list[str]:
    """Return the words that start `stockade` as it runs now: its name if PATH leads here, else its path."""
    program = os.path.abspath(sys.argv[0])
    if os.path.basename(program) == "stockade" and os.access(program, os.X_OK):
        found = shutil.which("stockade")
        return ["stockade"] if found and os.path.samefile(found, program) else [program]
    return [sys.executable, "-m", "stockade"]
