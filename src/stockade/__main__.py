"""`python -m stockade` is the `stockade` command."""

from __future__ import annotations

import contextlib
import os
import sys

if __name__ == "__main__":
    # With -m, Python looks for modules in the current directory first, where a program may have left some.
    with contextlib.suppress(OSError):  # the directory was removed
        here = os.getcwd()
        if sys.path[:1] == [here] and not __file__.startswith(f"{here}{os.sep}"):
            del sys.path[0]
    from stockade.cli import command

    command()
