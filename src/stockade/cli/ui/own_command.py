"""How other programs start this command."""

from __future__ import annotations

import os
import shutil
import sys


def own_command(*, absolute: bool = False) -> list[str]:
    """Return the words that start `stockade` as it runs now: its name if PATH leads here, else its path.

    An `absolute` path leads here whatever PATH is.
    """
    program = os.path.join(os.path.dirname(os.path.abspath(sys.argv[0])), "stockade")
    if os.path.basename(sys.argv[0]).startswith("stockade") and os.access(program, os.X_OK):
        found = shutil.which("stockade")
        named = not absolute and found is not None and os.path.samefile(found, program)
        return ["stockade"] if named else [program]
    # -P: a module in the directory where it is started must not take the place of ours.
    return [sys.executable, "-P", "-m", "stockade"]
