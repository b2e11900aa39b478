"""`stockade bench` itself: what of it does not depend on how quick anything is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from stockade.bench.sections import ground, measure
from support.means import need, need_program


def test_without_a_sandbox_the_attacks_get_through() -> None:
    """Else a wall that is said to hold proves nothing."""
    need(os.access("/usr/bin/python3", os.X_OK), "/usr/bin/python3 is not installed")
    with ground(quick=True) as place:
        rows = measure("walls", place).walls
    needs_root = {"write to /usr", "have capabilities", "mount", "mount by fsopen"}
    live = set(rows) if os.geteuid() == 0 else set(rows) - needs_root
    assert {attack for attack in live if rows[attack]["no sandbox"] != "OPEN"} == set()


@pytest.mark.usefixtures("swept")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_ended_from_outside_it_leaves_nothing(number: signal.Signals) -> None:
    """Not even when it is told twice. Files in shared memory and processes are looked for after each test."""
    need(os.access("/usr/bin/python3", os.X_OK), "/usr/bin/python3 is not installed")
    need_program("git")
    code = "import sys; from stockade.bench import command; sys.exit(command.main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "--quick", "--only", "inside"]
    here = Path(tempfile.gettempdir())
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        end = time.monotonic() + 20
        while not list(here.glob("stockade-bench-*/plain")):
            assert process.poll() is None and time.monotonic() < end
            time.sleep(0.05)
        time.sleep(0.5)  # it works
        # A terminal tells everyone.
        tell = os.kill if number == signal.SIGTERM else os.killpg
        tell(process.pid, number)
        time.sleep(0.1)
        tell(process.pid, number)
        said, _ = process.communicate()
    assert process.returncode == 128 + number, said.decode()
    assert list(here.glob("stockade-bench-*")) == []
