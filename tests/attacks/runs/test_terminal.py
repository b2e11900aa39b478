"""Terminals: nothing is typed into the caller's, which is not even there (CVE-2017-5226, CVE-2019-7303)."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from attacks import arena
from attacks.arena import inside, outside
from stockade import Policy, Sandbox, backends
from stockade.bench.backend_costs import usable
from support.means import need
from support.screens import Terminal, shell
from support.screens import stockade as at_a_terminal

LEGACY = Path("/proc/sys/dev/tty/legacy_tiocsti")


def need_typing() -> None:
    """The controls need a kernel that lets somebody type."""
    legacy = not LEGACY.exists() or LEGACY.read_text().strip() == "1"
    need(legacy or arena.IS_ROOT, "this kernel lets nobody type into a terminal (dev.tty.legacy_tiocsti = 0)")


def test_keystrokes_cannot_be_typed_whatever_the_high_half_of_the_request_is() -> None:
    verdict = inside("terminal")
    assert verdict == {"TIOCSTI": ["EPERM"] * 4, "TIOCLINUX": ["EPERM"] * 4, "typed": 0}
    need_typing()
    control = outside("terminal")
    assert (control["TIOCSTI"], control["typed"]) == (["ok"] * 4, 4)
    assert "EPERM" not in control["TIOCLINUX"] or not arena.IS_ROOT


SUPERVISOR = """
import json, sys
import stockade
print(json.loads(stockade.run(sys.argv[1:], timeout=20).text), flush=True)
"""


@pytest.mark.parametrize("sandboxed", [True, False])
def test_the_callers_terminal_is_not_the_sandboxs(sandboxed: bool) -> None:
    command, _ = arena.command_of("controlling")
    if sandboxed:
        command = [sys.executable, "-c", SUPERVISOR, *command]
    pid, master = pty.fork()
    if pid == 0:
        try:
            os.execv(command[0], command)
        finally:
            os._exit(127)
    output = b""
    try:
        while part := os.read(master, 4096):
            output += part
    except OSError:
        pass  # the terminal's other end is closed
    os.close(master)
    assert os.waitpid(pid, 0)[1] == 0, output
    assert ("ENXIO" if sandboxed else "ok") in output.decode()


def test_a_terminal_as_stdin_is_never_handed_in() -> None:
    from stockade import PolicyError
    from stockade.sandbox.sandbox import RunExtras, run_once

    master, slave = os.openpty()
    try:
        with pytest.raises(PolicyError, match="terminal"):
            run_once(["tty"], None, {}, RunExtras(stdin=slave))
        assert subprocess.run(["tty"], stdin=slave, capture_output=True, check=False).returncode == 0
    finally:
        os.close(master)
        os.close(slave)


def test_one_run_cannot_take_over_the_terminal_of_another() -> None:
    """It can be opened, by the same user; it cannot be taken, typed into or given another driver."""
    command, _ = arena.command_of("steal", "/dev/pts/0")
    with (
        Sandbox(Policy()) as box,
        box.start(["sh", "-c", "tty; read line; echo got $line"], pty=True) as process,
    ):
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == b"/dev/pts/0\r\n"
        result = box.run(command, timeout=20)
        process.stdin.write(b"mine\n")
        assert b"got mine" in process.stdout.read()
        assert process.wait(10).ok
    verdict = arena.verdict_of(result.stdout)
    assert set(verdict.pop("TIOCSETD").values()) == {"EPERM"}
    assert set(verdict.values()) == {"EPERM"}, verdict


def test_a_program_on_a_terminal_can_do_no_more_to_its_own() -> None:
    command, _ = arena.command_of("steal", "/dev/tty")
    with Sandbox(Policy()) as box, box.start(command, pty=True) as process:
        assert process.stdout is not None
        verdict = arena.verdict_of(process.stdout.read())
        assert process.wait(10).ok
    assert set(verdict.pop("TIOCSETD").values()) == {"EPERM"}
    assert set(verdict.values()) == {"EPERM"}, verdict


def test_outside_a_new_terminal_is_anybodys() -> None:
    control = outside("steal", start_new_session=True)
    assert control["TIOCSETD"]["27"] != "EPERM"
    assert control["TIOCSCTTY"] == "ok"


class TestAtTheUsersTerminal:
    """`stockade run` connects the user's terminal with one inside: only bytes pass."""

    def test_nothing_is_typed_through_any_terminal_inside(self, workspace: Path) -> None:
        command, _ = arena.command_of("types")
        with at_a_terminal(workspace, "run", "-q", "--", *command, size=(24, 500)) as terminal:
            assert terminal.code() == 0
            assert terminal.typed_ahead == 0
            verdict = arena.verdict_of(terminal.shown)
            assert os.fstat(terminal.inner).st_dev not in verdict.pop("devices")
        assert verdict.pop("descriptors") == [0, 1, 2]
        assert verdict.pop("new, controlling") == 0
        assert set(map(tuple, verdict.values())) == {("EPERM",)}, verdict

    def test_outside_it_becomes_the_users_next_command(self, workspace: Path) -> None:
        need_typing()
        command, _ = arena.command_of("types")
        with Terminal(command, workspace, size=(24, 500)) as terminal:
            assert terminal.code() == 0
            assert terminal.typed_ahead > 0
            assert os.fstat(terminal.inner).st_dev in arena.verdict_of(terminal.shown)["devices"]

    def test_answers_to_floods_of_questions_do_not_bar_the_way_out(self, workspace: Path) -> None:
        script = r"trap '' INT TERM; stty raw -echo; while :; do printf '\033[6n\033[c\033[5n'; done"
        with at_a_terminal(workspace, "run", "-q", "--", "bash", "-c", script) as terminal:
            terminal.until(lambda: len(terminal.shown) > 100_000)
            for _ in range(3):
                seen = len(terminal.shown)
                terminal.type(b"\x1d")
                terminal.until(lambda before=seen: len(terminal.shown) > before)  # type: ignore[misc]
            assert terminal.code() == 130
            assert terminal.settings() == terminal.fresh
            assert terminal.typed_ahead == 0

    def test_who_stops_itself_for_ever_does_not_lengthen_its_time(self, workspace: Path) -> None:
        options = ("run", "-q", "--timeout", "1", "--")
        script = "(while :; do kill -CONT $$; done) & while :; do kill -STOP $$; done"
        with at_a_terminal(workspace, *options, "bash", "-c", script) as terminal:
            assert terminal.code() == 124
            assert terminal.settings() == terminal.fresh

    def test_time_goes_on_while_everything_is_stopped(self, workspace: Path) -> None:
        with shell(workspace) as terminal:
            terminal.type("$S run -q --timeout 1 -- sh -c 'echo $$ > file; kill -STOP $$'\n")
            terminal.until("Stopped")
            terminal.type("sleep 1; fg; echo code $?\n")
            terminal.until("code 124")

    def test_the_foreground_that_is_handed_away_takes_nothing_from_the_user(self, workspace: Path) -> None:
        """A program gives the gate's own process group the keyboard, and with it Ctrl-C."""
        script = (
            "import os, signal, time\n"
            "signal.signal(signal.SIGTTOU, signal.SIG_IGN)\n"
            "os.tcsetpgrp(0, os.getpgid(os.getppid()))\n"
            "print('ready', flush=True); time.sleep(300)\n"
        )
        with at_a_terminal(workspace, "run", "-q", "--", "/usr/bin/python3", "-c", script) as terminal:
            terminal.until("ready")
            terminal.type(b"\x03\x1a\x1c\x1d\x1d\x1d")
            assert terminal.code() == 130

    @pytest.mark.usefixtures("swept")
    def test_when_we_are_killed_everything_inside_ends(self, workspace: Path) -> None:
        script = "trap '' HUP TERM; echo ready; while :; do sleep 0.1; done"
        with at_a_terminal(workspace, "run", "--", "bash", "-c", script) as terminal:
            terminal.until("ready")
            terminal.kill(signal.SIGKILL)
            assert terminal.code() == -signal.SIGKILL

    @pytest.mark.parametrize("backend", list(backends.BACKENDS))
    def test_nothing_of_the_users_session_is_within_reach(self, workspace: Path, backend: str) -> None:
        found = usable().get(backend)
        need(found is not None, f"the {backend} backend does not work here")
        assert found is not None
        policy = workspace / "policy.toml"
        accept = json.dumps(list(found.accept))
        policy.write_text(f'backend = "{backend}"\naccept = {accept}\nprotect = []\nworkspace.mode = "ro"\n')
        walls = f"$S run -q --policy {policy} --"
        reached = self._from(workspace, walls)
        assert reached.pop("open the terminal") != reached.pop("host's")
        assert set(reached.values()) <= {"EPERM", "EACCES", "ESRCH", "ENOTTY", "EIO"}, reached

    def test_outside_it_is(self, workspace: Path) -> None:
        reached = self._from(workspace, "")
        assert reached.pop("open the terminal") == reached.pop("host's")
        assert set(reached.values()) == {"ok"}, reached

    @staticmethod
    def _from(workspace: Path, walls: str) -> dict[str, object]:
        """What the attack says of the session of a shell that started it."""
        command, _ = arena.command_of("outer")
        with shell(workspace, size=(24, 1000)) as terminal:
            words = " ".join(shlex.quote(word) for word in command)
            more = "requests" if walls else ""
            (workspace / "go").write_text(
                f'{walls} {words} "$(tty)" {terminal.process.pid} $$ {more} >said\n'
            )
            terminal.type(". ./go; echo over $((6 * 7))\n")
            terminal.until("over 42")
            found: dict[str, object] = arena.verdict_of((workspace / "said").read_bytes())
            return {**found, "host's": os.fstat(terminal.inner).st_dev}
