"""`stockade shell`: a shell behind every wall of the policy."""

from __future__ import annotations

import os
from collections.abc import Mapping

from stockade.cli import run


def main(argv: list[str]) -> int:
    """Run the command line and return the shell's own exit code, or one of `stockade run`."""
    args = run.parser("shell").parse_args(argv)
    return run.run(args, lambda: shells(os.environ))


def shells(environ: Mapping[str, str]) -> list[list[str]]:
    """The user's shell, then the one that is everywhere: the policy may hide the first."""
    return [[name] for name in dict.fromkeys((environ.get("SHELL") or "sh", "sh"))]
