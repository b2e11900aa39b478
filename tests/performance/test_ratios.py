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
COMPARED = ("cold", "pipeline", "rate", "walls", "workspace")
#: What is measured beside ours in one section only, and must be told with its command line.
ALONE = {
    "pipeline": {"shell, data", "sandlock, three stages"},
    "start": {"python, empty", "python, import", "python, run"},
    "workspace": {"a bare overlay", "bwrap --overlay", "a plain directory"},
}


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
    assert ALONE.get(section, set()) <= set(found.ran)
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


def test_the_command_lines_of_rivals_are_printed() -> None:
    with ground(quick=True) as place:
        flags = {name: one.describe() for name, one in place.contenders.items()}
    need("bwrap" in flags and "sandlock" in flags, f"rivals are not installed: {competitors.INSTALL}")
    section = Section(ran={"mitmproxy": "mitmdump -q -p 8080"})
    lines = as_text({"judged": section}, flags, {}).partition("What was run:\n")[2].splitlines()
    told = dict(line.strip().split(": ", 1) for line in lines)
    assert told["mitmproxy"] == "mitmdump -q -p 8080"
    assert told["posix_spawn"].startswith("os.posix_spawn(") and told["sandlock"].startswith(
        "sandlock.Sandbox("
    )
    few = told["bwrap with five mounts"].split()
    assert sum(few.count(option) for option in ("--ro-bind", "--proc", "--dev", "--tmpfs")) >= 5
    assert "--seccomp" not in few and few[-2:] == ["--", "command"]
    assert told["bwrap"].split()[0] == few[0]


@pytest.mark.parametrize(("tails", "code"), [((0.9, 0.9, 0.9), 1), ((0.9, 0.5), 0)])
def test_a_tail_much_worse_than_the_baselines_is_measured_again_and_then_fails(
    tails: tuple[float, ...],
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept, left = tmp_path / "baseline.json", list(tails)
    monkeypatch.setitem(SECTIONS, "cold", lambda _: Section((Figure("cold/p99", 0.5),)))
    options = ["--quick", "--only", "cold", "--baseline", str(kept)]
    assert command.main([*options, "--update-baseline"]) == 0
    monkeypatch.setitem(SECTIONS, "cold", lambda _: Section((Figure("cold/p99", left.pop(0)),)))
    assert command.main(options) == code
    said = capsys.readouterr().out
    assert left == [] and ("WORSE than the baseline" in said) == bool(code) and "after 0.90" in said


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
        assert {"cold/bwrap", "cold/p99"} <= set(ratios)
