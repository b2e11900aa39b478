"""`stockade fork`: workspaces of their own that begin where another is."""

from __future__ import annotations

import argparse

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import chosen, print_json


def main(argv: list[str]) -> int:
    """Fork a workspace, and print the ids."""
    args = parser().parse_args(argv)
    workspace = chosen(args.id, quiet=args.json)
    ids = [fork.id for fork in workspace.fork(args.count)]
    if args.json:
        print_json({"workspace": workspace.id, "forks": ids})
        return 0
    for id in ids:
        print(id)
    output.say(f"`stockade run -w @{ids[0]} -- COMMAND` goes on in the first of them")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade fork",
        description="Make workspaces of their own with the same changes over the same directory, to try\n"
        "several things from one point. The ids are printed, one on a line.",
        epilog="example:\n"
        "  for id in $(stockade fork 443c22c193c6 -n 3); do stockade run -w @$id -- ./attempt; done",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("id", nargs="?", help="the workspace, or the beginning of its id; without it, the last")
    add("-n", metavar="N", dest="count", type=int, default=1, help="how many (default: 1)")
    add("--json", action="store_true", help="print JSON")
    return output.with_manners(made)
