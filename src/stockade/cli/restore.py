"""`stockade restore`: return a workspace to a snapshot."""

from __future__ import annotations

import argparse

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.formats import print_json
from stockade.cli.ui.workspace_choice import workspace_for
from stockade.errors import PolicyError


def main(argv: list[str]) -> int:
    """Return a workspace to a snapshot."""
    args = build_parser().parse_args(argv)
    if len(args.words) not in (1, 2):
        raise PolicyError(
            "restore needs the name of a snapshot", hint="`stockade snapshot --list` lists them"
        )
    *id, name = args.words
    workspace = workspace_for(id[0] if id else None, f"stockade restore {{}} {name}", quiet=args.json)
    workspace.restore(name)
    if args.json:
        print_json({"workspace": workspace.id, "restored": name})
    else:
        output.announce(f"workspace {workspace.id} is as it was at snapshot {name}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade restore",
        description="Return the changes of a workspace to a snapshot. Later changes are deleted; your own\n"
        "files are not touched.",
        epilog="examples:\n"
        "  stockade restore tests-pass                 in the workspace of this directory\n"
        "  stockade restore 443c22c193c6 tests-pass",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "words",
        nargs="*",
        metavar="[ID] NAME",
        help="the workspace's id or its beginning (default: that of this directory), and the snapshot",
    )
    add("--json", action="store_true", help="print JSON")
    return output.add_verbosity(parser)
