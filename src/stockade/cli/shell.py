"""`stockade shell`: start a shell behind every wall of the policy."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from stockade.cli import run
from stockade.cli.ui import output


def main(argv: list[str]) -> int:
    """Run the shell and return its exit code, or one of `stockade run`'s own."""
    args = run.parse_arguments("shell", argv)
    args.json = False
    if args.keep:
        from stockade.cli import attach

        try:
            return attach.keep(args, shells(os.environ))
        except KeyboardInterrupt:
            output.say("cancelled")
            return 130
    return run.run(args, lambda: shells(os.environ), shell=True)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options: those of `run`, without a command."""
    return run.build_parser("shell")


def shells(environ: Mapping[str, str]) -> list[list[str]]:
    """Return the shells to try: the user's own, which the policy may hide, then sh."""
    from stockade.cli.ui.shell_prompt import with_prompt

    return [with_prompt([name]) for name in dict.fromkeys((environ.get("SHELL") or "sh", "sh"))]
