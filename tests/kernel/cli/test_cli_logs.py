"""`stockade logs` and the log behind it: what is recorded, what is not, and how much."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox, cli
from stockade.result import Outcome, Result
from stockade.runs.register import runlog

SECRET = "hunter2-in-an-argument"
Shown = Callable[..., str]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Shown:
    """What `stockade logs` prints."""

    def logs(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert cli.main(["logs", *words]) == code
        return capsys.readouterr().out

    return logs


def test_nothing_is_said_in_words(shown: Shown) -> None:
    assert shown() == "no runs are recorded\n"
    assert json.loads(shown("--json")) == []


def test_each_run_is_a_row_and_the_last_is_at_the_end(shown: Shown, workspace: Path) -> None:
    policy = Policy(workspace=str(workspace))
    changed = stockade.run(["sh", "-c", "echo 1 > new; exit 3"], policy)
    stockade.run(["sleep", "30"], timeout=0.3)
    stockade.run(["no-such-program"])
    head, *rows = shown().splitlines()
    assert head.split()[:4] == ["BEGAN", "SANDBOX", "COMMAND", "OUTCOME"]
    assert [row.split()[3] for row in rows] == ["sh", "sleep", "no-such-program"]
    assert "exited 3" in rows[0] and rows[0].split()[-2:] == ["1", str(workspace)]
    assert changed.workspace_id in rows[0]
    assert "timed-out" in rows[1] and "setup-failed" in rows[2]
    found = json.loads(shown("--json"))
    assert [one["exit_code"] for one in found] == [3, 124, 127]
    assert found[0]["changes"] == 1 and found[0]["workspace_kept"] and found[0]["arguments"] == 2
    assert abs(found[0]["at"] - time.time()) < 60


def test_a_workspace_tells_all_of_its_runs(shown: Shown, workspace: Path, stockade_home: Path) -> None:
    policy = Policy(workspace=str(workspace), limits={"output": 10})
    first = stockade.run(["sh", "-c", "echo 1 > new; echo more than ten bytes"], policy)
    stockade.run(["rm", "new"], policy, resume=first.workspace_id)
    stockade.run(["true"])
    told = shown(first.workspace_id[:6])
    assert told.count("began") == 2 and f"stockade diff {first.workspace_id}" in told
    assert f"stdout     {first.spilled[0].size} bytes past the limit in {first.spilled[0].path}" in told
    os.unlink(first.spilled[0].path)
    stockade.Workspace.open(first.workspace_id).discard()
    told = shown(f"@{first.workspace_id}")
    assert "no longer kept" in told and "removed since" in told


def test_a_name_tells_the_runs_of_its_sandbox(shown: Shown, workspace: Path) -> None:
    with stockade.Sandbox(name="reviewer-7", on_exit="discard") as box:
        box.run(["true"])
    stockade.run(["true"])
    assert shown("reviewer-7").count("command") == shown("revi").count("command") == 1


def test_an_id_that_nobody_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    stockade.run(["true"])
    assert cli.main(["logs", "zzzz"]) == 125
    assert "no run of 'zzzz' is recorded" in capsys.readouterr().err


def test_few_or_only_failures_or_ids_can_be_asked_for(shown: Shown) -> None:
    for code in (0, 1, 2):
        stockade.run(["sh", "-c", f"exit {code}"])
    assert len(shown("-n", "1").splitlines()) == 2
    assert [one["exit_code"] for one in json.loads(shown("--failed", "--json"))] == [1, 2]
    assert [len(id) for id in shown("-q").split()] == [12, 12, 12]
    assert cli.main(["logs", "-n", "0"]) == 125


def test_every_way_to_run_is_recorded(shown: Shown) -> None:
    import asyncio

    from stockade import AsyncSandbox

    async def asynchronously() -> None:
        async with AsyncSandbox() as box:
            await box.run(["sh", "-c", "exit 3"])

    with Sandbox() as box:
        box.run(["sh", "-c", "exit 1"])
        with box.start(["sh", "-c", "exit 2"]) as process:
            process.wait()
            process.wait()
    asyncio.run(asynchronously())
    assert [one["exit_code"] for one in json.loads(shown("--json"))] == [1, 2, 3]


class TestSecrets:
    def test_arguments_variables_and_output_are_not_recorded(self, stockade_home: Path) -> None:
        policy = Policy(env={"TOKEN": SECRET}, limits={"output": 5})
        stockade.run(["sh", "-c", f"echo {SECRET}; echo $TOKEN", SECRET], policy, env={"MORE": SECRET})
        log = (stockade_home / runlog.FILE).read_text()
        assert '"program":"sh"' in log and SECRET not in log

    def test_a_password_in_the_place_of_a_program_is_cut_to_its_last_part(self, stockade_home: Path) -> None:
        stockade.run([f"/{SECRET}/tool"])
        assert SECRET not in (stockade_home / runlog.FILE).read_text()

    def test_whoever_wants_them_gets_them(self, shown: Shown, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STOCKADE_LOG", "full")
        stockade.run(["echo", "a b", "\x1b[2J", "x" * 5000])
        (one,) = json.loads(shown("--json"))
        assert one["command"][:2] == ["echo", "a b"] and len(str(one["command"])) < 1200
        assert "echo 'a b'" in shown() and "\x1b" not in shown()

    def test_whoever_wants_no_log_has_none(
        self, stockade_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STOCKADE_LOG", "off")
        stockade.run(["true"])
        assert not (stockade_home / runlog.FILE).exists()

    def test_the_file_is_its_owners_alone(self, stockade_home: Path) -> None:
        stockade.run(["true"])
        assert (stockade_home / runlog.FILE).stat().st_mode & 0o777 == 0o600


def note(home: Path, times: int = 1, program: str = "true") -> None:
    home.mkdir(mode=0o700, exist_ok=True)
    for _ in range(times):
        result = Result(outcome=Outcome.EXITED, exit_code=0)
        runlog.add(str(home), runlog.line([program], result, sandbox="0" * 12, directory="/"))


class TestBounds:
    def test_it_is_never_more_than_two_files(
        self, stockade_home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(runlog, "MOST_BYTES", 2000)
        note(stockade_home, 100)
        assert sorted(path.name for path in stockade_home.iterdir()) == [runlog.FILE, runlog.EARLIER]
        assert all(path.stat().st_size < 2300 for path in stockade_home.iterdir())
        found, damaged = runlog.read(str(stockade_home))
        assert 10 < len(found) < 60 and not damaged

    def test_processes_that_write_at_once_lose_no_line(self, stockade_home: Path) -> None:
        stockade_home.mkdir(mode=0o700)
        code = (
            "import sys\nfrom stockade.runs.register import runlog\n"
            "from stockade.result import Outcome, Result\n"
            "for n in range(200):\n"
            "    result = Result(outcome=Outcome.EXITED, exit_code=n)\n"
            "    runlog.add(sys.argv[1], runlog.line(['p'], result, sandbox='', directory='/'))\n"
        )
        writers = [subprocess.Popen([sys.executable, "-c", code, str(stockade_home)]) for _ in range(3)]
        assert [writer.wait(60) for writer in writers] == [0, 0, 0]
        found, damaged = runlog.read(str(stockade_home))
        assert (len(found), damaged) == (600, 0)

    def test_a_line_that_cannot_be_read_is_told_and_skipped(
        self, stockade_home: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        note(stockade_home)
        with (stockade_home / runlog.FILE).open("ab") as file:
            file.write(b'\xff\n{"at": 1\n')
        note(stockade_home)
        assert cli.main(["logs"]) == 0
        told = capsys.readouterr()
        assert len(told.out.splitlines()) == 3 and "2 lines of" in told.err

    def test_a_log_that_cannot_be_written_ends_no_run(self, stockade_home: Path) -> None:
        stockade.run(["true"]).check()
        (stockade_home / runlog.FILE).unlink()
        (stockade_home / runlog.FILE).mkdir()
        assert stockade.run(["true"]).ok

    def test_a_link_in_its_place_is_not_followed(self, stockade_home: Path, tmp_path: Path) -> None:
        stockade.run(["true"]).check()
        (stockade_home / runlog.FILE).unlink()
        (stockade_home / runlog.FILE).symlink_to(tmp_path / "elsewhere")
        assert stockade.run(["true"]).ok and not (tmp_path / "elsewhere").exists()

    def test_names_that_a_program_chose_take_little_room(self, workspace: Path, stockade_home: Path) -> None:
        policy = Policy(workspace={"path": str(workspace), "mode": "rw"}, protect=[])
        script = (
            "d=$(printf %0200d 0); mkdir -p $d/$d/$d; cd $d/$d/$d; "
            "for n in $(seq 50); do mkdir $n; touch $n/.envrc; done"
        )
        result = stockade.run(["sh", "-c", script], policy)
        assert len(result.handoffs) == 50
        assert (stockade_home / "runs.log").stat().st_size < 10_000
        (ran,) = runlog.read(str(stockade_home))[0]
        assert (ran.left, len(ran.left_first)) == (50, runlog.MOST_LEFT) and "direnv" in ran.left_first[0]
