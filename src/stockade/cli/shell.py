"""`stockade shell`: a shell behind every wall of the policy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from stockade.cli import output, run


def main(argv: list[str]) -> int:
    """Run the command line and return the shell's own exit code, or one of `stockade run`."""
    args = run.parsed("shell", argv)
    args.json = False
    if args.keep:
        from stockade.cli import attach

        try:
            return attach.keep(args, shells(os.environ))
        except KeyboardInterrupt:
            output.say("cancelled")
            return 130
    return run.run(args, lambda: shells(os.environ))


def parser() -> argparse.ArgumentParser:
    """The command's options: those of `run`, without a command."""
    return run.parser("shell")


def shells(environ: Mapping[str, str]) -> list[list[str]]:
    """The user's shell, then the one that is everywhere: the policy may hide the first."""
    return [[name] for name in dict.fromkeys((environ.get("SHELL") or "sh", "sh"))]
