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

import stockade
from stockade.bench.competitors import OURS, Contender
from stockade.bench.sections import ground, measure
from stockade.bench.workspace_costs import KEPT, MEMORY
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


def test_the_bare_overlay_is_mounted_as_ours_is_and_the_host_sees_nothing_of_it(tmp_path: Path) -> None:
    """Else the comparison would be with another file system."""
    tree, layer = tmp_path / "tree", tmp_path / "layer"
    for directory in (tree, layer):
        directory.mkdir()
    (tree / "file").write_text("below\n")
    look = ["/bin/sh", "-c", f"echo above > {tree}/file; cat {tree}/file /proc/self/mountinfo"]
    bare = [sys.executable, "-m", "stockade.bench.bare_overlay", str(tree), str(layer), MEMORY]
    done = subprocess.run([*bare, *look], capture_output=True, text=True, check=True)
    policy = Contender(OURS, workspace=str(tree), disk=str(KEPT)).policy()
    ours = stockade.run(look, policy).check().stdout.decode()
    for text in (done.stdout, ours):
        assert text.startswith("above\n")
    assert _options(ours, str(tree)) == _options(done.stdout, str(tree))
    assert "userxattr" in _options(ours, str(tree))
    assert (tree / "file").read_text() == "below\n" and list(layer.iterdir()) == []
    assert str(tree) not in Path("/proc/self/mountinfo").read_text()


def _options(mounts: str, path: str) -> set[str]:
    """Return the options of the mount at a path and of its file system, without the directories' names."""
    (line,) = (words for words in map(str.split, mounts.splitlines()) if words[4:5] == [path])
    options = {*line[5].split(","), *line[-1].split(",")}
    return {one for one in options if "dir=/" not in one}
