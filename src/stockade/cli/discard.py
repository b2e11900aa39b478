"""`stockade discard`: forget the changes of a workspace."""

from __future__ import annotations

import argparse

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import chosen, print_json


def main(argv: list[str]) -> int:
    """Remove one workspace or several."""
    args = parser().parse_args(argv)
    gone = []
    for id in args.id or [None]:
        workspace = chosen(id)
        workspace.discard()
        gone.append(workspace.id)
        if not args.json:
            print(f"workspace {workspace.id} of {output.name(workspace.path)} is discarded")
    if args.json:
        print_json({"discarded": gone})
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade discard",
        description="Forget the changes of a run for good. Your files are as they were.",
        epilog="example:\n  stockade discard 443c22c193c6",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("id", nargs="*", help="the workspace, or the beginning of its id; without it, the last")
    made.add_argument("--json", action="store_true", help="print JSON")
    return output.with_manners(made)
