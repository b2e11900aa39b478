"""`stockade discard`: delete the changes of a workspace."""

from __future__ import annotations

import argparse

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import print_json
from stockade.cli.ui.workspace_choice import whole_workspaces


def main(argv: list[str]) -> int:
    """Delete one workspace or several."""
    args = build_parser().parse_args(argv)
    # Look up every word before deleting anything.
    chosen = whole_workspaces(args.id, "discard", quiet=args.json)
    for workspace in chosen:
        workspace.discard()
        if not args.json:
            output.announce(f"workspace {workspace.id} of {output.name(workspace.path)} is discarded")
    if args.json:
        print_json({"discarded": [workspace.id for workspace in chosen]})
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade discard",
        description="Delete all changes of a run for good. Your own files are not touched.",
        epilog="example:\n  stockade discard 443c22c193c6",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "id", nargs="*", help="workspaces by id or its beginning; default: that of this directory"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser)
