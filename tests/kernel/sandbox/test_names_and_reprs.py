"""Sandboxes have names, and every value shows what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stockade
from stockade import Host, Policy, Pool, Sandbox, Spawner, cli
from stockade.runs.register import runlog


def test_a_name_is_in_the_register_the_log_and_the_receipt(
    stockade_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Sandbox(name="the build") as box:
        assert cli.main(["ps"]) == 0
        assert "the build" in capsys.readouterr().out
        assert cli.main(["ps", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["name"] == box.name
        receipt = box.run(["true"]).receipt
    assert receipt is not None and receipt.predicate.name == "the build"
    assert [ran.name for ran in runlog.read(str(stockade_home))[0]] == ["the build"]
    assert cli.main(["logs"]) == 0
    assert "the build" in capsys.readouterr().out


def test_the_command_line_names_its_sandbox(stockade_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--name", "tests", "--json", "--", "true"]) == 0
    capsys.readouterr()
    assert [ran.name for ran in runlog.read(str(stockade_home))[0]] == ["tests"]
    assert cli.main(["run", "--name", "a\tb", "--", "true"]) == 125
    assert "printable" in capsys.readouterr().err


def test_a_run_a_pool_and_a_spawner_take_names(stockade_home: Path) -> None:
    stockade.run(["true"], name="one")
    with Pool(size=1, name="two") as pool:
        pool.run(["true"])
    with Spawner() as spawner:
        spawner.collect(spawner.spawn(["true"], name="three"))
    assert sorted(ran.name for ran in runlog.read(str(stockade_home))[0]) == ["one", "three", "two"]


def test_a_refused_run_has_its_name_in_the_receipt() -> None:
    with pytest.raises(stockade.StockadeError) as caught:
        stockade.run(["true"], {"read": ["/no/such/path"]}, name="refused")
    assert caught.value.receipt is not None and caught.value.receipt.predicate.name == "refused"


def test_a_receipt_without_a_name_has_no_such_field() -> None:
    receipt = stockade.run(["true"]).receipt
    assert receipt is not None and b'"name":""' not in receipt.payload


def test_objects_show_what_they_are(workspace: Path) -> None:
    box = Sandbox(Policy(workspace=str(workspace)), name="build")
    assert repr(box) == f"<Sandbox 'build' -: closed in {workspace}>"
    with box:
        assert repr(box) == f"<Sandbox 'build' {box.id}: open in {workspace}>"
        with box.start(["sleep", "60"]) as process:
            assert repr(process) == f"<Process {process.pid}: running>"
            process.kill(0)
            process.wait()
            assert repr(process) == f"<Process {process.pid}: cancelled>"
        with box.shell() as shell, box.python() as python, box.background(["true"]) as job:
            assert repr(shell) == "<Shell: not started>"
            shell.run("touch new")
            assert repr(shell) == "<Shell: open>"
            assert repr(python) == "<Interpreter: not started>"
            job.wait()
            assert repr(job) == "<Background: exited>"
        assert repr(shell) == "<Shell: closed>"
        assert repr(box.files) == f"<Files of {workspace}: open>"
        kept = box.workspace
        assert repr(kept) == f"<Workspace {kept.id} of {workspace}>"
    diff = kept.diff()
    assert repr(diff) == "<Diff: 1 file, +0 -0>"
    assert ([one.path for one in diff], len(diff)) == (["new"], 1)
    done = kept.commit()
    assert repr(done) == f"<Commit of {kept.id}: 1 applied, closed>"
    assert ([one.path for one in done], len(done)) == (["new"], 1)


def test_values_and_collections_show_what_they_are() -> None:
    with Pool(size=2, name="graders") as pool, Spawner() as spawner:
        assert repr(pool).startswith("<Pool 'graders': ") and repr(pool).endswith(" of 2 ready>")
        assert repr(spawner) == "<Spawner: 0 runs>"
    assert repr(pool) == "<Pool 'graders': closed>"
    assert repr(Policy(net="open", limits={"wall": "5s"})) == "Policy(net='open', limits={'wall': 5.0})"
    assert eval(repr(Policy(read=["/opt"]))) == Policy(read=["/opt"])
    assert repr(Host.pretend(without=("overlay",))).endswith("uid 1000, without overlay>")


def test_standard_error_is_text_too() -> None:
    assert stockade.run(["sh", "-c", "echo oh >&2"]).stderr_text == "oh\n"


def test_the_public_key_of_receipts_is_a_call_away() -> None:
    result = stockade.run(["true"])
    assert stockade.verify(result.receipt or b"", stockade.receipt.public_key(), result=result)
