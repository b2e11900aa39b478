"""`stockade bench soak`: test whether anything grows, slows down or is left after very many sandboxes."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser


def main(argv: list[str]) -> int:
    """Run the soak test, print the results, and return 0 if nothing changed."""
    options = build_parser().parse_args(argv)
    from stockade.bench.soak import QUICK, Finding, SoakSize, soak

    found = soak(QUICK if options.quick else SoakSize(), output.say)

    def row(one: Finding) -> list[str]:
        return [one.name, f"{one.first:g}", f"{one.last:g}", "holds" if one.good else "FAILS", one.about]

    print(output.table([row(one) for one in found.findings], ["MEASURE", "FIRST", "LAST", "VERDICT", "WHAT"]))
    for sentence in found.wrong:
        print(sentence)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0 if found.good else 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade bench soak",
        description="Run thousands of sandboxes in a row, hundreds at once, and kill supervisors, gates "
        "and programs at random moments. Exit code 0: memory, descriptors and latency are flat, and nothing "
        "is left.",
        epilog="example: stockade bench soak --quick --json soak.json",
    )
    parser.add_argument("--quick", action="store_true", help="fewer of each, with more slack")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    return output.add_verbosity(parser)
