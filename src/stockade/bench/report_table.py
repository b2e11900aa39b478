"""The bench's output: a table, a JSON file, and the baseline of ratios to compare with next time."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from stockade.bench.bars import BARS, MIB
from stockade.bench.measure import Section
from stockade.cli.ui import output

#: A ratio this much worse than the committed one is a regression.
WORSE = 1.3
Ratios = dict[str, float]


def machine() -> str:
    """Return the kind of this machine; ratios are comparable on machines of one kind."""
    model = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {'root' if os.geteuid() == 0 else 'user'}"


def ratios(sections: Mapping[str, Section]) -> Ratios:
    """Return the judged ratios, as the baseline stores them."""
    figures = [figure for section in sections.values() for figure in section.figures]
    return {f.name: round(f.value, 3) for f in figures if f.name in BARS and BARS[f.name].unit == "×"}


def load_baseline(path: Path) -> dict[str, Ratios]:
    """Return the ratios of every kind of machine; empty if there is no baseline yet."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Ratios]) if path.exists() else {}


def save_baseline(path: Path, sections: Mapping[str, Section]) -> None:
    """Store the ratios for this kind of machine; those of sections that were not measured stay."""
    kept = load_baseline(path)
    kept[machine()] = kept.get(machine(), {}) | ratios(sections)
    text = msgspec.json.format(msgspec.json.encode(dict(sorted(kept.items()))), indent=2)
    path.write_bytes(text + b"\n")


def regressed(name: str, value: float, baseline: Mapping[str, float]) -> bool:
    """Whether a ratio is much worse than that of the baseline."""
    if name not in baseline or name not in BARS:
        return False
    change = value / baseline[name]
    return change > WORSE if BARS[name].better == "lower" else change < 1 / WORSE


def as_json(sections: Mapping[str, Section], flags: Mapping[str, str], baseline: Ratios) -> bytes:
    """Return all results as JSON."""
    found: dict[str, Any] = {
        "machine": machine(),
        "contenders": flags,
        "bars": BARS,
        "baseline": baseline,
        "sections": sections,
    }
    return msgspec.json.format(msgspec.json.encode(found), indent=2) + b"\n"


def as_text(sections: Mapping[str, Section], flags: Mapping[str, str], baseline: Ratios) -> str:
    """Return all results as text: the verdicts first, the samples below."""
    parts = [machine(), _figures(sections, baseline)]
    for name, section in sections.items():
        if section.timings:
            rows = [
                [who, f"{t.median:.2f} {t.unit}", f"{t.p99:.2f} {t.unit}", str(t.samples)]
                for who, t in section.timings.items()
            ]
            parts.append(output.table(rows, [name.upper(), "MEDIAN", "P99", "SAMPLES"]))
        if section.walls:
            who = list(next(iter(section.walls.values())))
            rows = [[attack, *(row.get(one, "") for one in who)] for attack, row in section.walls.items()]
            parts.append(output.table(rows, ["ATTACK", *(one.upper() for one in who)]))
        parts += [f"note: {note}" for note in section.notes]
    ran = dict(flags)
    for section in sections.values():
        ran |= section.ran
    parts.append("\n".join(["What was run:", *(f"  {name}: {text}" for name, text in ran.items())]))
    return "\n\n".join(parts)


def _figures(sections: Mapping[str, Section], baseline: Ratios) -> str:
    rows = []
    for section in sections.values():
        for figure in section.figures:
            bar = BARS.get(figure.name)
            verdict = "not judged"
            if bar is not None:
                good = bar.holds(figure.value)
                verdict = "holds" if good else "missed (an aim)" if bar.aim else "MISSED"
                if regressed(figure.name, figure.value, baseline):
                    verdict += ", WORSE than the baseline"
                if figure.missed:
                    verdict += f", after {', '.join(f'{value:.2f}' for value in figure.missed)}"
            kept = f"{baseline[figure.name]:.2f} ×" if figure.name in baseline else ""
            limit = about = ""
            if bar is not None:
                limit = ("≤ " if bar.better == "lower" else "≥ ") + _value(figure.name, bar.at)
                about = bar.about
            rows.append([figure.name, _value(figure.name, figure.value), limit, kept, verdict, about])
    return output.table(rows, ["MEASURE", "VALUE", "BAR", "BASELINE", "VERDICT", "WHAT"])


def _value(name: str, value: float) -> str:
    unit = BARS[name].unit if name in BARS else "×"
    if unit == "bytes":
        return f"{value / MIB:.2f} MiB"
    if unit in ("×", "ms", "µs"):
        return f"{value:.2f} {unit}"
    return f"{value:.0f}{unit if unit == '/s' else ''}"
