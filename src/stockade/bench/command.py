"""`stockade bench`: measure what Stockade costs on this machine, beside its rivals."""

from __future__ import annotations

import argparse
from pathlib import Path

from stockade.cli.ui import output
from stockade.cli.ui.argument_parser import Parser
from stockade.cli.ui.signals import cleaned_up_on_signals


def main(argv: list[str]) -> int:
    """Measure and print; return 0 if every bar holds and no ratio is much worse than the baseline."""
    if argv[:1] == ["soak"]:
        from stockade.bench import soak_command

        with cleaned_up_on_signals():
            return soak_command.main(argv[1:])
    if argv[:1] == ["backends"]:
        from stockade.bench import backends_command

        with cleaned_up_on_signals():
            return backends_command.main(argv[1:])
    if argv[:1] == ["neighbours"]:
        from stockade.bench import neighbours_command

        with cleaned_up_on_signals():
            return neighbours_command.main(argv[1:])
    if argv[:1] == ["server"]:
        argv = ["--only", "server", *argv[1:]]
    options = build_parser().parse_args(argv)
    from stockade.bench import competitors, report_table, sections
    from stockade.bench.measure import Section

    chosen = options.only or list(sections.SECTIONS)
    for rival in competitors.missing():
        output.say(f"{rival} is not installed, so it is not measured; to install it: {competitors.INSTALL}")
    kept = report_table.load_baseline(options.baseline).get(report_table.machine(), {})
    found: dict[str, Section] = {}
    with cleaned_up_on_signals(), sections.ground(quick=options.quick) as ground:
        for name in chosen:
            output.say(f"measuring {name}")
            found[name] = sections.measure(name, ground, baseline=kept)
        flags = {name: one.describe() for name, one in ground.contenders.items()}
    print(report_table.as_text(found, flags, kept))
    if options.json:
        options.json.write_bytes(report_table.as_json(found, flags, kept))
    if options.update_baseline:
        report_table.save_baseline(options.baseline, found)
        return 0
    figures = [figure for section in found.values() for figure in section.figures]
    good = all(
        figure.holds() and not report_table.regressed(figure.name, figure.value, kept) for figure in figures
    )
    return 0 if good else 1


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command's options."""
    from stockade.bench.sections import SECTIONS

    parser = Parser(
        prog="stockade bench",
        description="Measure the cost of a sandbox beside posix_spawn, bwrap and sandlock, interleaved, and "
        "the cost of working in one. Only ratios are judged. Exit code 0: every bar holds and no ratio is "
        "much worse than the baseline.",
        epilog="example: stockade bench --quick --only cold --only walls --json bench.json; "
        "`stockade bench server` is short for `--only server`; `stockade bench backends` compares the "
        "backends with each other, `stockade bench soak` runs very many sandboxes, and `stockade bench "
        "neighbours` looks for locks of the whole kernel: see their --help",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and only what is judged")
    parser.add_argument(
        "--only", action="append", choices=list(SECTIONS), help="measure one part; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to a file")
    kept = _baseline()
    parser.add_argument(
        "--baseline",
        type=Path,
        metavar="FILE",
        default=kept,
        help="compare with this file instead of bench/baseline.json",
    )
    parser.add_argument("--update-baseline", action="store_true", help="keep these ratios as the baseline")
    return output.add_verbosity(parser)


def _baseline() -> Path:
    """Return the baseline of the checkout that this package runs from, or else one in this directory."""
    checkout = Path(__file__).parents[3] / "bench"
    return (checkout if checkout.is_dir() else Path()) / "baseline.json"
