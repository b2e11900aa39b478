"""The screen of a real loop: through Textual's pilot, and once on a terminal of tmux."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from textual.pilot import Pilot

import stockade
from stockade.loop.items.item import WorkItem
from stockade.loop.loop import Loop
from stockade.loop.tui.app import LoopApp
from stockade.loop.tui.dialogs import Reader
from support.cli import STOCKADE
from support.loops import VERIFY, make_loop, make_project, right
from support.means import need_program
from support.scripted_loop import screen_text

#: Does the work, and leaves something that a tool obeys, with escapes in it.
AGENT = (
    f"printf 'hello \\033]52;c;eA==\\007\\n'; {right('a')}; printf 'home = /\\033[31mevil\\n' > pyvenv.cfg"
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return make_project(tmp_path / "project")


async def until(pilot: Pilot[None], app: LoopApp, true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert app._exception is None, app._exception
        assert time.monotonic() < end, screen_text(app)
        await pilot.pause(0.05)


async def test_a_real_loop_is_shown_and_what_it_held_back_is_committed_after_reading(project: Path) -> None:
    loop = make_loop(project, AGENT, (WorkItem(id="a", title="Set a"),)).loop
    app = LoopApp(loop)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, app, lambda: "held" in screen_text(app) and not app.running)
        shown = screen_text(app)
        assert "native" in shown and "hello \\x1b]52;c;eA==\\x07" in shown, shown
        assert shown.replace("\n", "").isprintable()
        await pilot.press("2")
        await until(pilot, app, lambda: "passed:" in screen_text(app) and "ok - a" in screen_text(app))
        assert "a=1" in (project / "values.sh").read_text() and not (project / "pyvenv.cfg").exists()
        await pilot.press("c")
        await until(pilot, app, lambda: isinstance(app.screen, Reader) and "pyvenv.cfg" in screen_text(app))
        assert "held back" in screen_text(app) and "+home = /\\x1b[31mevil" in screen_text(app)
        await pilot.press("c")
        await until(pilot, app, (project / "pyvenv.cfg").exists)
        await until(pilot, app, lambda: "✓ landed" in screen_text(app))
        assert loop.record.find("a").phase == "landed" and stockade.Workspace.list() == []


async def test_files_that_were_not_read_to_the_end_or_changed_since_are_not_committed(project: Path) -> None:
    agent = f"{AGENT}; seq 200 >> pyvenv.cfg"
    loop = make_loop(project, agent, (WorkItem(id="a", title="Set a"),)).loop
    app = LoopApp(loop)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, app, lambda: "held" in screen_text(app) and not app.running)
        await pilot.press("c")
        await until(pilot, app, lambda: isinstance(app.screen, Reader))
        await pilot.press("c")
        await until(pilot, app, lambda: "read to the end first" in screen_text(app))
        # Somebody changes the file between the reading and the answer.
        (held,) = stockade.Workspace.list()
        with stockade.Sandbox(stockade.Policy(workspace=str(project)), resume=held) as box:
            box.files.write("pyvenv.cfg", b"home = /worse\n")
        await pilot.press("end", "c")
        await until(
            pilot, app, lambda: not isinstance(app.screen, Reader) and "changed since" in screen_text(app)
        )
    assert not (project / "pyvenv.cfg").exists()


async def test_changes_can_be_read_while_an_attempt_runs_and_kill_ends_its_whole_tree(
    project: Path,
) -> None:
    work = f"[ -e {project}/now ] || {{ sleep 4321 & sleep 4321; }}; {right('a')}"
    agent = f"echo draft > notes.txt; echo working; {work}"
    loop = make_loop(project, agent).loop
    app = LoopApp(loop)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, app, lambda: "working" in screen_text(app))
        await pilot.press("d")
        await until(pilot, app, lambda: "+draft" in screen_text(app))
        await pilot.press("escape", "k")
        await until(pilot, app, lambda: not app.running and "paused" in screen_text(app))
        assert "a=0" in (project / "values.sh").read_text()
        assert subprocess.run(["pgrep", "-f", "sleep 4321"], capture_output=True, check=False).stdout == b""
        (project / "now").touch()
        await pilot.press("g")
        await until(pilot, app, lambda: "done ·" in screen_text(app))
        await pilot.press("q")
    assert "a=1" in (project / "values.sh").read_text()


class Tmux:
    """One terminal of a tmux server of its own."""

    def __init__(self, socket: Path, command: str, cwd: Path) -> None:
        self._tmux = ["tmux", "-S", str(socket), "-f", "/dev/null"]
        environ = {**os.environ, "TERM": "xterm-256color"}
        start = [*self._tmux, "new-session", "-d", "-x", "80", "-y", "24", "-c", str(cwd), command]
        subprocess.run(start, env=environ, check=True, timeout=30)

    def screen(self) -> str:
        done = subprocess.run(
            [*self._tmux, "capture-pane", "-p"], capture_output=True, text=True, check=False
        )
        return done.stdout

    def press(self, *keys: str) -> None:
        subprocess.run([*self._tmux, "send-keys", *keys], check=True, timeout=30)

    def until(self, true: Callable[[str], bool]) -> str:
        end = time.monotonic() + 60
        while not true(shown := self.screen()):
            assert time.monotonic() < end, shown
            time.sleep(0.1)
        return shown

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], capture_output=True, check=False, timeout=30)


def test_the_command_shows_a_loop_on_a_terminal_of_tmux(project: Path, tmp_path: Path) -> None:
    need_program("tmux")
    (tmp_path / "todo.md").write_text("- [ ] Set a\n")
    agent = f"printf 'working \\033]0;evil\\007\\n'; {right('a')}"
    words = [
        STOCKADE, "loop", "--tui", "--items", str(tmp_path / "todo.md"), "--verify", VERIFY,
        "--judge", "tests",
        "--report", "stdout", "--", "sh", "-c", agent,
    ]  # fmt: skip
    command = f"{shlex.join(words)} > /dev/tty; echo ended with $?; exec sleep 600"
    terminal = Tmux(tmp_path / "tmux", command, project)
    try:
        shown = terminal.until(lambda text: "done ·" in text and "✓ landed" in text)
        assert "working \\x1b]0;evil\\x07" in shown and "native" in shown
        assert max(len(line) for line in shown.split("\n")) <= 80
        terminal.press("q")
        shown = terminal.until(lambda text: "ended with" in text)
        assert "ended with 0" in shown and "set-a" in shown
    finally:
        terminal.close()
    assert "a=1" in (project / "values.sh").read_text()


def test_an_agent_that_is_not_there_is_one_line_on_the_screen_and_an_error_of_the_command(
    project: Path, tmp_path: Path
) -> None:
    need_program("tmux")
    (tmp_path / "todo.md").write_text("- [ ] Set a\n")
    words = [
        STOCKADE,
        "loop",
        "--tui",
        "--items",
        str(tmp_path / "todo.md"),
        "--verify",
        VERIFY,
        "--",
        "no-such",
    ]
    terminal = Tmux(tmp_path / "tmux", f"{shlex.join(words)}; echo ended with $?; exec sleep 600", project)
    try:
        shown = terminal.until(lambda text: "there is no program no-such" in text)
        assert "Set a" in shown and "Traceback" not in shown
        terminal.press("q")
        shown = terminal.until(lambda text: "ended with" in text)
        assert "ended with 125" in shown and "stockade: error: there is no program no-such" in shown
    finally:
        terminal.close()


def test_without_a_terminal_or_without_textual_the_command_says_what_to_do(project: Path) -> None:
    words = ["loop", "--tui", "--items", "x.md", "--verify", VERIFY, "--", "true"]
    (project / "x.md").write_text("- [ ] Set a\n")
    done = subprocess.run(
        [STOCKADE, *words], cwd=project, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False
    )
    assert done.returncode == 125 and "--tui needs a terminal" in done.stderr
    hidden = "import sys; sys.modules['textual'] = None; from stockade.loop.tui import run_tui; run_tui(None)"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True, check=False)
    assert "pip install 'stockade[loop]'" in done.stderr


def test_a_loop_is_what_the_screen_needs() -> None:
    from stockade.loop.tui.control import LoopControl

    names = {name for name in vars(LoopControl) if not name.startswith("_")}
    assert names and all(hasattr(Loop, name) for name in names)
