"""`stockade fork`: make workspaces that begin where another one is."""

from __future__ import annotations

import argparse

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import print_json
from stockade.cli.ui.workspace_choice import workspace_for


def main(argv: list[str]) -> int:
    """Fork a workspace, and print the ids."""
    args = build_parser().parse_args(argv)
    workspace = workspace_for(args.id, "stockade fork {}", quiet=args.json)
    ids = [fork.id for fork in workspace.fork(args.count)]
    if args.json:
        print_json({"workspace": workspace.id, "forks": ids})
        return 0
    for id in ids:
        print(id)
    output.say(f"`stockade run -w @{ids[0]} -- COMMAND` continues in the first of them")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade fork",
        description="Make independent workspaces with the same changes over the same directory, to try\n"
        "several things from one point. Prints their ids, one per line.",
        epilog="example:\n"
        "  for id in $(stockade fork 443c22c193c6 -n 3); do stockade run -w @$id -- ./attempt; done",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("id", nargs="?", help="the workspace's id or its beginning; default: that of this directory")
    add("-n", metavar="N", dest="count", type=int, default=1, help="how many (default: 1)")
    add("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser)
