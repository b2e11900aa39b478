"""`stockade run` and `stockade shell` at a terminal: the program has one of its own that works like any."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stockade.sessions.attach.terminal_modes import ABORT, EVERYTHING
from support.means import applies, need_program
from support.screens import STOCKADE, Terminal, shell, stockade

PYTHON = "/usr/bin/python3"


class TestOneOfItsOwn:
    def test_it_is_the_first_of_the_sandbox_and_like_the_users(self, workspace: Path) -> None:
        script = "tty; stty size; echo $TERM/$COLORTERM; stty -a"
        with shell(workspace, size=(31, 97)) as terminal:
            terminal.type("export TERM=screen-256color COLORTERM=truecolor; stty erase ^H intr ^G\n")
            terminal.type(f"$S run -q -- sh -c '{script}'\n")
            terminal.until("intr = ^G;")
            assert "/dev/pts/0\n31 97\nscreen-256color/truecolor" in terminal.text
            assert "erase = ^H;" in terminal.text
            # It has ended, and is not hung up on in the middle of that.
            terminal.until(lambda: terminal.text.rstrip().endswith("host$"))

    def test_a_terminal_that_nothing_inside_knows_is_called_by_a_usual_name(self, workspace: Path) -> None:
        with stockade(workspace, "run", "--", "tput", "colors", environment={"TERM": "strange"}) as terminal:
            assert (terminal.code(), terminal.text.strip()) == (0, "256")

    def test_a_new_size_is_told(self, workspace: Path) -> None:
        script = "trap 'stty size; exit' WINCH; echo ready; while :; do sleep 0.05; done"
        with stockade(workspace, "run", "--", "bash", "-c", script) as terminal:
            terminal.until("ready")
            terminal.resize(11, 77)
            terminal.until("11 77")
            assert terminal.code() == 0

    def test_colours_titles_and_pastes_pass(self, workspace: Path) -> None:
        script = r"printf '\033]2;a title\007\033[38;5;196mred\033[0m\033[?2004h>'; read x; echo $x | od -c"
        with stockade(workspace, "run", "--", "bash", "-c", script) as terminal:
            terminal.until("red>")
            assert terminal.screen.title == "a title"
            assert terminal.screen.buffer[0][0].fg == "ff0000"
            terminal.type(b"\x1b[200~pasted\x1b[201~\n")
            terminal.until("p   a   s   t   e   d")
            assert "033   [   2   0   0   ~" in terminal.text
            assert terminal.code() == 0

    def test_what_the_terminal_answers_reaches_the_program(self, workspace: Path) -> None:
        script = r"stty raw -echo; printf '\033[6n'; head -c 6 | od -c; stty sane"
        with stockade(workspace, "run", "--", "bash", "-c", script) as terminal:
            terminal.until("033   [   1   ;   1   R")
            assert terminal.code() == 0


class TestKeys:
    def test_ctrl_c_ends_the_program_and_nothing_more_is_said(self, workspace: Path) -> None:
        with stockade(workspace, "run", "--", "sh", "-c", "echo ready; exec sleep 300") as terminal:
            terminal.until("ready")
            terminal.type(b"\x03")
            assert terminal.code() == 130
            assert terminal.text.split() == ["ready", "^C"]
            assert terminal.settings() == terminal.fresh

    def test_there_is_a_way_out_of_a_program_that_ignores_everything(self, workspace: Path) -> None:
        script = "trap '' INT QUIT TSTP; stty raw -echo; echo ready; while :; do sleep 9; done"
        with stockade(workspace, "run", "--", "bash", "-c", script) as terminal:
            terminal.until("ready")
            terminal.type(b"\x1d\x1d-\x1d\x1d\x1d")
            assert terminal.code() == 130
            assert "stockade: cancelled" in terminal.text
            assert terminal.settings() == terminal.fresh


class TestAShell:
    def test_jobs_are_controlled_inside(self, workspace: Path) -> None:
        with stockade(workspace, "shell", environment={"SHELL": "/bin/bash"}) as terminal:
            terminal.until("[stockade]")
            terminal.type("PS1='$?-$0> '\n")
            terminal.until("0-/bin/bash>")
            terminal.type("sh -c 'echo $((6 * 7)); exec sleep 300'\n")
            terminal.until("\n42\n")
            terminal.type(b"\x1a")
            terminal.until("Stopped")
            terminal.type("bg; jobs; fg\n")
            terminal.until("Running")

            def is_interrupted() -> bool:
                """Press Ctrl-C until the prompt is back: `fg` may not have given the terminal away yet."""
                if "130-/bin/bash>" in terminal.text:
                    return True
                terminal.type(b"\x03")
                return False

            terminal.until(is_interrupted)
            # A Ctrl-C too many takes the next key with it.
            terminal.type("\nexit 5\n")
            assert terminal.code() == 5
            assert terminal.settings() == terminal.fresh

    def test_it_is_sh_where_the_users_own_is_not_there_inside(self, workspace: Path, tmp_path: Path) -> None:
        hidden = tmp_path / "myshell"
        hidden.symlink_to("/bin/sh")
        with stockade(workspace, "shell", "--no-toolchain", environment={"SHELL": str(hidden)}) as terminal:
            terminal.until("[stockade] ")
            terminal.type("echo I am $0\n")
            terminal.until("I am sh")
            terminal.type(b"\x04")
            assert terminal.code() == 0

    def test_its_changes_are_reported_like_those_of_any_run(self, workspace: Path) -> None:
        with stockade(workspace, "shell", "--discard", environment={"SHELL": "sh"}) as terminal:
            terminal.type("touch made; exit\n")
            assert terminal.code() == 0
            assert "stockade: 1 changed path discarded" in terminal.text
            assert not (workspace / "made").exists()

    def test_it_takes_no_command(self, workspace: Path) -> None:
        with stockade(workspace, "shell", "--", "ls") as terminal:
            assert terminal.code() == 2


class TestStopping:
    """With a shell of the host that controls jobs."""

    def test_ctrl_z_stops_both_and_fg_wakes_both(self, workspace: Path) -> None:
        with shell(workspace) as terminal:
            terminal.type("$S run -q -- cat\n")
            terminal.until(lambda: terminal.raw)
            terminal.type("one\n")
            terminal.until(b"one\r\none\r\n")
            terminal.type(b"\x1a")
            terminal.until("Stopped")
            terminal.type("stty -a\n")
            terminal.until(" icanon")
            assert " echo " in terminal.text and "\nopost" in terminal.text
            terminal.type("clear; fg\n")
            terminal.until("$S run -q -- cat\n")
            terminal.type("two\n")
            terminal.until(b"two\r\ntwo\r\n")
            terminal.type(b"\x04")
            terminal.until(lambda: not terminal.raw)
            terminal.type("echo code $?\n")
            terminal.until("code 0")

    def test_a_full_screen_program_comes_back_as_it_was(self, workspace: Path) -> None:
        editor = need_program("vi")
        with shell(workspace) as terminal:
            terminal.type(f"$S run -q -- {editor} -u NONE -N file\n")
            terminal.until("~\n~")
            terminal.type("iwritten\x1b")
            terminal.until("written")
            terminal.type(b"\x1a")
            terminal.until("Stopped")
            terminal.type("fg\n")
            terminal.until("~\n~")
            terminal.until("written")
            terminal.type(":q!\n")
            terminal.until(lambda: not terminal.raw)
            terminal.type("echo code $?\n")
            terminal.until("code 0")

    def test_in_the_background_it_goes_on_until_it_wants_to_read(self, workspace: Path) -> None:
        script = "echo first; read x; echo got $x"
        with shell(workspace) as terminal:
            terminal.type(f"set -b; $S run -q -- sh -c '{script}' &\n")
            terminal.until("Stopped")
            assert "host$ first" in terminal.text and not terminal.raw
            terminal.type("fg\n")
            terminal.until(lambda: terminal.raw)
            terminal.type("this\n")
            terminal.until("got this")
            terminal.until(lambda: not terminal.raw)
            terminal.type("echo code $?\n")
            terminal.until("code 0")

    def test_after_a_stop_it_goes_on_in_the_background(self, workspace: Path) -> None:
        # bash, because dash starts its children by vfork, and cannot be stopped meanwhile.
        script = "echo ready; sleep 0.2; sleep 0.2; echo finished"
        with shell(workspace) as terminal:
            terminal.type(f"$S run -q -- bash -c '{script}'\n")
            terminal.until("\nready")
            terminal.type(b"\x1a")
            terminal.until("Stopped")
            terminal.type("bg\n")
            terminal.until("host$ finished")
            terminal.type("wait; stty -a\n")
            terminal.until(" icanon")

    def test_where_nobody_could_wake_it_nothing_stops(self, workspace: Path) -> None:
        with stockade(workspace, "run", "--", "cat") as terminal:
            terminal.until(lambda: terminal.raw)
            terminal.type(b"\x1a")
            terminal.until("^Z")
            terminal.until(lambda: terminal.raw)
            terminal.type("still here\n")
            # Typed while the terminal changed its mode, it is echoed once more.
            terminal.until(b"still here\r\nstill here\r\n")
            terminal.until(lambda: terminal.raw)
            terminal.type(b"\x04")
            assert terminal.code() == 0

    def test_a_stop_that_cannot_be_caught_leaves_a_terminal_that_works_afterwards(
        self, workspace: Path
    ) -> None:
        with shell(workspace) as terminal:
            terminal.type("$S run -q -- cat\n")
            terminal.until(lambda: terminal.raw)
            terminal.type("one\n")
            terminal.until(b"one\r\none\r\n")
            terminal.type(b"\x1a")
            terminal.until("Stopped")
            terminal.type("clear; kill -CONT %1; sleep 0.2; jobs; kill -STOP %1; fg\n")
            terminal.until("\n$S run -q -- cat\n")
            terminal.until(lambda: terminal.raw)
            terminal.type("two\n")
            terminal.until(b"two\r\n")
            terminal.type(b"\x04")
            terminal.until(lambda: not terminal.raw)
            terminal.type("echo code $?\n")
            terminal.until("code 0")


class TestPrograms:
    def test_one_that_closes_its_terminal_is_not_watched_without_pause(self, workspace: Path) -> None:
        script = "echo ready; exec sleep 1 <&- >&- 2>&-"
        with stockade(workspace, "run", "--", "sh", "-c", script) as terminal:
            terminal.until("ready")
            began, used = time.monotonic(), _used(terminal.process.pid)
            time.sleep(0.5)
            assert _used(terminal.process.pid) - used < (time.monotonic() - began) / 2
            assert terminal.code() == 0

    def test_an_editor(self, workspace: Path) -> None:
        editor = need_program("vi")
        with stockade(workspace, "run", "--commit", "--", editor, "-u", "NONE", "-N", "file") as terminal:
            terminal.until("~\n~")
            terminal.type("isome text\x1b:wq\n")
            assert terminal.code() == 0
        assert (workspace / "file").read_text() == "some text\n"

    def test_a_pager(self, workspace: Path) -> None:
        (workspace / "file").write_text("".join(f"line {n}\n" for n in range(1000)))
        with stockade(workspace, "run", "--", need_program("less"), "file") as terminal:
            terminal.until("line 22\n")
            terminal.type("G")
            terminal.until("line 999\n")
            terminal.type("q")
            assert terminal.code() == 0
            assert "line 999" not in terminal.text or terminal.settings() == terminal.fresh

    def test_one_that_draws(self, workspace: Path) -> None:
        (workspace / "drawn.py").write_text(
            "import curses\n"
            "def main(screen):\n"
            "    lines, columns = screen.getmaxyx()\n"
            "    curses.init_pair(1, 201, 0)\n"
            "    screen.addstr(lines - 2, 3, f'{lines}x{columns} {curses.COLORS}', curses.color_pair(1))\n"
            "    key = screen.getkey()\n"
            "    while key == 'KEY_RESIZE':\n"
            "        screen.erase(); screen.addstr('%d,%d' % screen.getmaxyx()); key = screen.getkey()\n"
            "    raise SystemExit(9 if key == 'KEY_UP' else 8)\n"
            "curses.wrapper(main)\n"
        )
        with stockade(workspace, "run", "--", PYTHON, "drawn.py") as terminal:
            terminal.until("24x80 256")
            terminal.resize(20, 60)
            terminal.until("20,60")
            terminal.type(b"\x1bOA")
            assert terminal.code() == 9
            assert terminal.settings() == terminal.fresh

    def test_an_interpreter(self, workspace: Path) -> None:
        with stockade(workspace, "run", "--", PYTHON, "-q") as terminal:
            terminal.until(">>>")
            terminal.type("6 * 7\n")
            terminal.until("\n42\n")
            terminal.type("import time; print(9 * 9); time.sleep(300)\n")
            terminal.until("\n81\n")
            terminal.type(b"\x03")
            terminal.until("KeyboardInterrupt\n>>>")
            terminal.type("raise SystemExit(4)\n")
            assert terminal.code() == 4

    def test_a_multiplexer(self, workspace: Path) -> None:
        # Else keys that come within a millisecond count as pasted, and the pane gets them.
        typed = ("set", "-g", "assume-paste-time", "0")
        tmux = (need_program("tmux"), "-f", "/dev/null", *typed, ";", "new", "sh")
        with stockade(workspace, "run", "--", *tmux, size=(24, 120)) as terminal:
            terminal.until("[0] 0:sh")
            terminal.until(lambda: terminal.text[:1] in ("#", "$"))
            terminal.type("echo $((6 * 7))\n")
            terminal.until("\n42\n")
            terminal.type("\x02%")
            terminal.until("│")
            terminal.type("\x02&")
            terminal.until("(y/n)")
            terminal.type("y")
            assert terminal.code() == 0
            assert terminal.settings() == terminal.fresh


class TestStreamsThatAreNoTerminal:
    def test_a_file_gets_exactly_what_was_printed_while_keys_are_read(self, workspace: Path) -> None:
        script = r"read x; printf 'got %s\n\033[1m\r\n' $x; test -t 1 || echo none; test -t 0 && tty >&2"
        with (
            open(workspace / "out", "wb") as file,
            stockade(workspace, "run", "-q", "--", "bash", "-c", script, stdout=file) as terminal,
        ):
            terminal.until(lambda: terminal.raw)
            terminal.type("this\n")
            assert terminal.code() == 0
            assert terminal.shown == b"this\r\n/dev/pts/0\r\n"
            assert terminal.settings() == terminal.fresh
        assert (workspace / "out").read_bytes() == b"got this\n\x1b[1m\r\nnone\n"

    def test_errors_in_a_file_are_apart_from_the_screen(self, workspace: Path) -> None:
        with (
            open(workspace / "out", "wb") as file,
            stockade(
                workspace, "run", "-q", "--", "sh", "-c", "echo shown; echo kept >&2", stderr=file
            ) as terminal,
        ):
            assert terminal.code() == 0
            assert terminal.shown == b"shown\r\n"
        assert (workspace / "out").read_bytes() == b"kept\n"

    def test_who_does_not_read_leaves_the_keyboard_to_others(self, workspace: Path) -> None:
        """As in `stockade run -- make | less`."""
        with shell(workspace) as terminal:
            terminal.type(
                "$S run -q -- sh -c 'echo $((6*7)); sleep 9' | (read a; echo $a; read b </dev/tty; kill 0)\n"
            )
            terminal.until("\n42\n")
            assert not terminal.raw
            terminal.type("mine\n")
            terminal.until("Terminated")

    def test_a_pipe_that_is_read_from_is_no_terminal(self, workspace: Path) -> None:
        with shell(workspace) as terminal:
            terminal.type("echo x y | $S run -q -- sh -c 'cat; test -t 1 || echo none'\n")
            terminal.until("x y\nnone")
            terminal.until(lambda: terminal.text.rstrip().endswith("host$"))

    def test_who_wants_json_gets_nothing_of_a_terminal(self, workspace: Path) -> None:
        with stockade(workspace, "run", "--json", "--", "sh", "-c", "cat; tty") as terminal:
            assert terminal.code() == 1
            assert b'"stdout":"not a tty\\n"' in terminal.shown
            assert terminal.settings() == terminal.fresh


MODES = r"\033[?1049h\033[?25l\033[?1002;1006h\033[?2004h\033[31m\033="
OFF = b"\x1b>\x1b[0m\x1b[?25h\x1b[?1002l\x1b[?1006l\x1b[?2004l\x1b[?1049l"


class TestPuttingBack:
    @pytest.mark.parametrize(
        ("options", "ends", "code"),
        [
            ("", "kill -KILL $$", 137),
            ("--timeout 1", "sleep 300", 124),
            ("", "sleep 300", signal.SIGTERM),
            ("", "sleep 300", signal.SIGHUP),
            ("", "sleep 300", signal.SIGQUIT),
        ],
    )
    def test_on_every_way_out(self, workspace: Path, options: str, ends: str, code: int) -> None:
        script = f"stty raw -echo; printf '{MODES}ready'; {ends}"
        with stockade(workspace, "run", *options.split(), "--", "bash", "-c", script) as terminal:
            terminal.until("ready")
            if isinstance(code, signal.Signals):
                terminal.kill(code)
            assert terminal.code() == (130 if isinstance(code, signal.Signals) else code)
            assert terminal.settings() == terminal.fresh
            assert terminal.shown.count(OFF) == 1

    def test_a_program_that_tidied_up_is_not_tidied_up_after(self, workspace: Path) -> None:
        script = r"printf '\033[?1049h\033[?25l\033[31mx\033[m\033[?25h\033[?1049ldone\n'"
        with stockade(workspace, "run", "--", "bash", "-c", script) as terminal:
            assert terminal.code() == 0
            assert terminal.shown.endswith(b"\x1b[?1049ldone\r\n")

    @pytest.mark.parametrize("asked", [r"\033[6n\033[c\033[5n", r"\033[0000000000000000000000000000006n"])
    def test_the_answer_to_a_program_that_has_ended_is_not_the_next_commands_input(
        self, workspace: Path, asked: str
    ) -> None:
        script = rf"stty raw -echo; printf 'x{asked}'"
        with stockade(workspace, "run", "--", "bash", "-c", script) as terminal:
            assert terminal.code() == 0
            assert terminal.settings() == terminal.fresh
            assert terminal.typed_ahead == 0


def _is_putting_back(process: int) -> bool:
    """Whether signals are held back, as they are while the terminal is seen to; also once it has ended."""
    status = Path(f"/proc/{process}/status").read_text()
    held = next((line.split()[1] for line in status.splitlines() if line.startswith("SigBlk")), "0")
    return "zombie" in status or bool(int(held, 16) & 1 << (signal.SIGTERM - 1))


class TestTrouble:
    def test_a_terminal_that_is_hung_up_ends_the_sandbox(self, workspace: Path) -> None:
        script = (
            "trap '' HUP; trap 'echo > told; exit' TERM; echo ready; while :; do sleep 0.1; echo more; done"
        )
        with open(workspace / "said", "wb") as said:
            options = ("run", "--discard", "--", "bash", "-c", script)
            with stockade(workspace, *options, stderr=said) as terminal:
                terminal.until("ready")
                terminal.hang_up()
                assert terminal.process.wait(30) == 130
        assert b"cancelled: ended" in (workspace / "said").read_bytes()
        assert b"added     told" in (workspace / "said").read_bytes()

    def test_one_that_takes_nothing_does_not_lengthen_the_time(self, workspace: Path) -> None:
        with (
            open(workspace / "said", "wb") as said,
            stockade(workspace, "run", "--timeout", "1", "--", "yes", stderr=said) as terminal,
        ):
            assert terminal.process.wait(30) == 124
            assert b"output was lost" in (workspace / "said").read_bytes()

    def test_one_that_is_full_at_the_end_is_put_back_all_the_same(self, workspace: Path) -> None:
        script = rf"printf '{MODES}ready'; exec yes"
        options = ("run", "--timeout", "1", "--", "bash", "-c", script)
        with stockade(workspace, *options, stderr=subprocess.DEVNULL) as terminal:
            terminal.until(b"ready")
            while not _is_putting_back(terminal.process.pid):
                time.sleep(0.01)
            assert terminal.code() == 124
            assert ABORT + EVERYTHING in terminal.shown
            assert terminal.settings() == terminal.fresh

    def test_a_flood_is_shown_whole(self, workspace: Path) -> None:
        with stockade(workspace, "run", "--", "seq", "20000") as terminal:
            assert terminal.code() == 0
            assert terminal.shown == b"".join(b"%d\r\n" % n for n in range(1, 20001))

    def test_a_program_that_closes_its_terminal_goes_on(self, workspace: Path) -> None:
        script = "exec 0<&- 1<&- 2<&-; sleep 0.3; echo again > /dev/tty; exit 3"
        with stockade(workspace, "run", "--", "bash", "-c", script) as terminal:
            assert terminal.code() == 3
            assert "again" in terminal.text

    def test_keys_that_nobody_reads_hold_nobody_up(self, workspace: Path) -> None:
        with stockade(workspace, "run", "--", "sh", "-c", "echo ready; exec sleep 300") as terminal:
            terminal.until("ready")
            terminal.until(lambda: terminal.raw)
            for _ in range(40):
                terminal.type(b"x" * 1000)
                terminal.until(lambda: True)
            terminal.kill(signal.SIGTERM)
            assert terminal.code() == 130


def test_a_terminal_that_was_opened_by_another_name_is_the_same(workspace: Path) -> None:
    with Terminal(
        ["sh", "-c", f"{STOCKADE} run -q -- sh -c 'test -t 1 && tty' < /dev/tty"], workspace
    ) as terminal:
        assert (terminal.code(), terminal.text.strip()) == (0, "/dev/pts/0")


def test_one_that_belongs_to_somebody_else_serves_all_the_same(workspace: Path) -> None:
    """As after `su`: it cannot be opened once more."""
    with Terminal([STOCKADE, "run", "-q", "--", "cat"], workspace) as terminal:
        os.fchmod(terminal.inner, 0)
        applies(not os.access(f"/proc/self/fd/{terminal.inner}", os.R_OK), "root opens every terminal")
        terminal.until(lambda: terminal.raw)
        terminal.type("typed\n\x04")
        assert terminal.code() == 0
        assert terminal.text.count("typed") == 2
        assert terminal.settings() == terminal.fresh


def test_a_host_without_the_keyboard_is_served_all_the_same(workspace: Path) -> None:
    """A terminal that controls nobody's jobs, as with `setsid`."""
    with Terminal(["setsid", "-w", STOCKADE, "run", "--", "cat"], workspace) as terminal:
        terminal.until(lambda: terminal.raw)
        terminal.type("typed\n\x04")
        assert terminal.code() == 0
        assert terminal.text.count("typed") == 2


def test_nothing_of_it_is_loaded_where_there_is_none(workspace: Path) -> None:
    script = (
        "import sys; from stockade.cli import main; code = main(['run', '--', 'true'])\n"
        "sys.exit(code or any('terminal' in name for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", script], cwd=workspace, stdin=subprocess.DEVNULL, check=True)


def _used(pid: int) -> float:
    """Seconds of the processor that a process has had."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
