"""`stockade bench`: what Stockade costs, beside its rivals, on this machine."""

from __future__ import annotations

import argparse
from pathlib import Path

from stockade.cli import output
from stockade.cli.ending import ended_in_order
from stockade.cli.options import Parser


def main(argv: list[str]) -> int:
    """Measure, tell and compare; 0 if every bar holds and nothing is much worse than the baseline."""
    if argv[:1] == ["soak"]:
        from stockade.cli import soak

        with ended_in_order():
            return soak.main(argv[1:])
    if argv[:1] == ["backends"]:
        from stockade.cli import bench_backends

        with ended_in_order():
            return bench_backends.main(argv[1:])
    options = parser().parse_args(argv)
    from stockade.bench import report, rivals, sections
    from stockade.bench.measure import Section

    chosen = options.only or list(sections.SECTIONS)
    for rival in rivals.missing():
        output.say(f"{rival} is not installed and not compared with: {rivals.INSTALL}")
    kept = report.load_baseline(options.baseline).get(report.machine(), {})
    found: dict[str, Section] = {}
    with ended_in_order(), sections.ground(quick=options.quick) as ground:
        for name in chosen:
            output.say(f"measuring {name}")
            found[name] = sections.measure(name, ground)
        flags = {name: one.describe() for name, one in ground.contenders.items()}
    print(report.as_text(found, flags, kept))
    if options.json:
        options.json.write_bytes(report.as_json(found, flags, kept))
    if options.update_baseline:
        report.save_baseline(options.baseline, found)
        return 0
    figures = [figure for section in found.values() for figure in section.figures]
    good = all(figure.holds() and not report.regressed(figure.name, figure.value, kept) for figure in figures)
    return 0 if good else 1


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    from stockade.bench.sections import SECTIONS

    made = Parser(
        prog="stockade bench",
        description="Measures the cost of a sandbox beside posix_spawn, bwrap and sandlock, interleaved, and "
        "the cost of working in one. Only ratios are judged. Exit code 0: every bar holds and no ratio is "
        "much worse than the baseline.",
        epilog="example: stockade bench --quick --only cold --only walls --json bench.json; "
        "`stockade bench backends` compares the backends with each other, `stockade bench soak` runs very "
        "many sandboxes instead: see their own --help",
    )
    made.add_argument("--quick", action="store_true", help="fewer rounds, and only what is judged")
    made.add_argument("--only", action="append", choices=list(SECTIONS), help="one part; may be repeated")
    made.add_argument("--json", type=Path, metavar="FILE", help="write everything that was found")
    kept = _baseline()
    made.add_argument("--baseline", type=Path, metavar="FILE", default=kept, help=f"compare with ({kept})")
    made.add_argument("--update-baseline", action="store_true", help="keep these ratios as the baseline")
    return output.with_manners(made)


def _baseline() -> Path:
    """The committed one of the checkout that this package is run from, else one in this directory."""
    checkout = Path(__file__).parents[3] / "bench"
    return (checkout if checkout.is_dir() else Path()) / "baseline.json"
