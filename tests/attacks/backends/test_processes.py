"""Processes: those outside cannot be read, seized or signalled, those inside are taken care of."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside
from stockade import Policy, Sandbox
from support.means import need

VICTIM = """
import ctypes, time
ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)  # PR_SET_PTRACER: anybody
secret = ctypes.create_string_buffer(b"a secret")
print(ctypes.addressof(secret), flush=True)
time.sleep(60)
"""
NOT_THERE = {"EPERM", "ESRCH", "ENOENT", "EACCES", "EBADF"}


@contextlib.contextmanager
def victim() -> Iterator[tuple[int, int]]:
    """A process of ours outside, and the address of something in it."""
    # In a group of its own: what is done to that must not be done to the tests.
    command = [arena.PYTHON, "-c", VICTIM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.kill()


def alive(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def test_a_process_outside_can_be_neither_read_nor_seized() -> None:
    with victim() as (pid, address):
        verdict = inside("processes", pid, address)
        assert set(verdict.values()) <= NOT_THERE, verdict
        control = outside("processes", pid, address)
    need(control["seize"] == "ok" or control["attach"] == "ok", f"this host lets nobody trace: {control}")
    control.pop("attach", None)
    assert set(control.values()) == {"ok"}, control


def test_the_supervisor_can_be_neither_read_nor_seized() -> None:
    secret = ctypes.create_string_buffer(b"a secret")
    verdict = inside("processes", os.getpid(), ctypes.addressof(secret))
    assert set(verdict.values()) <= NOT_THERE, verdict


def test_the_first_process_can_be_neither_read_nor_seized() -> None:
    """It is the gate, with the supervisor's socket: visible, but a pidfd of it is good for nothing."""
    verdict = inside("processes", 1, 0)
    assert verdict.pop("pidfd_open") == "ok"
    assert set(verdict.values()) <= {"EPERM", "EACCES"}, verdict


def test_killing_everything_kills_only_what_is_inside() -> None:
    """The control runs in a pid namespace that is thrown away with what was killed in it."""
    with victim() as (pid, _):
        assert inside("kill_all") == {"kill": "ok", "bystander": signal.SIGKILL, "pid": 2}
        assert alive(pid)
        assert inside("kill_all", net="open")["bystander"] == signal.SIGKILL
        assert alive(pid)
    assert outside("kill_all", namespaces="user pid")["bystander"] == signal.SIGKILL


def test_a_living_sandbox_survives_a_program_that_kills_everything() -> None:
    command, _ = arena.command_of("kill_all")
    with Sandbox(Policy()) as box:
        assert arena.verdict_of(box.run(command, timeout=10).stdout)["bystander"] == signal.SIGKILL
        for _ in range(3):
            # Its keeper is among those that it kills, and then its run does not go on.
            with box.start(command, timeout=10) as process:
                result = process.wait()
            assert (result.outcome, result.exit_code) == ("signalled", 137)
        assert box.run(["echo", "alive"], timeout=10).text == "alive\n"


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV, signal.SIGHUP]
)
def test_no_signal_from_inside_ends_or_stops_the_first_process(number: int) -> None:
    command, _ = arena.command_of("signals", 1, number)
    with Sandbox(Policy()) as box:
        assert box.run(command, timeout=10).exit_code == 0
        assert box.run(["echo", "alive"], timeout=10).text == "alive\n"
    with victim() as (pid, _):
        assert outside("signals", pid, 0) == {"0": "ok"}


def test_a_process_outside_cannot_be_signalled() -> None:
    with victim() as (pid, _):
        for policy in ({}, {"net": "open"}):
            assert inside("signals", pid, 0, signal.SIGKILL, **policy) == {"0": "ESRCH", "9": "ESRCH"}
        assert alive(pid)
        assert outside("signals", pid, 0) == {"0": "ok"}


def test_one_command_cannot_set_the_limits_of_those_that_follow() -> None:
    """They inherit from the first process, and to set another's limits the same uid is enough."""
    command, _ = arena.command_of("limit_others", 1, "zero")
    with Sandbox(Policy()) as box:
        verdict = arena.verdict_of(box.run(command, timeout=10).stdout)
        after = box.run(["echo", "alive"], timeout=10)
    assert set(verdict.values()) == {"refused"}, verdict
    assert after.text == "alive\n"
    with victim() as (pid, _):
        assert set(outside("limit_others", pid, "same").values()) == {"ok"}


UNCARING = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER, and then nobody is waited for
child = subprocess.Popen([*sys.argv[1:], str(os.getpid())])
child.wait()
"""


@pytest.mark.timeout(110)
def test_thousands_of_orphans_are_all_buried() -> None:
    assert inside("orphans", 3_000, 5) == {"made": 3_000, "unburied": 0}
    command, _ = arena.command_of("orphans", 100, 0)
    done = subprocess.run([sys.executable, "-c", UNCARING, *command], capture_output=True, check=True)
    assert arena.verdict_of(done.stdout) == {"made": 100, "unburied": 100}


def test_a_run_ends_although_orphans_of_it_live() -> None:
    """The control is the same shell outside, whose orphan lives on."""
    orphan = "setsid sleep 30 >/dev/null 2>&1 & echo started"
    result = stockade.run(["sh", "-c", orphan], timeout=10)
    assert (result.outcome, result.text) == ("exited", "started\n")
    assert result.usage.wall < 5
    done = subprocess.run(["sh", "-c", orphan + " $!"], capture_output=True, text=True, check=True)
    pid = int(done.stdout.split()[1])
    os.kill(pid, 0)
    os.kill(pid, signal.SIGKILL)
