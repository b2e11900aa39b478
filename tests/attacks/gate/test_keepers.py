"""Whoever attends to a run: nothing that its program does to it lets the program go on beyond its end.

In a living sandbox that is the run's keeper, a process with the same user as the program; in a sandbox for
one run, and for a run that begins while nothing else is inside, it is the first process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import pytest

import stockade
from attacks import arena
from attacks.arena import outside
from attacks.backends.test_proc import GATE, REFUSED
from attacks.backends.test_processes import NOT_THERE, UNCARING, victim
from stockade import Policy, Sandbox
from stockade.host import host
from support import leaks

#: In a new sandbox the first process is 1, the keeper of a program that was started 2, the program 3.
KEEPER = 2


def kept_run(
    box: Sandbox, command: Sequence[str], timeout: float = 30, grace: float = 2.0
) -> stockade.Result:
    """The result of a run with a keeper, which each has that its caller does not wait for."""
    with box.start(command, timeout=timeout, grace=grace, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        output = process.stdout.read()
        return msgspec.structs.replace(process.wait(), stdout=output)


def first_run(attack: str, *arguments: object, timeout: float = 20, **policy: object) -> stockade.Result:
    """The first run of a living sandbox, which must be able to start another afterwards."""
    command, _ = arena.command_of(attack, *arguments)
    with Sandbox(Policy(**policy)) as box:  # type: ignore[arg-type]
        result = kept_run(box, command, timeout=timeout, grace=0.2)
        assert box.run(["echo", "alive"], timeout=10).text == "alive\n"
    return result


def test_a_keeper_is_the_parent_of_its_program() -> None:
    with Sandbox() as box:
        assert kept_run(box, ["sh", "-c", "echo $PPID"]).text == f"{KEEPER}\n"


def test_a_keeper_can_be_neither_read_nor_seized() -> None:
    verdict = arena.verdict_of(first_run("processes", KEEPER, 0).stdout)
    assert verdict.pop("pidfd_open") == "ok"
    assert set(verdict.values()) <= NOT_THERE, verdict
    with victim() as (pid, address):
        assert outside("processes", pid, address)["process_vm_readv"] == "ok"


def test_a_keeper_cannot_be_looked_into() -> None:
    paths = [f"/proc/{KEEPER}/{part}" for part in GATE]
    verdict = arena.verdict_of(first_run("peek", *paths).stdout)
    assert set(verdict.values()) <= REFUSED, verdict
    assert outside("peek", "/proc/self/environ") == {"/proc/self/environ": "ok"}


def test_a_keeper_cannot_be_starved_until_it_forgets_the_time() -> None:
    """In a cgroup of their own no autogroup gives the keeper the half of the processor."""
    limits = {"cpu": 1.0} if host().has("cgroup.cpu") else {}
    began = time.monotonic()
    result = first_run("starve", KEEPER, 40, timeout=1, limits=limits)
    assert result.outcome == "timed-out" and time.monotonic() - began < 5
    verdict = arena.verdict_of(result.stdout)
    assert {verdict[way] for way in ("idle", "nice", "nice group")} == {"EPERM"}, verdict
    with victim() as (pid, _):
        control = outside("starve", pid, 0)
    assert {control[way] for way in ("idle", "nice", "nice group", "pinned")} == {"ok"}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP, signal.SIGSEGV, signal.SIGRTMIN])
def test_a_run_whose_keeper_is_ended_or_stopped_goes_no_further(number: int) -> None:
    code = f"import os, signal, time; os.kill({KEEPER}, {number}); time.sleep(60)"
    with Sandbox() as box:
        result = kept_run(box, [arena.PYTHON, "-c", code])
        assert (result.outcome, result.signal) == ("signalled", signal.SIGKILL)
        assert result.usage.wall < 10
        # Whatever was inside has gone with it; the sandbox goes on.
        listed = box.run(["sh", "-c", "cd /proc; echo 1 $PPID $$; echo [0-9]*"], timeout=10).text.splitlines()
        assert set(listed[0].split()) == set(listed[1].split())
    with victim() as (pid, _):
        assert outside("signals", pid, number) == {str(int(number)): "ok"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGCONT])
def test_a_signal_that_a_keeper_survives_changes_nothing(number: int) -> None:
    """SIGHUP is not among these: it ends the keeper, and with it the run."""
    code = f"import os, signal; [os.kill({KEEPER}, {number}) for _ in range(100)]; print('done')"
    with Sandbox() as box:
        result = kept_run(box, [arena.PYTHON, "-c", code])
        if number == signal.SIGHUP:
            assert result.signal == signal.SIGKILL
        else:
            assert (result.outcome, result.text) == ("exited", "done\n")
        assert box.run(["echo", "alive"], timeout=10).text == "alive\n"
    with victim() as (pid, _):
        assert outside("signals", pid, 0) == {"0": "ok"}


def test_a_keeper_without_limits_of_its_own_still_ends_its_run_in_time() -> None:
    """To set another's limits the same user is enough; a keeper that can do nothing gives up the sandbox."""
    code = f"""
import os, resource, signal, time
for name in ("NOFILE", "AS", "DATA", "STACK", "FSIZE", "NPROC", "SIGPENDING", "MEMLOCK"):
    resource.prlimit({KEEPER}, getattr(resource, "RLIMIT_" + name), (0, 0))
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
print("done", flush=True)
time.sleep(60)
"""
    began = time.monotonic()
    with Sandbox() as box:
        result = kept_run(box, [arena.PYTHON, "-c", code], timeout=0.5, grace=0.2)
        assert result.stdout == b"done\n" and result.outcome in ("timed-out", "signalled")
        assert time.monotonic() - began < 6
        assert leaks.settled(lambda: [str(p) for p in leaks.family() if "python" in p.name]) == []
        assert box.run(["echo", "alive"], timeout=10).text == "alive\n"
    with victim() as (pid, _):
        assert set(outside("limit_others", pid, "zero").values()) == {"ok"}


@pytest.mark.timeout(110)
def test_a_keeper_buries_the_orphans_of_its_run() -> None:
    result = first_run("orphans", 2_000, 5, KEEPER, timeout=60)
    assert arena.verdict_of(result.stdout) == {"made": 2_000, "unburied": 0}
    # The control: a parent that waits for nobody.
    command, _ = arena.command_of("orphans", 100, 0)
    done = subprocess.run([sys.executable, "-c", UNCARING, *command], capture_output=True, check=True)
    assert arena.verdict_of(done.stdout) == {"made": 100, "unburied": 100}


@pytest.mark.parametrize("living", [False, True])
def test_no_program_can_feign_that_it_is_ended_from_outside(living: bool) -> None:
    """`stockade kill` tells the first process to end; it knows by the sender that it comes from outside."""
    command, _ = arena.command_of("feign", 1)
    result = first_run("feign", 1) if living else stockade.run(command, timeout=30)
    assert (result.outcome, result.exit_code) == ("exited", 0), result.reason
    verdict = arena.verdict_of(result.stdout)
    assert verdict["then"]["tgkill"] == "ok" and verdict["filled"] > 10
    with victim() as (pid, _):
        assert outside("feign", pid, "alone")["first"]["kill"] == "ok"


def test_a_program_is_ended_from_outside_by_the_same_signal() -> None:
    """The control: what could not be feigned works when it is meant."""
    ended = []

    def end(_: bytes) -> None:
        gates = [p for p in leaks.family() if p.name == leaks.GATE and p.nested]
        ended.extend(gates)
        os.kill(gates[0].pid, signal.SIGTERM)

    result = stockade.run(["sh", "-c", "echo started; sleep 60"], timeout=30, on_stdout=end)
    assert (len(ended), result.outcome) == (1, "cancelled")
