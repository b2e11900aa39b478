"""`stockade shell --keep` and `stockade attach`: a shell that goes on while nobody looks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stockade.runs.register import register, sandbox_record
from stockade.sessions.attach.protocol import AttachRefusal, FromHolder, TerminalEnd
from support.cli import stockade_command
from support.kept import HELLO, client, closed, connected, heard, until
from support.means import need_program
from support.screens import Terminal, shell, stockade

LEAVE = b"\x1d\x1d\x1d"
BASH = {"SHELL": "/bin/bash", "PS1": "", "INPUTRC": "/dev/null"}
#: A short prompt: lines of a screen have 80 columns.
PROMPT = ("--env", "PS1=bash-# ")


@pytest.fixture(autouse=True)
def ended(stockade_home: Path) -> Iterator[None]:
    """What a test kept does not outlive it."""
    yield
    for record in register.living(str(stockade_home)):
        register.stop(str(stockade_home), record, now=True)
    until(lambda: not register.living(str(stockade_home)))


@contextlib.contextmanager
def kept(workspace: Path, *arguments: str, typed: str = "", **options: Any) -> Iterator[Terminal]:
    """A kept shell, with us at it."""
    with stockade(workspace, "shell", "--keep", *PROMPT, *arguments, environment=BASH, **options) as terminal:
        terminal.until("bash-")
        if typed:
            terminal.type(f"{typed}\n")
        yield terminal


def leave(terminal: Terminal) -> str:
    """Leave it, and return the id of its sandbox."""
    terminal.type(LEAVE)
    assert terminal.code() == 0
    assert "stockade: detached; the shell goes on" in terminal.text
    return terminal.text.rpartition("`stockade attach ")[2].partition("`")[0]


def listed() -> list[dict[str, object]]:
    found = json.loads(stockade_command("ps", "--json", cwd=Path("/")).stdout)
    assert isinstance(found, list)
    return found


class TestComingBack:
    def test_what_runs_goes_on_and_what_it_showed_is_shown_again(self, workspace: Path) -> None:
        # A process of its own: an interactive bash can miss a Ctrl-C between two commands of a loop.
        loop = "for i in $(seq 1000); do echo tick $((i * 11)); sleep 0.05; done"
        count = f"touch made $'\\xff'; sh -c '{loop}'"
        with kept(workspace, typed=count) as terminal:
            terminal.until("tick 22")
            id = leave(terminal)
            assert terminal.settings() == terminal.fresh
        printed = stockade_command("attach", "--print", id, cwd=workspace).stdout
        assert (
            printed.startswith("bash-") and "done'\ntick 11\ntick 22\n" in printed and "\x1b" not in printed
        )
        done = stockade_command("ps", cwd=workspace)
        assert f"`stockade attach {id}` returns to it" in done.stderr
        with stockade(workspace, "attach") as terminal:
            terminal.until(b"tick 11\r\n")
            assert b"bash-" in terminal.shown and terminal.shown.count(b"tick 11\r\n") == 1
            last = int(terminal.shown.split(b"tick ")[-1].split()[0])
            terminal.until(f"tick {last + 33}".encode())
            terminal.type(b"\x03")
            terminal.until("^C")
            terminal.type("exit 5\n")
            assert terminal.code() == 5
            assert "2 changed paths kept aside" in terminal.text and "added     made" in terminal.text
            assert terminal.settings() == terminal.fresh
        with stockade(workspace, "attach", id) as terminal:
            assert terminal.code() == 125
            assert f"sandbox {id} has ended: exited, exit code 5" in terminal.text
        assert stockade_command("logs", id, cwd=workspace).stdout.count("exit code 5") == 1
        assert listed() == []

    def test_what_it_left_for_tools_of_the_host_is_said_when_it_ends(self, workspace: Path) -> None:
        names = [word for name in (".envrc", ".vscode", ".claude") for word in ("--unprotect", name)]
        with kept(workspace, "--mode", "rw", *names, typed="echo x > .envrc; exit 5") as terminal:
            assert terminal.code() == 5
            shown = terminal.text.replace("\n", "")  # a long path wraps anywhere
            assert "your tools run or obey" in shown and ".envrc: " in shown

    def test_and_is_recorded_where_nobody_was_there(self, workspace: Path, stockade_home: Path) -> None:
        names = [word for name in (".envrc", ".vscode", ".claude") for word in ("--unprotect", name)]
        (workspace / "work").write_text(
            "echo $((6 * 7))\nuntil [ -e go ]; do sleep 0.1; done\n"
            "for n in $(seq 30); do mkdir $n; echo x > $n/.envrc; done\n"
        )
        with kept(workspace, "--mode", "rw", *names, typed="sh work; exit 5") as terminal:
            terminal.until("\n42\n")
            id = leave(terminal)
        (workspace / "go").touch()
        until(lambda: not register.living(str(stockade_home)))
        with stockade(workspace, "attach", id) as terminal:
            assert terminal.code() == 125
            assert "and left 30 files that" in terminal.text.replace("\n", "")
        told = stockade_command("logs", id, cwd=workspace).stdout
        assert "left       30 files that your tools run or obey" in told and "and 10 more" in told
        assert f"{workspace}/" in told and "/.envrc: " in told
        (ran,) = json.loads(stockade_command("logs", id, "--json", cwd=workspace).stdout)
        assert ran["left"] == 30 and len(ran["left_first"]) == 20 and ran["outcome"] == "exited"
        assert f"`stockade logs {id}`" in stockade_command("logs", cwd=workspace).stderr

    def test_the_holder_has_nothing_of_the_callers_and_little_memory(self, workspace: Path) -> None:
        read, write = os.pipe()
        with kept(workspace, pass_fds=[write]) as terminal:
            os.close(write)
            leave(terminal)
        # Whoever waits for the end of it, as `$(...)` does, is not kept waiting.
        assert os.read(read, 1) == b""
        os.close(read)
        (record,) = listed()
        process = Path(f"/proc/{record['supervisor']}")
        assert record["kept"] is True and record["command"] == ["/bin/bash"]
        assert os.readlink(process / "cwd") == "/"
        assert {os.readlink(process / "fd" / str(number)) for number in range(3)} == {"/dev/null"}
        # Neither a terminal nor a way to get one: no controlling terminal, and not the session's leader.
        words = (process / "stat").read_text().rpartition(")")[2].split()
        assert words[4] == "0" and words[3] != str(record["supervisor"])
        assert not any(
            "/dev/pts/" in (name := os.readlink(fd)) and not name.endswith("ptmx")
            for fd in (process / "fd").iterdir()
            if fd.exists()
        )
        resident = next(
            int(line.split()[1])
            for line in (process / "status").read_text().splitlines()
            if line.startswith("VmRSS:")
        )
        assert resident < 30 << 10

    def test_however_a_client_goes_the_shell_stays(self, workspace: Path) -> None:
        with kept(workspace, typed="mine=$((6 * 7)); echo ready$mine") as terminal:
            terminal.until("ready42")
            terminal.hang_up()
            assert terminal.process.wait(10) == 129
        for how in (signal.SIGTERM, signal.SIGKILL):
            with stockade(workspace, "attach") as terminal:
                terminal.until("ready42")
                terminal.until(lambda: terminal.raw)
                terminal.kill(how)
                assert terminal.code() == (143 if how == signal.SIGTERM else -9)
                assert how == signal.SIGKILL or terminal.settings() == terminal.fresh
        with stockade(workspace, "attach") as terminal:
            terminal.type("echo still $mine; exit\n")
            terminal.until("still 42")
            assert terminal.code() == 0

    def test_a_workspace_is_gone_on_with(self, workspace: Path) -> None:
        assert stockade_command("run", "--", "sh", "-c", "echo 1 > file", cwd=workspace).returncode == 0
        with kept(workspace, "-w", "@", typed="cat file; echo 2 >> file; exit") as terminal:
            assert terminal.code() == 0
            assert "\n1\n" in terminal.text
        assert "+2" in stockade_command("diff", cwd=workspace).stdout

    def test_a_full_screen_program_draws_itself_for_whoever_comes(self, workspace: Path) -> None:
        editor = need_program("vi")
        (workspace / "file").write_text("written in it\n")
        with kept(workspace, typed=f"{editor} -u NONE -N file") as terminal:
            terminal.until("~\n~")
            leave(terminal)
        with stockade(workspace, "attach", size=(14, 50)) as terminal:
            terminal.until(lambda: terminal.text.splitlines()[::12] == ["written in it", "~"])
            terminal.type(":q!\n")
            terminal.until(lambda: "bash-" in terminal.text)
            terminal.type("stty size; exit\n")
            terminal.until("14 50")
            assert terminal.code() == 0


class TestSeveral:
    def test_they_see_the_same_and_the_smallest_has_its_way(self, workspace: Path) -> None:
        with (
            kept(workspace, typed="echo $((6 * 7))") as one,
            stockade(workspace, "attach", size=(20, 100)) as other,
        ):
            other.until("\n42\n")
            other.type("echo $((41 + 2)); stty size\n")
            for terminal in (one, other):
                terminal.until("\n43\n20 80\n")
            other.resize(22, 70)
            one.type("sleep 0.2; stty size\n")
            other.until("22 70")
            leave(other)
            one.type("stty size; exit 7\n")
            one.until("24 80")
            assert one.code() == 7

    def test_another_terminal_is_another_shell_in_the_same_sandbox(self, workspace: Path) -> None:
        with kept(workspace, typed="x=here; echo 1 > /tmp/between") as one:
            with stockade(workspace, "attach", "--new") as other:
                other.until("bash-")
                other.type("tty; cat /tmp/between; echo x=$x.; exit 3\n")
                assert other.code() == 3
                assert "/dev/pts/1\n1\nx=.\n" in other.text
                assert "the sandbox goes on in terminal 1" in other.text
            assert "bash-" in stockade_command("attach", "--print", "-t", "1", cwd=workspace).stdout
            with stockade(workspace, "attach", "-t", "2") as other:
                assert other.code() == 125 and "has no terminal 2\nstockade: hint: it has 1" in other.text
            one.type("exit\n")
            assert one.code() == 0
        ran = json.loads(stockade_command("logs", "--json", cwd=workspace).stdout)
        assert sorted(run["exit_code"] for run in ran) == [0, 3]

    def test_only_one_is_asked_and_nobody_is_asked_again(self, workspace: Path) -> None:
        ask = r"stty raw -echo; printf '\033[6n'; head -c 6 | od -c; stty sane"
        with kept(workspace) as one, stockade(workspace, "attach") as other:
            other.until("bash-")
            other.type(f'clear; sh -c "{ask}"; echo $((6 * 7))\n')
            for terminal in (other, one):
                terminal.until("42\nbash-")
            assert (one.shown.count(b"\x1b[6n"), other.shown.count(b"\x1b[6n")) == (0, 1)
            with stockade(workspace, "attach") as third:
                third.until("42\nbash-")
                third.type("echo $((42 + 1))\n")
                third.until("\n43\n")
                assert b"\x1b[6n" not in third.shown
            one.type("exit\n")
            assert (one.code(), other.code()) == (0, 0)

    def test_one_that_takes_nothing_holds_nobody_up_and_sees_the_end_later(
        self, workspace: Path, stockade_home: Path
    ) -> None:
        with kept(workspace) as terminal:
            leave(terminal)
        with client(stockade_home) as (line, stuck), client(stockade_home) as (_, one):
            os.write(one, b"seq 250000; echo all $((6 * 7)); read; exit 4\n")
            assert heard(one, b"all 42").count(b"\n") > 250_000
            assert heard(stuck, b"all 42").count(b"\n") < 200_000
            os.write(one, b"\n")
            over, file = line.receive(FromHolder)
            with open(file, "rb") as content:
                content.seek(0)
                assert isinstance(over, TerminalEnd) and json.load(content)["exit_code"] == 4

    def test_one_that_goes_before_it_is_let_in_opens_nothing(
        self, workspace: Path, stockade_home: Path
    ) -> None:
        with kept(workspace) as terminal:
            (record,) = register.living(str(stockade_home))
            os.kill(record.supervisor, signal.SIGSTOP)
            line, _, theirs = gone = connected(stockade_home)
            line.send(msgspec.structs.replace(HELLO, terminal=-1), theirs)
            closed(gone)
            os.kill(record.supervisor, signal.SIGCONT)
            terminal.type("ls /dev/pts; exit\n")
            assert terminal.code() == 0
            assert "\n0  ptmx\n" in terminal.text

    def test_a_client_that_is_stopped_comes_back_to_what_there_is(self, workspace: Path) -> None:
        with kept(workspace) as one:
            id = leave(one)
        with shell(workspace) as terminal:
            terminal.type(f"$S attach {id}\n")
            terminal.until("bash-")
            terminal.type("(sleep 0.3; echo $((6 * 7)) > /tmp/done; echo $((42 + 1))) & kill -STOP 0\n")
            terminal.type("echo $((43 + 1)); cat /tmp/done\n")
            terminal.until("\n44\n")
            (record,) = listed()
            process = next(
                int(pid)
                for pid in Path(f"/proc/{terminal.process.pid}/task/{terminal.process.pid}/children")
                .read_text()
                .split()
            )
            os.kill(process, signal.SIGTSTP)
            terminal.until("Stopped")
            assert not terminal.raw and record["id"] == id
            terminal.type("clear; fg\n")
            terminal.until(lambda: terminal.raw)
            terminal.until("\n44\n")
            terminal.type("exit 6\n")
            terminal.until(lambda: not terminal.raw)
            terminal.type("echo code $?\n")
            terminal.until("code 6")


class TestEnds:
    def test_kill_ends_it_and_the_client_is_told(self, workspace: Path) -> None:
        with kept(workspace, typed="echo $((6 * 7)); exec sleep 1000") as terminal:
            terminal.until("\n42\n")
            (record,) = listed()
            done = stockade_command("kill", str(record["id"]), cwd=workspace)
            assert done.returncode == 0, done.stderr
            assert terminal.code() == 130
            assert "stockade kill" in terminal.text
            assert terminal.settings() == terminal.fresh
        until(lambda: listed() == [])

    def test_sigterm_ends_it_in_order_whoever_still_comes(self, workspace: Path, stockade_home: Path) -> None:
        with kept(workspace, typed="touch made; echo $((6 * 7)); exec sleep 1000") as terminal:
            terminal.until("\n42\n")
            (record,) = register.living(str(stockade_home))
            os.kill(record.supervisor, signal.SIGSTOP)
            os.kill(record.supervisor, signal.SIGTERM)
            line, _, theirs = late = connected(stockade_home)
            line.send(msgspec.structs.replace(HELLO, terminal=-1), theirs)
            os.kill(record.supervisor, signal.SIGCONT)
            refused = line.receive(FromHolder)[0]
            assert isinstance(refused, AttachRefusal) and refused.message == "the sandbox is ending"
            closed(late)
            assert terminal.code() == 130
            assert "1 changed path kept aside" in terminal.text

    def test_a_killed_holder_takes_everything_with_it(
        self, workspace: Path, stockade_home: Path, swept: None
    ) -> None:
        with kept(workspace, typed="echo $((6 * 7)); exec sleep 1000") as terminal:
            terminal.until("\n42\n")
            (record,) = register.living(str(stockade_home))
            os.kill(record.supervisor, signal.SIGKILL)
            assert terminal.code() == 125
            assert "the process that held it has" in terminal.text
            assert terminal.settings() == terminal.fresh
        until(lambda: sandbox_record.born(record.gate) == 0)
        with stockade(workspace, "attach", record.id) as terminal:
            assert terminal.code() == 125 and "there is no living sandbox" in terminal.text
        register.sweep(str(stockade_home))
        assert list((stockade_home / "run").iterdir()) == []

    def test_its_time_is_that_of_the_sandbox(self, workspace: Path) -> None:
        typed = "touch made; exec sleep 1000"
        with kept(workspace, "--timeout", "3s", "--discard", typed=typed) as one:
            with stockade(workspace, "attach", "--new") as other:
                other.type("exec sleep 1000\n")
                assert other.code() == 124
            assert one.code() == 124
            assert "timed-out" in one.text and "1 changed path discarded" in one.text + other.text


class TestRefusals:
    def test_what_cannot_be_kept_is_refused(self, workspace: Path) -> None:
        for arguments, word in (
            (
                ["--keep", "--commit"],
                "--commit does not work with --keep",
            ),
            (["--keep", "-p", "missing.toml"], "missing.toml"),
            (["--keep", "--read", "/missing"], "/missing"),
        ):
            with stockade(workspace, "shell", *arguments) as terminal:
                assert terminal.code() == 125
                assert word in terminal.text
        assert listed() == []

    def test_a_script_has_no_terminal_to_attach(self, workspace: Path) -> None:
        for command in (["attach"], ["shell", "--keep"]):
            done = stockade_command(*command, cwd=workspace)
            assert done.returncode == 125 and "standard input and output must be a terminal" in done.stderr

    def test_of_several_the_only_one_here_is_meant(self, workspace: Path, tmp_path: Path) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        ids = []
        for place, word in ((workspace, "first"), (elsewhere, "second")):
            with kept(place, typed=f"echo $((7 * 6)) {word}") as terminal:
                terminal.until(f"42 {word}")
                ids.append(leave(terminal))
        assert "42 first" in stockade_command("attach", "--print", cwd=workspace).stdout
        assert "42 second" in stockade_command("attach", "--print", cwd=elsewhere).stdout
        refused = stockade_command("attach", "--print", cwd=tmp_path)
        assert refused.returncode == 125 and "2 sandboxes are kept:" in refused.stderr
        assert all(id in refused.stderr for id in ids) and str(elsewhere) in refused.stderr
        with kept(workspace) as terminal:
            leave(terminal)
        refused = stockade_command("attach", "--print", cwd=workspace)
        assert refused.returncode == 125 and "2 of them for this directory" in refused.stderr

    def test_only_what_is_kept_can_be_attached_to(self, workspace: Path, stockade_home: Path) -> None:
        with stockade(workspace, "attach") as terminal:
            assert terminal.code() == 125 and "no sandbox is kept" in terminal.text
        with stockade(workspace, "run", "--", "sleep", "1000") as running:
            running.until(lambda: bool(register.living(str(stockade_home))))
            (record,) = register.living(str(stockade_home))
            with stockade(workspace, "attach", record.id) as terminal:
                assert (
                    terminal.code() == 125 and "was not started by `stockade shell --keep`" in terminal.text
                )
