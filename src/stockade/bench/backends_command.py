"""`stockade bench backends`: compare the cost of the backends that work here."""

from __future__ import annotations

import argparse
from pathlib import Path

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser


def main(argv: list[str]) -> int:
    """Measure and print; nothing is judged."""
    options = build_parser().parse_args(argv)
    from stockade.bench import backend_costs, report_table, sections

    flags = {name: one.describe() for name, one in backend_costs.usable().items()}
    with sections.ground(quick=options.quick) as ground:
        output.say(f"measuring {', '.join(flags) or 'nothing'}")
        found = {"backends": backend_costs.measure(ground)}
    print(report_table.as_text(found, flags, {}))
    if options.json:
        options.json.write_bytes(report_table.as_json(found, flags, {}))
    return 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade bench backends",
        description="Compare the backends that work on this machine, interleaved: the start of a sandbox, a "
        "command in a living one, the memory of an idle one, and everyday work inside against the same "
        "outside. Nothing is judged.",
        epilog="example: stockade bench backends --quick --json backends.json",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    return output.add_verbosity(parser)
