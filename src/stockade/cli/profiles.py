"""`stockade profiles`: the named starting points for a policy."""

from __future__ import annotations

import argparse

from stockade.cli import output
from stockade.cli.options import Parser
from stockade.policy.profile import names, profile, source


def main(argv: list[str]) -> int:
    args = parser().parse_args(argv)
    wanted = [args.name] if args.name else names()
    if args.json:
        import msgspec

        found = [profile(name) for name in wanted]
        print(msgspec.json.format(msgspec.json.encode(found[0] if args.name else found)).decode())
    elif args.name:
        print(source(args.name), end="")
    else:
        rows = [[one.name, one.extends or "-", one.description] for one in map(profile, wanted)]
        print(output.table(rows, ["PROFILE", "EXTENDS", "WHAT IT SHOWS"], wrap=(2,)))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade profiles",
        description="List the profiles, or show one profile's file.",
        epilog="example:\n  stockade profiles dev",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", nargs="?", help="the profile to show")
    made.add_argument("--json", action="store_true", help="print JSON, with everything a profile takes over")
    return output.with_manners(made)
