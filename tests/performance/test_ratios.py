"""The bars hold, on this machine and for this user: ratios only, with slack for its other work."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from stockade.bench import command, competitors, judged_costs
from stockade.bench.bars import BARS
from stockade.bench.measure import Figure, Section
from stockade.bench.report_table import as_text, load_baseline
from stockade.bench.sections import SECTIONS, ground, measure
from support.means import need, need_program
from support.paths import ROOT

SLACK = 1.3
COMPARED = ("cold", "pipeline", "rate", "walls")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("section", SECTIONS)
def test_the_bars_hold(section: str) -> None:
    if section in COMPARED:
        missing = competitors.missing()
        need(not missing, f"{', '.join(missing)} not installed: {competitors.INSTALL}")
    if section in ("egress", "inside", "walls", "workspace"):
        need(os.access("/usr/bin/python3", os.X_OK), "/usr/bin/python3 is not installed")
    if section in ("inside", "workspace"):
        need_program("git")
    if section == "warm":
        need(find_spec("numpy") is not None, "numpy is not installed")
    if section == "inside":
        need_program("gcc")
    if section == "server":
        need(find_spec("litestar") is not None, "litestar is not installed: pip install 'stockade[server]'")
    with ground(quick=True) as place:
        found = measure(section, place, slack=SLACK)
    judged = {figure.name for figure in found.figures} & set(BARS)
    wanted = {name for name in BARS if name.startswith(section + "/")}
    if not judged_costs.rival():  # mitmproxy is for those who have it
        wanted.discard("judged/throughput")
    assert judged == wanted
    assert all(figure.holds(SLACK) for figure in found.figures), as_text({section: found}, {}, {})
    if section == "egress" and os.geteuid() == 0:  # others cannot read what processes share
        (weight,) = (figure.value for figure in found.figures if figure.name == "egress/memory")
        assert BARS["egress/memory"].holds(weight, SLACK)


def test_the_command_prints_a_table_and_keeps_the_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept, found = tmp_path / "baseline.json", tmp_path / "found.json"
    options = ["--quick", "--only", "heap", "--baseline", str(kept), "--json", str(found)]
    assert command.main([*options, "--update-baseline"]) == 0
    assert "heap/1GB" in capsys.readouterr().out
    (ratios,) = load_baseline(kept).values()
    assert list(ratios) == ["heap/1GB"]
    assert '"heap/1GB"' in found.read_text()


def test_what_misses_only_an_aim_is_measured_once_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    aims = {name: 1e9 if bar.better == "lower" else 0.0 for name, bar in BARS.items() if bar.aim}
    asked = []

    def found(_: object) -> Section:
        asked.append(1)
        return Section(tuple(Figure(name, value) for name, value in aims.items()))

    monkeypatch.setitem(SECTIONS, "cold", found)
    with ground(quick=True) as place:
        section = measure("cold", place)
    assert len(asked) == 1
    assert all(figure.holds() for figure in section.figures)
    assert as_text({"cold": section}, {}, {}).count("missed (an aim)") == len(aims)


def test_the_committed_baseline_names_only_measures_that_exist() -> None:
    for ratios in load_baseline(ROOT / "bench" / "baseline.json").values():
        assert set(ratios) <= set(BARS)
