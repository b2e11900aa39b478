"""`stockade bench neighbours`: find out whether a program inside can make others of this machine wait."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.errors import PolicyError
from stockade.inside.lock_jobs import JOBS

SECONDS, TASKS = 10.0, 50


def main(argv: list[str]) -> int:
    """Measure and print; return 0 if no job makes its neighbours wait."""
    options = build_parser().parse_args(argv)
    if not options.seconds > 0 or options.tasks < 1:
        raise PolicyError("--seconds and --tasks must be more than 0", hint="write --seconds 2 --tasks 10")
    from stockade.bench.neighbours import NeighbourCosts, measure

    found = measure(options.only or list(JOBS), options.seconds, options.tasks, output.say)

    def row(one: NeighbourCosts) -> list[str]:
        times = (one.start, one.longest_start, one.host, one.longest_host, one.late)
        return [one.job, str(one.done), *(f"{1000 * time:.0f}" for time in times), one.verdict or "holds"]

    head = ["JOB", "DONE", "START ms", "LONGEST", "HOST ms", "LONGEST", "END ms", "VERDICT"]
    print(output.table([row(one) for one in found], head))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    return 1 if any(one.verdict for one in found) else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    parser = Parser(
        prog="stockade bench neighbours",
        description="Take locks of the whole kernel inside a sandbox with every limit set, one kind after "
        "another, and measure meanwhile how long another sandbox and a network namespace of the host take to "
        "start, and how late the run ends, beside one that only computes. Exit code 0: nothing waits.",
        epilog="example: stockade bench neighbours --seconds 2 --only multicast --only dumps",
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, metavar="N", help=f"for each job (default: {SECONDS:g})"
    )
    parser.add_argument(
        "--tasks", type=int, default=TASKS, metavar="N", help=f"processes that do it (default: {TASKS})"
    )
    parser.add_argument("--only", action="append", choices=list(JOBS), help="one job; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    return output.add_verbosity(parser)
