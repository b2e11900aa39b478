"""Root inside keeps seven capabilities over mapped ids: with them it gets neither out nor more."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from attacks import arena
from attacks.arena import outside
from stockade import Policy, Sandbox
from stockade.runs.evidence import RESERVED_TASKS
from support.mapped import BASE, mapped, own_rows, programs_as
from support.means import applies, need

SYSTEM = "/usr/bin/env"
#: What root of a user namespace has no right to either; the control is one.
BEYOND_NAMESPACES = {"real-time priority": "EPERM"}


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Sandbox]:
    """A sandbox with ids of its own, and with a directory of the host."""
    shared = tmp_path / "shared"
    shared.mkdir()
    with mapped():
        found = Sandbox(Policy(write=[str(shared)], read=[str(arena.compiled("privileges.c"))]))
        found.open()
    try:
        yield found
    finally:
        found.close()


def attack(box: Sandbox, *arguments: object) -> dict[str, str]:
    command, _ = arena.command_of(*map(str, arguments))
    done = box.run(command, timeout=60)
    assert done.ok, (done.reason, done.stderr)
    verdict: dict[str, str] = arena.verdict_of(done.stdout)
    return verdict


def test_it_neither_mounts_nor_changes_the_system_nor_reaches_the_gate(box: Sandbox, tmp_path: Path) -> None:
    before = os.stat(SYSTEM)
    verdict = attack(box, "rootly", "/usr", SYSTEM, 1)
    succeeded = sorted(name for name, answer in verdict.items() if answer == "ok")
    assert succeeded == [], verdict
    after = os.stat(SYSTEM)
    assert (before.st_mode, before.st_mtime, before.st_uid) == (after.st_mode, after.st_mtime, after.st_uid)
    assert box.run(["true"]).ok
    # The calls themselves work: for root of namespaces that are thrown away.
    tree, file = tmp_path / "tree", tmp_path / "file"
    tree.mkdir()
    file.write_text("content")
    control = outside("rootly", tree, file, 0, "control", namespaces="user mnt pid net uts")
    assert {name: answer for name, answer in control.items() if answer != "ok"} == BEYOND_NAMESPACES


def test_it_makes_no_device(box: Sandbox, tmp_path: Path) -> None:
    script = (
        "mknod /tmp/null c 1 3; mknod /tmp/disk b 7 0; mknod /tmp/whiteout c 0 0; mkfifo /tmp/fifo; ls /tmp"
    )
    done = box.run(["sh", "-c", script])
    assert set(done.text.split()) & {"null", "disk", "whiteout", "fifo"} == {"fifo"}
    applies(arena.IS_ROOT, "refused inside; outside only root can make a device")
    made = tmp_path / "null"
    need(subprocess.run(["mknod", made, "c", "1", "3"], check=False).returncode == 0, "no devices here")


def test_files_of_ids_that_are_not_mapped_stay_closed(box: Sandbox, tmp_path: Path) -> None:
    applies(arena.IS_ROOT, "only root can make a file that belongs to somebody else")
    closed = tmp_path / "shared" / "closed"
    closed.write_text("secret")
    os.chown(closed, 4242, 4242)
    closed.chmod(0o600)
    script = f"cat {closed}; chmod 777 {closed}; chown 0 {closed}; chown 5 {closed}; : > {closed}; true"
    done = box.run(["sh", "-c", script])
    assert done.stdout == b"" and closed.read_text() == "secret"
    info = closed.stat()
    assert (info.st_uid, info.st_mode & 0o777) == (4242, 0o600)


def test_files_that_it_makes_on_the_host_belong_to_mapped_ids(box: Sandbox, tmp_path: Path) -> None:
    applies(arena.IS_ROOT, "the range of an ordinary user is in tests/kernel/gate/test_gate_ids.py")
    shared = tmp_path / "shared"
    script = f"cd {shared}; touch own given; chown 33:34 given; chown 65534 own; chown 70000 own"
    assert b"Invalid argument" in box.run(["sh", "-c", script]).stderr
    assert (shared / "given").stat().st_uid == BASE + 33
    assert (shared / "own").stat().st_uid == BASE + 65534
    # Otherwise who removes the directory of the test would have to know these ids.
    shutil.rmtree(shared)
    shared.mkdir()


def test_a_set_uid_file_gives_another_user_nothing(box: Sandbox, tmp_path: Path) -> None:
    program = arena.compiled("privileges.c")
    for place in ("/tmp/gain", f"{tmp_path}/shared/gain"):
        box.run(["sh", "-c", f"cp {program} {place} && chown 0:0 {place} && chmod 6755 {place}"]).check()
        with programs_as(1000):
            # The directory of the test is closed to others, as its owner wants it.
            done = box.run([place])
        if place.startswith("/tmp/gain"):
            verdict = arena.verdict_of(done.check().stdout)
            assert (verdict["uid"], verdict["euid"], verdict["egid"]) == (1000, 1000, 1000)
            assert (verdict["permitted"], verdict["effective"]) == (0, 0)
    assert arena.verdict_of(box.run(["/tmp/gain"]).check().stdout)["effective"] == 0xFB
    applies(arena.IS_ROOT, "refused inside; outside only root can make one that belongs to root")
    need(os.stat(tmp_path / "shared" / "gain").st_mode & 0o6000 == 0o6000, "the bits were dropped")


def test_it_cannot_end_the_gate(box: Sandbox) -> None:
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGCHLD, signal.SIGUSR1, 34):
        box.run(["/usr/bin/python3", "-c", f"import os; os.kill(1, {int(number)})"]).check()
    assert box.run(["echo", "still here"]).check().text == "still here\n"
    control = ["/usr/bin/python3", "-c", "import os; os.kill(os.getpid(), 9)"]
    assert subprocess.run(control, check=False).returncode == -signal.SIGKILL


def test_another_user_can_signal_neither_root_nor_the_gate(box: Sandbox) -> None:
    script = """
import os, sys
found = []
for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
    if pid != os.getpid():
        try:
            os.kill(pid, 9)
            found.append(pid)
        except PermissionError:
            pass
print(found)
"""
    with box.start(["sleep", "100"]) as roots:
        with programs_as(1000):
            assert box.run(["/usr/bin/python3", "-c", script]).check().text == "[]\n"
        assert roots.poll() is None
        roots.kill()


def test_another_user_can_use_none_of_what_init_and_the_keepers_have(box: Sandbox) -> None:
    """Its process is one of theirs until it executes. What they hold is closed by then."""
    script = """
import os
print(sorted(os.listdir("/proc/self/fd")))
for name in ("mem", "environ", "fd", "root", "cwd"):
    try:
        os.listdir(f"/proc/1/{name}") if name in ("fd", "root", "cwd") else open(f"/proc/1/{name}").read()
        print("open", name)
    except OSError:
        pass
"""
    with programs_as(1000):
        assert box.run(["/usr/bin/python3", "-c", script]).check().text == "['0', '1', '2', '3']\n"


BOMB = """
import os, signal
children = []
try:
    while len(children) < 3000:
        child = os.fork()
        if child == 0:
            os.setresuid(*[1000 + len(children) // 10] * 3)
            signal.pause()
        children.append(child)
except BlockingIOError:
    pass
print(len(children))
for child in children:
    os.kill(child, signal.SIGKILL)
"""


def test_ids_do_not_multiply_the_limit_of_tasks() -> None:
    """Without a cgroup the kernel counts each id for itself: the namespace as a whole has a limit as well."""
    with mapped(), Sandbox(Policy(limits={"tasks": 20})) as box:
        done = box.run(["/usr/bin/python3", "-c", BOMB], timeout=60)
        assert int(done.check().text) <= 20 + RESERVED_TASKS
        assert box.run(["true"]).ok


def test_where_only_the_caller_is_mapped_the_same_walls_stand(tmp_path: Path) -> None:
    with mapped(own_rows()):
        box = Sandbox(Policy())
        box.open()
    try:
        verdict = attack(box, "rootly", "/usr", SYSTEM, 1)
        assert sorted(name for name, answer in verdict.items() if answer == "ok") == []
    finally:
        box.close()
