"""`stockade bench backends`: every backend that works here is measured beside the others."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import stockade
from stockade import backends
from stockade.bench import command
from stockade.bench.backend_costs import QUICK_JOBS, usable
from stockade.controls import Control
from support.means import need, need_program


def test_every_backend_that_works_here_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need(os.access("/usr/bin/python3", os.X_OK), "/usr/bin/python3 is not installed")
    need_program("gcc")
    found = tmp_path / "found.json"
    assert command.main(["backends", "--quick", "--json", str(found)]) == 0
    told = capsys.readouterr().out
    names = list(usable())
    tables = {name: backends.load(name).offers(stockade.Host.current()) for name in backends.BACKENDS}
    assert names == [name for name, table in tables.items() if table[Control.SYSCALLS].available]
    section = json.loads(found.read_text())["sections"]["backends"]
    measured = ("start", "exec", "memory", *QUICK_JOBS)
    assert {f"{what}: {name}" for what in measured for name in names} <= set(section["timings"])
    assert all(f"\n{what}: {name} " in told for what in measured for name in names)
    assert all(timing["median"] > 0 for timing in section["timings"].values())
    # Whoever can do the work is compared with the same outside, the others with the best of them.
    compared = {figure["name"] for figure in section["figures"]}
    assert {f"{job}, {name} by the same outside" for job in QUICK_JOBS for name in names} <= compared
    assert {f"start, {name} by {names[0]}" for name in names[1:]} <= compared
    assert not [note for note in section["notes"] if "does not work" in note]
