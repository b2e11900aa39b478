"""`stockade snapshot`: keep a workspace as it is now, to come back to."""

from __future__ import annotations

import argparse
import time

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import age, chosen, print_json


def main(argv: list[str]) -> int:
    """Take a snapshot, list those there are, or forget one."""
    args = parser().parse_args(argv)
    workspace = chosen(args.id, quiet=args.json)
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
            print(f"snapshot {args.drop} of workspace {workspace.id} is gone")
    else:
        taken = workspace.snapshot(args.name)
        if args.json:
            print_json({"workspace": workspace.id, "snapshot": taken.name, "taken": taken.taken})
        else:
            print(f"snapshot {taken.name} of workspace {workspace.id}")
            output.say(f"`stockade restore {workspace.id} {taken.name}` comes back to it")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade snapshot",
        description="Keep the changes of a workspace as they are now. `stockade restore` comes back to them.",
        epilog="examples:\n"
        "  stockade snapshot                          the last workspace; the snapshot gets a number\n"
        "  stockade snapshot 443c22c193c6 tests-pass\n"
        "  stockade snapshot @ before-refactoring     the last workspace, and a name\n"
        "  stockade snapshot --list",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("id", nargs="?", help="the workspace, or the beginning of its id; without it, or as @, the last")
    add("name", nargs="?", help="the name of the snapshot; without it, the next number")
    only = made.add_mutually_exclusive_group()
    only.add_argument("--list", action="store_true", help="list the snapshots of the workspace")
    only.add_argument("--drop", metavar="NAME", help="forget a snapshot")
    add("--json", action="store_true", help="print JSON")
    return output.with_manners(made)
