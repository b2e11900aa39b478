"""`stockade bench backends`: what each backend that works here costs, beside the others."""

from __future__ import annotations

import argparse
from pathlib import Path

from stockade.cli import output
from stockade.cli.options import Parser


def main(argv: list[str]) -> int:
    """Measure and tell; nothing is judged."""
    options = parser().parse_args(argv)
    from stockade.bench import backends, report, sections

    flags = {name: one.describe() for name, one in backends.usable().items()}
    with sections.ground(quick=options.quick) as ground:
        output.say(f"measuring {', '.join(flags) or 'nothing'}")
        found = {"backends": backends.measure(ground)}
    print(report.as_text(found, flags, {}))
    if options.json:
        options.json.write_bytes(report.as_json(found, flags, {}))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = Parser(
        prog="stockade bench backends",
        description="Compares the backends that work on this machine, interleaved: the start of a sandbox, a "
        "command in a living one, the memory of an idle one, and everyday work inside against the same "
        "outside. Nothing is judged.",
        epilog="example: stockade bench backends --quick --json backends.json",
    )
    made.add_argument("--quick", action="store_true", help="fewer rounds")
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    return output.with_manners(made)
