"""The check that every test ends with: what is left is reported, and what has died is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from uuid import uuid4

import pytest

from stockade.host import host
from stockade.linux import cgroupfs, cgroups
from support import leaks
from support.means import applies, need
from support.supervisors import dead, line

#: The first thread ends, as a zombie that nobody can wait for while the other thread lives.
HEADLESS = """
import ctypes, os, threading, time
threading.Thread(target=time.sleep, args=(100,)).start()
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
"""


def orphan(*command: str) -> int:
    """Start a program whose parent ends at once: pytest adopts it. Its pid."""
    script = '"$@" >/dev/null 2>&1 & echo $!'
    return int(subprocess.check_output(["/bin/sh", "-c", script, "sh", *command]))


def reported(pid: int) -> list[str]:
    return [sentence for sentence in leaks.snapshot() if sentence.startswith(f"process {pid} ")]


def die(pid: int) -> None:
    """Wait until a process is a zombie, or gone."""
    end = time.monotonic() + 10
    while (fields := leaks._stat(pid)) and not leaks._process(pid, fields).zombie:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_orphan_that_lives_is_reported() -> None:
    pid = orphan("sleep", "100")
    try:
        assert leaks.settled(lambda: reported(pid), 0.2)
    finally:
        os.kill(pid, 9)
    assert leaks.settled(lambda: reported(pid)) == []


def test_an_orphan_whose_first_thread_has_ended_is_reported() -> None:
    pid = orphan(sys.executable, "-c", HEADLESS)
    try:
        die(pid)
        assert leaks.settled(lambda: reported(pid), 0.2)
    finally:
        os.kill(pid, 9)
    assert leaks.settled(lambda: reported(pid)) == []


def test_an_orphan_that_has_died_is_waited_for() -> None:
    pid = orphan("sleep", "0.1")
    die(pid)
    assert reported(pid) == []
    assert not Path(f"/proc/{pid}").exists()


def test_an_orphan_may_have_the_number_of_an_earlier_child(monkeypatch: pytest.MonkeyPatch) -> None:
    pid = orphan("sleep", "0.1")
    monkeypatch.setitem(leaks._started, pid, 1)
    die(pid)
    assert reported(pid) == []
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize("how", ["Popen", "posix_spawn", "fork"])
def test_a_child_that_was_never_waited_for_is_reported(how: str) -> None:
    if how == "Popen":
        child = subprocess.Popen(["true"])
        pid = child.pid
    elif how == "posix_spawn":
        pid = os.posix_spawn("/bin/true", ["true"], {})
    else:
        pid = os.fork() or os._exit(0)
    die(pid)
    (sentence,) = reported(pid)
    assert "never waited for" in sentence
    if how == "Popen":
        assert child.wait() == 0
    else:
        assert os.waitpid(pid, 0) == (pid, 0)
    assert reported(pid) == []


def test_files_and_descriptors_are_reported(stockade_home: Path) -> None:
    before = leaks.snapshot(stockade_home)
    shared = f"{leaks.SHARED_MEMORY}/leak-{os.getpid()}"
    (stockade_home / "run").mkdir(parents=True)
    paths = [shared, f"{tempfile.gettempdir()}/leak", f"{stockade_home}/run/leak"]
    try:
        for path in paths:
            Path(path).touch()
        reader, writer = os.pipe()
        new = leaks.snapshot(stockade_home) - before
        os.close(reader)
        os.close(writer)
    finally:
        for path in paths:
            Path(path).unlink()
    assert {f"file {path}" for path in paths} <= new
    assert [sentence for sentence in new if sentence.startswith(f"descriptor {writer} -> pipe:")]
    assert leaks.snapshot(stockade_home) - before == frozenset()


def test_a_file_of_another_program_in_shared_memory_is_not_reported(stockade_home: Path) -> None:
    before = leaks.snapshot(stockade_home)
    theirs = Path(leaks.SHARED_MEMORY, "leak-of-another")
    theirs.touch()
    try:
        assert leaks.snapshot(stockade_home) - before == frozenset()
    finally:
        theirs.unlink()


def test_a_cgroup_of_ours_is_reported_and_that_of_another_program_is_not(stockade_home: Path) -> None:
    applies(os.geteuid() == 0, "for root only")
    need(host().has("cgroup.pids"), "cgroups do not work here")
    place = cgroups.places().found["pids"].directory
    ours, theirs, recorded = (f"{place}/stockade-run-{uuid4().hex[:12]}" for _ in range(3))
    cgroupfs.make(ours)
    os.mkdir(theirs)
    os.mkdir(recorded)
    try:
        directory = dead(str(stockade_home), line(groups=[recorded]))
        found = leaks.snapshot(stockade_home)
        assert {f"cgroup {ours}", f"cgroup {recorded}"} <= found and f"cgroup {theirs}" not in found
        shutil.rmtree(directory)
    finally:
        for path in (ours, theirs, recorded):
            os.rmdir(path)
