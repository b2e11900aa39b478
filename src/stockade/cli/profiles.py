"""`stockade profiles`: list the named starting points for a policy."""

from __future__ import annotations

import argparse

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.policy.profile import names, profile, source


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    wanted = [args.name] if args.name else names()
    if args.json:
        found = [profile(name) for name in wanted]
        print(output.indented_json(found[0] if args.name else found))
    elif args.name:
        print(source(args.name), end="")
    else:
        rows = [[one.name, one.extends or "-", one.description] for one in map(profile, wanted)]
        print(output.table(rows, ["PROFILE", "EXTENDS", "WHAT IT SHOWS"], wrap=(2,)))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade profiles",
        description="List the profiles, or show one profile's file.",
        epilog="example:\n  stockade profiles dev",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", help="the profile to show")
    parser.add_argument("--json", action="store_true", help="print JSON, including what a profile inherits")
    return output.add_verbosity(parser)
