"""`stockade restore`: put a workspace back as it was when a snapshot was taken."""

from __future__ import annotations

import argparse

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.cli.workspaces import chosen, print_json
from stockade.errors import PolicyError


def main(argv: list[str]) -> int:
    """Come back to a snapshot."""
    args = parser().parse_args(argv)
    if len(args.words) not in (1, 2):
        raise PolicyError(
            "restore needs the name of a snapshot", hint="`stockade snapshot --list` lists them"
        )
    *id, name = args.words
    workspace = chosen(id[0] if id else None, quiet=args.json)
    workspace.restore(name)
    if args.json:
        print_json({"workspace": workspace.id, "restored": name})
    else:
        print(f"workspace {workspace.id} is as it was at snapshot {name}")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade restore",
        description="Put the changes of a workspace back as they were when a snapshot was taken. Those\n"
        "since then are gone; your own files are not touched.",
        epilog="examples:\n"
        "  stockade restore tests-pass                 of the last workspace\n"
        "  stockade restore 443c22c193c6 tests-pass",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        "words",
        nargs="*",
        metavar="[ID] NAME",
        help="the workspace, or the beginning of its id (without it, the last), and the snapshot",
    )
    add("--json", action="store_true", help="print JSON")
    return output.with_manners(made)
