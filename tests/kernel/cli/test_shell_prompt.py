"""The prompt of `stockade shell`, as a user sees it in the shells that people have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.runs.register import register
from support.kept import until
from support.means import need_program
from support.screens import stockade

LEAVE = b"\x1d\x1d\x1d"
WIDE = (24, 200)


@pytest.fixture(autouse=True)
def ended(stockade_home: Path) -> Iterator[None]:
    """What a test kept does not outlive it."""
    yield
    for record in register.living(str(stockade_home)):
        register.stop(str(stockade_home), record, now=True)
    until(lambda: not register.living(str(stockade_home)))


@pytest.mark.parametrize("name", ["bash", "sh", "dash", "zsh", "fish"])
def test_it_shows_that_the_user_is_inside_and_where(workspace: Path, name: str) -> None:
    need_program(name)
    (workspace / "sub").mkdir()
    shell = {"SHELL": f"/usr/bin/{name}" if os.path.exists(f"/usr/bin/{name}") else f"/bin/{name}"}
    with stockade(workspace, "shell", environment=shell, size=WIDE) as terminal:
        terminal.until(lambda: "[stockade] " in terminal.text or "(q)  Quit" in terminal.text)
        if "(q)  Quit" in terminal.text:  # what zsh asks an ordinary user without a .zshrc
            terminal.type("q")
        terminal.until("[stockade] ")
        terminal.type("cd sub\r")
        sign = ">" if name == "fish" else "%" if name == "zsh" and os.geteuid() else "#"
        sign = "$" if os.geteuid() and name in ("bash", "sh", "dash") else sign
        terminal.until(f"/sub{sign}")
        terminal.type("exit\r")
        assert terminal.code() == 0


def test_a_prompt_that_the_user_sets_stays(workspace: Path) -> None:
    with stockade(
        workspace, "shell", "--env", "PS1=mine: ", environment={"SHELL": "/bin/bash"}, size=WIDE
    ) as terminal:
        terminal.until("mine:")
        terminal.type("exit\r")
        assert terminal.code() == 0 and "[stockade]" not in terminal.text


def test_a_prompt_that_the_user_passes_stays(workspace: Path) -> None:
    environment = {"SHELL": "/bin/bash", "PS1": "own: "}
    with stockade(workspace, "shell", "--pass-env", "PS1", environment=environment, size=WIDE) as terminal:
        terminal.until("own:")
        terminal.type("exit\r")
        assert terminal.code() == 0


def test_a_kept_shell_says_how_to_leave_and_to_return(workspace: Path) -> None:
    with stockade(workspace, "shell", "--keep", environment={"SHELL": "/bin/bash"}, size=WIDE) as terminal:
        terminal.until("[stockade] ")
        first = terminal.text.splitlines()[0]
        assert "Ctrl-] three times within a second leaves it" in first and "`exit` ends it" in first
        id = first.partition("`stockade attach ")[2].partition("`")[0]
        terminal.type(LEAVE)
        assert terminal.code() == 0
    with stockade(workspace, "attach", id, size=WIDE) as terminal:
        terminal.until("[stockade] ")
        assert "Ctrl-]" not in terminal.text
        terminal.type("exit\r")
        assert terminal.code() == 0
