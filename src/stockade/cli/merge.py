"""`stockade merge`: take the changes of other workspaces over into one."""

from __future__ import annotations

import argparse

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import chosen, many, print_json
from stockade.errors import ConflictError, PolicyError, StockadeError

SHOWN = 20
REFUSED = 125


def main(argv: list[str]) -> int:
    """Merge, and say what was taken over."""
    args = parser().parse_args(argv)
    try:
        if not args.others:
            raise PolicyError("merge needs two workspaces", hint="`stockade workspaces` lists them")
        workspace = chosen(args.id, quiet=args.json)
        others = [chosen(id, quiet=args.json) for id in args.others]
        taken = workspace.merge(*others)
    except StockadeError as error:
        if not args.json:
            raise
        paths = error.paths if isinstance(error, ConflictError) else ()
        print_json({"ok": False, "reason": error.message, "hint": error.hint, "conflicts": paths})
        return REFUSED
    if args.json:
        print_json({"ok": True, "workspace": workspace.id, "changes": taken})
        return 0
    print(f"{many(len(taken), 'change')} merged into workspace {workspace.id}")
    for one in taken[:SHOWN]:
        print(f"  {one.kind:<8}  {output.name(one.path)}")
    if len(taken) > SHOWN:
        print(f"  and {len(taken) - SHOWN} more")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade merge",
        description="Take the changes of other workspaces of the same directory over into one. Where two of\n"
        "them changed a path to different results nothing is done, and the paths are named.",
        epilog="example:\n  stockade merge 443c22c193c6 9b1e4c0d77aa 0c52f1e6b3d8\n\n"
        "exit codes: 0 merged; 125 refused, nothing was done",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "id",
        nargs="?",
        help="the workspace that receives them, or the beginning of its id; @ is the last",
    )
    add("others", nargs="*", metavar="OTHER", help="those whose changes are taken; they stay as they are")
    add("--json", action="store_true", help="print JSON and nothing else")
    return output.with_manners(made)
