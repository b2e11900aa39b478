"""`stockade snapshot`: save the current state of a workspace."""

from __future__ import annotations

import argparse
import time

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import age, print_json
from stockade.cli.ui.workspace_choice import workspace_for


def main(argv: list[str]) -> int:
    """Take a snapshot, list the snapshots, or delete one."""
    args = build_parser().parse_args(argv)
    workspace = workspace_for(args.id, "stockade snapshot {}", quiet=args.json)
    if args.list:
        found = workspace.snapshots()
        if args.json:
            print_json(found)
        elif found:
            rows = [[one.name, age(max(0.0, time.time() - one.taken))] for one in found]
            print(output.table(rows, ["NAME", "AGE"]))
        else:
            print(f"workspace {workspace.id} has no snapshots")
    elif args.drop:
        workspace.drop(args.drop)
        if args.json:
            print_json({"workspace": workspace.id, "dropped": args.drop})
        else:
            output.announce(f"snapshot {args.drop} of workspace {workspace.id} is deleted")
    else:
        taken = workspace.snapshot(args.name)
        if args.json:
            print_json({"workspace": workspace.id, "snapshot": taken.name, "taken": taken.taken})
        else:
            output.announce(f"snapshot {taken.name} of workspace {workspace.id}")
            output.say(f"`stockade restore {workspace.id} {taken.name}` returns to it")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade snapshot",
        description="Save the changes of a workspace as they are now. `stockade restore` returns to them.",
        epilog="examples:\n"
        "  stockade snapshot                          the workspace of this directory; named by a number\n"
        "  stockade snapshot 443c22c193c6 tests-pass\n"
        "  stockade snapshot @ before-refactoring     the same, with a name\n"
        "  stockade snapshot --list",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "id",
        nargs="?",
        help="the workspace's id or its beginning; default, or with @: that of this directory",
    )
    add("name", nargs="?", help="the name of the snapshot; default: the next number")
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--list", action="store_true", help="list the snapshots of the workspace")
    only.add_argument("--drop", metavar="NAME", help="delete a snapshot")
    add("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser)
