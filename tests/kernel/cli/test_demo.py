"""`stockade demo`: what it shows, on which evidence, and that it leaves nothing."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from stockade import Policy, cli, host
from stockade.cli.demo import command as demo
from stockade.cli.demo import findings
from stockade.cli.demo.fixture import DemoFixture, ground
from stockade.inside import demo_agent
from stockade.result import Outcome, Result
from stockade.sandbox.sandbox import run
from stockade.workspace.diff.diff import Diff

STOCKADE = str(Path(sys.executable).with_name("stockade"))
ATTEMPTS = {
    "repair shop/price.py": "workspace.overlay",
    "read ~/.ssh/id_ed25519": "files",
    "phone home": "network.none",
    "fork bomb": "limits.tasks",
    "write outside the project": "files",
    "plant a git hook": "protect",
}
PARTS = ("What it changed", "Numbers", "is removed")


def piped(*options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STOCKADE, "demo", *options],
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=60,
        check=False,
    )


class Terminal:
    """The demo on a terminal of its own."""

    def __init__(self, **environment: str) -> None:
        self.seen = ""
        self._end = time.monotonic() + 60
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execve(STOCKADE, [STOCKADE, "demo"], os.environ | {"TERM": "xterm", **environment})

    def until(self, text: str) -> None:
        while text not in self.seen and self._read():
            assert time.monotonic() < self._end
        assert text in self.seen

    def answer(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def end(self) -> int:
        while self._read():
            assert time.monotonic() < self._end
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _read(self) -> bool:
        try:
            part = os.read(self._terminal, 65536)
        except OSError:  # the other side has ended
            return False
        self.seen += part.decode().replace("\r\n", "\n")
        return bool(part)


def left() -> list[str]:
    return [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("stockade-demo-")]


def test_in_a_pipe_it_is_plain_text_and_discards(stockade_home: Path) -> None:
    done = piped()
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout and "\r" not in done.stdout
    for title, control in ATTEMPTS.items():
        assert re.search(rf"{re.escape(title)} .*\|\|\|\|  {re.escape(control)}\n", done.stdout), title
    for part in PARTS:
        assert part in done.stdout
    assert "ENOENT" in done.stdout and "ENETUNREACH" in done.stdout and "NOT HELD" not in done.stdout
    assert "||||  every wall held\n" in done.stdout
    assert "+    return sum(prices) * (1 - discount / 100)" in done.stdout
    assert "\nDiscarded\n  because there is no terminal to ask on" in done.stdout
    assert "on the host shop/price.py is as it was and .git/hooks is empty" in done.stdout
    assert left() == [] and not stockade_home.exists(), "it used the caller's own state"


def test_what_is_committed_and_what_is_held_back_is_said() -> None:
    done = piped("--commit")
    assert done.returncode == 0
    committed = done.stdout.partition("\nCommitted\n")[2]
    assert "modified  shop/price.py" in committed and "added     CHANGES.md" in committed
    assert "held back .git/hooks/post-checkout: the policy protects .git/hooks" in committed
    assert "on the host shop/price.py is repaired and .git/hooks is empty" in committed
    assert left() == []


def test_on_a_terminal_it_is_coloured_and_asks() -> None:
    terminal = Terminal()
    terminal.until("[c/D] ")
    terminal.answer("c\n")
    assert terminal.end() == 0
    assert "\x1b[32m+    return" in terminal.seen and "Committed" in terminal.seen
    assert set(re.findall(r"\x1b\[[^A-Za-z]*([A-Za-z])", terminal.seen)) == {"m"}, "it moves the cursor"


def test_quietly_only_the_exit_code_speaks() -> None:
    done = piped("-q")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_makes_nobody_wait() -> None:
    assert demo.PAUSE * (len(ATTEMPTS) + 1) < 3


def test_without_colour_an_empty_answer_discards() -> None:
    terminal = Terminal(NO_COLOR="1")
    terminal.until("[c/D] ")
    terminal.answer("\n")
    assert terminal.end() == 0
    assert "\x1b" not in terminal.seen and "\nDiscarded\n" in terminal.seen


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_ended_from_outside_it_leaves_nothing(number: signal.Signals) -> None:
    terminal = Terminal()
    terminal.until("phone home")
    os.kill(terminal.pid, number)
    assert terminal.end() == 128 + number
    assert left() == []


def test_a_reader_that_went_away_leaves_nothing_either() -> None:
    script = f"{STOCKADE} demo | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script], stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == (b"\n141\n", b"")
    assert left() == []


def test_on_a_narrow_screen_the_sides_stand_below_each_other() -> None:
    done = piped("--discard", COLUMNS="40", PYTHONIOENCODING="ascii", LC_ALL="C")
    assert done.returncode == 0, done.stderr
    for title, control in ATTEMPTS.items():
        assert f"{title} | {control}\n" in done.stdout
    told = done.stdout.partition("What it changed")[0] + done.stdout.partition("\nNumbers\n")[2]
    # A path stays whole, so that it can be copied.
    assert [line for line in told.splitlines() if len(line) > 40 and "/" not in line] == []


def test_a_limit_that_the_host_cannot_keep_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fitting = demo.fitting

    def weaker(place: DemoFixture) -> tuple[Policy, dict[str, str]]:
        monkeypatch.setattr(demo, "LIMITS", {"wall": "20s"})
        policy, lacking = fitting(place)
        return policy, {**lacking, "limits.tasks": "there is no pids cgroup"}

    monkeypatch.setattr(demo, "fitting", weaker)
    assert cli.main(["demo", "--discard"]) == 0
    shown = capsys.readouterr().out
    assert "every wall that was tried held" in shown
    assert "not tried on this machine" in shown and "EAGAIN" not in shown
    assert re.search(r"not enforced +limits\.tasks: there is no pids cgroup", shown)


def test_a_host_without_the_walls_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = structs.replace(host.host(), probes={})
    monkeypatch.setattr(host, "host", lambda: bare)
    assert cli.main(["demo"]) == 125
    told = capsys.readouterr()
    assert "no backend on this host enforces the whole policy" in told.err and told.out == ""
    assert left() == []


def test_a_wall_that_is_not_there_is_told_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fitting = demo.fitting

    def opened(place: DemoFixture) -> tuple[Policy, dict[str, str]]:
        policy, lacking = fitting(place)
        return structs.replace(policy, read=(*policy.read, str(place.key.parent))), lacking

    monkeypatch.setattr(demo, "fitting", opened)
    assert cli.main(["demo", "--discard"]) == 1
    told = capsys.readouterr()
    assert "NOT HELD: the key is there" in told.out and "every wall held" in told.out.split("NOT ")[-1]
    assert "stockade: error: not as expected: read ~/.ssh/id_ed25519\n" in told.err


class TestTheVerdict:
    """What the demo calls evidence can also say the opposite: the same agent without a sandbox."""

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DemoFixture]:
        monkeypatch.setattr(demo_agent, "PLANTED", tmp_path / "planted")
        with ground() as made:
            text = made.agent.read_text()
            made.agent.write_text(
                text.replace("/usr/local/bin/stockade-demo-was-here", str(demo_agent.PLANTED))
            )
            yield made

    def outside(self, place: DemoFixture) -> dict[str, findings.DemoFinding]:
        command = [sys.executable, "-S", str(place.agent), str(place.port)]
        done = subprocess.run(command, cwd=place.project, capture_output=True, timeout=60, check=True)
        # A key that is read is as good as told.
        output = done.stdout + place.key.read_bytes()
        return self.judged(place, output)

    def judged(
        self, place: DemoFixture, output: bytes, no_bomb: str = "not here"
    ) -> dict[str, findings.DemoFinding]:
        policy = Policy(workspace=str(place.project), limits={"tasks": 64})
        enforced = demo.fitting(place)[0]

        controls = run(["true"], enforced).controls
        result = Result(outcome=Outcome.EXITED, exit_code=0, stdout=output, controls=controls)
        found = findings.rows(place, result, Diff(files=()), policy, no_bomb=no_bomb)
        return {row.title: row for row in found}

    def test_without_a_sandbox_nothing_holds(self, place: DemoFixture) -> None:
        found = self.outside(place)
        assert {title for title, row in found.items() if row.held} == {"fork bomb"}
        assert findings.afterwards(place, committed=True)[1] is False
        assert demo_agent.PLANTED.exists() and "it worked" in found["write outside the project"].met[0]

    def test_an_agent_that_tried_nothing_proves_nothing(self, place: DemoFixture) -> None:
        found = self.judged(place, b"not even JSON\n[]\n", no_bomb="")
        assert [row.title for row in found.values() if row.held] == []

    def test_a_process_that_is_left_is_found(self, place: DemoFixture) -> None:
        assert place.processes() == []
        command = ["sh", "-c", "echo up; read word", str(place.agent)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as left:
            assert left.stdin and left.stdout and left.stdout.readline() == b"up\n"
            found = place.processes()
            left.stdin.close()
        assert found == [left.pid]
