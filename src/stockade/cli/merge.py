"""`stockade merge`: merge the changes of other workspaces into one."""

from __future__ import annotations

import argparse

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.change_list import change_lines
from stockade.cli.ui.formats import many, print_json
from stockade.cli.ui.workspace_choice import workspace_for
from stockade.errors import ConflictError, PolicyError, StockadeError

REFUSED = 125


def main(argv: list[str]) -> int:
    """Merge, and print the merged changes."""
    args = build_parser().parse_args(argv)
    try:
        if not args.others:
            raise PolicyError("merge needs two workspaces", hint="`stockade workspaces` lists them")
        workspace = workspace_for(args.id, "stockade merge {} OTHER", quiet=args.json)
        others = [workspace_for(id, "stockade merge ID {}", quiet=args.json) for id in args.others]
        changes = workspace.merge(*others)
    except StockadeError as error:
        if not args.json:
            raise
        paths = error.paths if isinstance(error, ConflictError) else ()
        print_json({"ok": False, "reason": error.message, "hint": error.hint, "conflicts": paths})
        return REFUSED
    if args.json:
        print_json({"ok": True, "workspace": workspace.id, "changes": changes})
        return 0
    output.announce(f"{many(len(changes), 'change')} merged into workspace {workspace.id}")
    for line in change_lines(changes):
        output.announce(line)
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade merge",
        description="Merge the changes of other workspaces of the same directory into one. If two of them\n"
        "changed a path to different results, nothing is done and the paths are listed.",
        epilog="example:\n  stockade merge 443c22c193c6 9b1e4c0d77aa 0c52f1e6b3d8\n\n"
        "exit codes: 0 merged; 125 refused, nothing was done",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "id",
        nargs="?",
        help="the workspace that receives them, by id or its beginning; @ means that of this directory",
    )
    add("others", nargs="*", metavar="OTHER", help="the workspaces to merge; they stay as they are")
    add("--json", action="store_true", help="print JSON and nothing else")
    return output.add_verbosity(parser)
