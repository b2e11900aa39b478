"""`stockade ps` and `stockade kill`: seeing and ending sandboxes of other processes."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import stockade
from stockade import cli
from stockade.runs.register import register, runlog
from stockade.runs.register.sandbox_record import SandboxRecord
from support.supervisors import ID, dead, stand_in, supervisor

OTHER = "0123ffffffff"
PS = [sys.executable, "-c", "import sys; from stockade import cli; sys.exit(cli.main(['ps']))"]


@pytest.fixture
def home(stockade_home: Path) -> str:
    return str(stockade_home)


def main(*words: str) -> int:
    try:
        return cli.main(list(words))
    except SystemExit as end:
        return int(end.code or 0)


class TestPs:
    @pytest.mark.parametrize("made", [False, True], ids=["no state", "empty register"])
    def test_nothing_is_said_in_words(
        self, home: str, made: bool, capsys: pytest.CaptureFixture[str]
    ) -> None:
        if made:
            register.enter(home, SandboxRecord(id=ID)).close()
        assert main("ps") == 0
        assert capsys.readouterr() == ("no sandbox is running\n", "")
        assert main("ps", "--json") == 0
        assert json.loads(capsys.readouterr().out) == []

    def test_a_pipe_gets_plain_columns_in_full(self, home: str) -> None:
        command = ["sh", "-c", "echo " + "x" * 300, "\x1b[2J\n"]
        with supervisor(Path(home), id=ID, command=command, workspace="/srv/project") as process:
            done = subprocess.run(PS, capture_output=True, text=True, check=True)
        head, row = done.stdout.splitlines()
        assert head.split() == ["ID", "AGE", "PID", "COMMAND", "WORKSPACE"]
        assert row.split()[:1] + row.split()[2:3] == [ID, str(process.pid)]
        assert "x" * 300 in row and row.endswith("/srv/project") and "\\x1b[2J\\n" in row
        register.sweep(home)

    def test_a_terminal_gets_rows_that_fit(self, home: str) -> None:
        entry = register.enter(home, SandboxRecord(id=ID, command=("x" * 300,), workspace="/" + "y" * 300))
        controller, terminal = pty.openpty()
        environ = {**os.environ, "COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}
        done = subprocess.run(PS, stdout=terminal, env=environ, check=False)
        os.close(terminal)
        rows = os.read(controller, 1 << 16).decode().splitlines()
        os.close(controller)
        assert done.returncode == 0 and len(rows) == 2
        assert max(map(len, rows)) <= 80 and rows[1].count("…") == 2
        entry.close()

    def test_json_has_everything(self, home: str, capsys: pytest.CaptureFixture[str]) -> None:
        entry = register.enter(home, SandboxRecord(id=ID, command=("true",), layer="ab"))
        assert main("ps", "--json") == 0
        (shown,) = json.loads(capsys.readouterr().out)
        assert (shown["id"], shown["command"], shown["layer"]) == (ID, ["true"], "ab")
        assert shown["supervisor"] == os.getpid()
        entry.close()

    def test_a_damaged_record_is_told_on_stderr(self, home: str, capsys: pytest.CaptureFixture[str]) -> None:
        entry = register.enter(home, SandboxRecord(id=ID))
        damaged = dead(home, b"{") / "sandboxes"
        assert main("ps") == 0
        shown = capsys.readouterr()
        word = f"stockade: {damaged} is damaged, and what cannot be read was skipped\n"
        assert ID in shown.out and shown.err == word
        register.sweep(home)
        entry.close()

    def test_the_age_is_in_the_unit_that_matters(self, home: str, capsys: pytest.CaptureFixture[str]) -> None:
        entry = register.enter(home, SandboxRecord(id=ID, started="2020-01-01T00:00:00Z"))
        odd = register.enter(home, SandboxRecord(id=OTHER, started="yesterday"))
        assert main("ps") == 0
        first, second = (row.split()[1] for row in capsys.readouterr().out.splitlines()[1:])
        assert first.endswith("d") and second == "?"
        entry.close()
        odd.close()

    def test_somebody_elses_state_is_refused(self, home: str, capsys: pytest.CaptureFixture[str]) -> None:
        os.mkdir(home, 0o755)
        for command in (["ps"], ["kill", "--all"]):
            assert main(*command) == 125
            assert "open to others" in capsys.readouterr().err


class TestKill:
    def test_several_are_ended_by_their_beginnings(
        self, home: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with (
            stand_in() as first,
            stand_in() as second,
            supervisor(Path(home), id=ID, gate=first.pid),
            supervisor(Path(home), id=OTHER, gate=second.pid),
        ):
            assert main("kill", "01234", OTHER, ID) == 0
            assert sorted(capsys.readouterr().out.splitlines()) == [f"{ID} has ended", f"{OTHER} has ended"]
            assert (first.wait(), second.wait()) == (-signal.SIGTERM, -signal.SIGTERM)
            assert main("ps") == 0
            assert capsys.readouterr().out == "no sandbox is running\n"
        register.sweep(home)

    def test_one_is_ended_by_its_name(self, home: str, capsys: pytest.CaptureFixture[str]) -> None:
        name = "8a0e6a0e-5d35-4b0e-9b1c-9f1b1f0b6a11"
        with (
            stand_in() as first,
            stand_in() as second,
            supervisor(Path(home), id=ID, gate=first.pid, name=name),
            supervisor(Path(home), id=OTHER, gate=second.pid, name="8a0e-other"),
        ):
            assert main("kill", "8a0e") == 125
            assert "'8a0e' stands for several sandboxes" in capsys.readouterr().err
            assert main("kill", name[:8]) == 0
            assert capsys.readouterr().out == f"{ID} has ended\n"
            assert (first.wait(), second.poll()) == (-signal.SIGTERM, None)
        register.sweep(home)

    @pytest.mark.parametrize("word", ["nothing", ID[:3]], ids=["unknown", "too short"])
    def test_where_a_word_names_nothing_none_is_ended(
        self, home: str, word: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with stand_in() as gate:
            entry = register.enter(home, SandboxRecord(id=ID, gate=gate.pid))
            assert main("kill", "--now", ID, word) == 125
            shown = capsys.readouterr()
            assert gate.poll() is None and shown.out == ""
            assert f"no living sandbox '{word}'; no sandbox was ended" in shown.err
            assert "`stockade ps`" in shown.err and "4 characters" in shown.err
            assert main("kill", "--now", "-q", ID[:4]) == 0
            assert gate.wait() == -signal.SIGKILL and capsys.readouterr() == ("", "")
            entry.close()

    def test_one_that_has_just_ended_does_not_save_the_others(
        self, home: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stockade.run(["true"])
        (ran,) = runlog.read(home)[0]
        with stand_in() as gate:
            entry = register.enter(home, SandboxRecord(id=ID, gate=gate.pid))
            assert main("kill", "--now", ran.sandbox, ID) == 0
            assert gate.wait() == -signal.SIGKILL
            entry.close()
        assert capsys.readouterr().out == f"{ran.sandbox} had ended already\n{ID} has ended\n"

    def test_all_of_none_is_no_failure(self, home: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main("kill", "--all") == 0
        assert capsys.readouterr().out == "no sandbox is running\n"

    def test_all_are_ended_side_by_side(self, home: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(register, "PATIENCE", 1.0)
        stubborn = ("sh", "-c", "trap '' TERM; echo; while :; do sleep 0.1; done")
        gates = [subprocess.Popen(stubborn, stdout=subprocess.PIPE) for _ in range(8)]
        for gate in gates:
            assert gate.stdout is not None and gate.stdout.read(1)
        entries = [
            register.enter(home, SandboxRecord(id=f"{n:012x}", gate=one.pid)) for n, one in enumerate(gates)
        ]
        began = time.monotonic()
        assert main("kill", "--all") == 0
        assert time.monotonic() - began < 8
        for gate, entry in zip(gates, entries, strict=True):
            assert gate.wait() == -signal.SIGKILL
            assert gate.stdout is not None
            gate.stdout.close()
            entry.close()

    @pytest.mark.parametrize("words", [[], ["--all", ID]], ids=["none", "both"])
    def test_what_to_end_must_be_said(self, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main("kill", *words) == 2
        assert "name the sandboxes, or add --all" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--now"]], ids=["asked", "now"])
class TestARealOne:
    """It ends with what runs in it, and who supervises it is told why."""

    def kill(self, home: str, flags: list[str]) -> None:
        (record,) = register.living(home)
        assert main("kill", *flags, record.id[:6]) == 0

    def judge(self, result: stockade.Result) -> None:
        found = (result.outcome, result.exit_code, result.reason)
        assert found == ("cancelled", 130, "ended by `stockade kill`")

    def test_of_one_run(self, home: str, flags: list[str]) -> None:
        # In a thread, because the callback is the supervisor's own.
        killing = threading.Thread(target=self.kill, args=(home, flags))
        result = stockade.run(["sh", "-c", "echo; sleep 100"], on_stdout=lambda _: killing.start())
        killing.join()
        self.judge(result)

    def test_that_lives(self, home: str, flags: list[str]) -> None:
        killing = threading.Thread(target=self.kill, args=(home, flags))
        with stockade.Sandbox() as box, box.start(["sleep", "100"]) as process:
            clean = "trap 'exit 0' TERM; echo; sleep 100 & wait"
            result = box.run(["sh", "-c", clean], on_stdout=lambda _: killing.start())
            killing.join()
            self.judge(result)
            self.judge(process.wait(10))
            self.judge(box.run(["true"]))
