"""Terminals: nothing is typed into the caller's, which is not even there (CVE-2017-5226, CVE-2019-7303)."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from security import arena
from security.arena import inside, outside
from support.means import need

LEGACY = Path("/proc/sys/dev/tty/legacy_tiocsti")


def test_keystrokes_cannot_be_typed_whatever_the_high_half_of_the_request_is() -> None:
    verdict = inside("terminal")
    assert verdict == {"TIOCSTI": ["EPERM"] * 4, "TIOCLINUX": ["EPERM"] * 4, "typed": 0}
    legacy = not LEGACY.exists() or LEGACY.read_text().strip() == "1"
    need(legacy or arena.IS_ROOT, "this kernel lets nobody type into a terminal (dev.tty.legacy_tiocsti = 0)")
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
    import stockade
    from stockade import PolicyError

    master, slave = os.openpty()
    try:
        with pytest.raises(PolicyError, match="terminal"):
            stockade.run(["tty"], stdin=slave)
        assert subprocess.run(["tty"], stdin=slave, capture_output=True, check=False).returncode == 0
    finally:
        os.close(master)
        os.close(slave)
