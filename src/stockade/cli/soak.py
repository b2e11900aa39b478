"""`stockade bench soak`: whether anything grows, slows down or is left after very many sandboxes."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from stockade.cli import output
from stockade.cli.options import Parser


def main(argv: list[str]) -> int:
    """Soak and tell; 0 if everything is as it was."""
    options = parser().parse_args(argv)
    from stockade.bench.soak import QUICK, Finding, Size, soak

    found = soak(QUICK if options.quick else Size(), output.say)

    def row(one: Finding) -> list[str]:
        return [one.name, f"{one.first:g}", f"{one.last:g}", "holds" if one.good else "FAILS", one.about]

    print(output.table([row(one) for one in found.findings], ["MEASURE", "FIRST", "LAST", "VERDICT", "WHAT"]))
    for sentence in found.wrong:
        print(sentence)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 0 if found.good else 1


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade bench soak",
        description="Runs thousands of sandboxes in a row, hundreds at once, and kills supervisors, gates "
        "and programs at random moments. Exit code 0: memory, descriptors and latency are flat, and nothing "
        "is left.",
        epilog="example: stockade bench soak --quick --json soak.json",
    )
    made.add_argument("--quick", action="store_true", help="fewer of each, with more slack")
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    return output.with_manners(made)
