"""Very many sandboxes, and deaths at random moments: nothing grows, slows down or is left."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from stockade.bench.soak import SoakSize

COMMAND = "import sys; from stockade.bench import command; sys.exit(command.main(sys.argv[1:]))"


@pytest.mark.timeout(300)
def test_a_quick_soak_finds_everything_as_it_was(tmp_path: Path) -> None:
    found = tmp_path / "soak.json"
    command = [sys.executable, "-c", COMMAND, "soak", "--quick", "--json", str(found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(found.read_text())
    assert told["wrong"] == [] and told["size"]["row"] == 300
    names = {finding["name"] for finding in told["findings"]}
    assert {"row/latency", "row/supervisor memory", "row/gate memory", "at once/sandboxes"} <= names
    assert {"after/descriptors", "after/mounts", "after/processes below", "faults/wrong"} <= names
    assert "row/latency" in done.stdout


def test_a_whole_soak_runs_ten_thousand_sandboxes_in_a_row() -> None:
    assert SoakSize().row == 10_000
