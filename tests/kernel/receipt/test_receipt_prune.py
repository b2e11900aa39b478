"""`stockade receipts prune`: old receipts go with their runs and spill files; what lives stays."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

import stockade
from stockade import Policy, Sandbox, cli
from stockade.receipt import chain, keys
from stockade.receipt.builder import stamp
from stockade.receipt.statement import Statement
from stockade.receipt.verify import check_log
from stockade.runs.register import runlog
from support.made_receipts import append, log, statement
from support.paths import ROOT

Captured = pytest.CaptureFixture[str]
OLD = "2026-01-01T00:00:00.000000Z"
LOUD = Policy(limits={"output": "1K"})
#: Prunes a state directory of everything, and says so just before.
PRUNER = """
import sys, time
from stockade.receipt import chain, prune
log = chain.of(sys.argv[1])
old = prune.find(log, 1770000000.0)
print("now", flush=True)
prune.remove(log, old)
log.shrink()
"""


@pytest.fixture(autouse=True)
def elsewhere(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workspace)


def whole(home: Path) -> int:
    return check_log(log(home), {key.id: key.public for key in keys.known(str(home))})


def pruned(capsys: Captured, older: str = "0s") -> dict[str, object]:
    capsys.readouterr()
    assert cli.main(["receipts", "prune", "--older-than", older, "--yes", "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def grow_old(home: Path, *files: str) -> None:
    """Make files of the state directory a day older."""
    for name in files:
        os.utime(home / name, (time.time() - 86400,) * 2)


def test_receipts_runs_and_spill_files_go_together(stockade_home: Path, capsys: Captured) -> None:
    result = stockade.run(["sh", "-c", "yes | head -c 100000"], LOUD)
    [spilled] = result.spilled
    assert os.path.exists(spilled.path) and len(runlog.read(str(stockade_home))[0]) == 1
    assert pruned(capsys, "1d")["receipts"] == 0
    assert os.path.exists(spilled.path) and whole(stockade_home) == 1
    done = pruned(capsys)
    assert (done["receipts"], done["runs"], done["spill_files"]) == (1, 1, 1)
    assert done["through"] == result.receipt.id and done["checkpoint"] == log(stockade_home).find("last").id
    assert not os.path.exists(spilled.path) and runlog.read(str(stockade_home)) == ([], 0)
    assert cli.main(["verify", "--chain"]) == 0
    said = capsys.readouterr().out
    assert (
        "the chain is whole from receipt 2 on: 1 receipt\n" in said
        and f"checkpoint {done['checkpoint']}" in said
    )
    assert cli.main(["verify", "--chain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["checkpoint"]["through"] == 1
    assert cli.main(["verify", "1"]) == 125
    assert "which were pruned" in capsys.readouterr().err
    stockade.run(["true"])
    assert whole(stockade_home) == 2


def test_nothing_of_a_living_sandbox_is_removed(stockade_home: Path, capsys: Captured) -> None:
    stockade.run(["true"])
    time.sleep(1.1)  # the register has whole seconds
    with Sandbox(LOUD) as box:
        first = box.run(["sh", "-c", "yes | head -c 100000"])
        assert cli.main(["receipts", "prune", "--older-than", "0s", "--yes"]) == 0
        assert "a sandbox runs since" in capsys.readouterr().err
        assert [one.id for one in box.receipts] == [first.receipt.id]
        assert os.path.exists(first.spilled[0].path)
        assert [row.sequence for row in log(stockade_home).rows()] == [2, 3]
        box.run(["true"])
    assert pruned(capsys)["receipts"] == 3
    assert whole(stockade_home) == 1


def test_a_spill_file_that_no_run_names_any_more_goes_by_its_age(
    stockade_home: Path, capsys: Captured
) -> None:
    paths = [stockade.run(["sh", "-c", "yes | head -c 9000"], LOUD).spilled[0].path for _ in range(2)]
    (stockade_home / runlog.FILE).unlink()
    grow_old(stockade_home, paths[0])
    assert pruned(capsys, "1h")["spill_files"] == 1
    assert [os.path.exists(path) for path in paths] == [False, True]


def test_the_run_of_a_receipt_that_stays_stays(stockade_home: Path, capsys: Captured) -> None:
    """A long run began before another one that is not old, and ended after it."""
    append(stockade_home, started=OLD)
    append(stockade_home, started=stamp(time.time()))
    log(stockade_home).append(_long_run)
    ran = {"at": 0.0, "program": "true", "outcome": "exited", "exit_code": 0, "seconds": 1.0}
    lines = [json.dumps(ran | {"sandbox": name}) + "\n" for name in ("long", "other")]
    (stockade_home / runlog.FILE).write_text("".join(lines))
    assert pruned(capsys, "1h")["runs"] == 1
    assert [one.sandbox for one in runlog.read(str(stockade_home))[0]] == ["long"]
    assert [row.sequence for row in log(stockade_home).rows()] == [2, 3, 4]


def _long_run(link: chain.ChainLink) -> Statement:
    made = statement(link, started=OLD)
    return replace(made, predicate=replace(made.predicate, sandbox="long"))


def test_killed_at_any_moment_all_or_nothing_is_removed(stockade_home: Path) -> None:
    chance = random.Random(4)
    for _ in range(150):
        append(stockade_home, started=OLD)
    for _ in range(12):
        began = len(log(stockade_home).rows())
        chain.shutdown()
        process = subprocess.Popen(
            [sys.executable, "-c", PRUNER, str(stockade_home)], stdout=subprocess.PIPE, cwd=ROOT
        )
        assert process.stdout is not None and process.stdout.readline() == b"now\n"
        time.sleep(chance.random() * 0.1)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        left = len(log(stockade_home).rows())
        assert whole(stockade_home) == left and left in (began, 1)
        assert append(stockade_home, started=OLD).predicate.sequence > 150
        if left == 1:
            for _ in range(150):
                append(stockade_home, started=OLD)


def test_runs_go_on_while_the_log_is_pruned(stockade_home: Path, capsys: Captured) -> None:
    for _ in range(50):
        append(stockade_home, started=OLD)
    script = str(ROOT / "tests/support/made_receipts.py")
    process = subprocess.Popen(
        [sys.executable, script, str(stockade_home), "100", "other"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline()
    count = pruned(capsys, "1d")["receipts"]
    process.communicate()
    assert process.returncode == 0
    assert isinstance(count, int) and count > 50
    assert whole(stockade_home) == 151 - count


def test_it_asks_on_a_terminal_and_refuses_without_one(stockade_home: Path, capsys: Captured) -> None:
    append(stockade_home, started=OLD)
    command = [sys.executable, "-m", "stockade", "receipts", "prune", "--older-than", "1d"]
    refused = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert refused.returncode == 125 and "--yes" in refused.stderr
    for answer, code, left in ((b"n\n", 1, [1]), (b"y\n", 0, [2])):
        master, slave = pty.openpty()
        os.write(master, answer)
        asked = subprocess.run(command, stdin=slave, capture_output=True, text=True, check=False)
        os.close(slave)
        os.close(master)
        assert asked.returncode == code, asked.stderr
        assert "Remove 1 receipt up to 1-" in asked.stderr
        assert [row.sequence for row in log(stockade_home).rows()] == left
    assert "removed 1 receipt up to 1-" in asked.stdout


def test_what_is_not_meant_is_refused(stockade_home: Path, capsys: Captured) -> None:
    assert cli.main(["receipts", "prune"]) == 125
    assert "stockade receipts prune --older-than 30d" in capsys.readouterr().err
    assert cli.main(["receipts", "list", "--older-than", "30d"]) == 125
    assert cli.main(["receipts", "prune", "--older-than", "soon"]) == 125
    assert cli.main(["receipts", "prune", "3", "--older-than", "30d"]) == 125
    assert cli.main(["receipts", "prune", "--older-than", "30d", "--yes"]) == 0
    assert not stockade_home.exists()
