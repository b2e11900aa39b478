"""The registry of agents: a switch for each, recorded in the chain; refused where it cannot be read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stockade import cli
from stockade.agents import registry
from stockade.receipt import chain
from support.made_receipts import log

Captured = pytest.CaptureFixture[str]


def test_another_process_sees_a_switch_at_once_and_after_a_restart(stockade_home: Path) -> None:
    home = str(stockade_home)
    registry.add(home, "coder")
    script = (
        "import sys; from stockade.agents import registry\n"
        f"for _ in sys.stdin: print(registry.get({home!r}, 'coder').enabled, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdin is not None and other.stdout is not None
        to, back = other.stdin, other.stdout

        def ask() -> str:
            to.write("\n")
            to.flush()
            return back.readline().strip()

        assert ask() == "True"
        registry.switch(home, "coder", enabled=False, reason="a test")
        assert ask() == "False"
        to.close()
    chain.shutdown()
    assert not registry.get(home, "coder").enabled


def test_the_layers_decide_where_no_file_does(
    stockade_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Captured, workspace: Path
) -> None:
    monkeypatch.chdir(workspace)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    registry.add(str(stockade_home), "linter", "reviewers")
    layers = tmp_path / "config/stockade/policies.toml"
    layers.parent.mkdir(parents=True)
    layers.write_text('[category.reviewers]\nenv = { KIND = "reviewer" }\n')
    assert cli.main(["run", "-q", "--agent", "linter", "--", "sh", "-c", "echo $KIND"]) == 0
    assert capfd.readouterr().out == "reviewer\n"
    assert log(stockade_home).find("last").predicate.who.category == "reviewers"
    assert cli.main(["run", "-q", "--agent", "linter", "--category", "coders", "--", "true"]) == 125
    assert "is in the registry with the category" in capfd.readouterr().err
