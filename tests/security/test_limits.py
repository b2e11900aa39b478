"""Limits: what a program may use up, and that it cannot talk itself out of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time

from security import arena
from security.arena import inside, outside, run
from stockade.host import host
from support import leaks
from support.means import applies


def test_a_fork_bomb_is_stopped_by_the_task_limit() -> None:
    applies(host().has("nproc"), "this user has no task limit on this host (root without cgroups)")
    made, answer = inside("limits", "tasks", 60, limits={"tasks": 20})
    assert answer == "EAGAIN" and made <= 20
    assert outside("limits", "tasks", 60) == [60, "ok"]


def test_the_task_limits_of_two_sandboxes_do_not_add_up_or_get_in_each_others_way() -> None:
    applies(host().has("nproc"), "this user has no task limit on this host (root without cgroups)")
    first = inside("limits", "tasks", 60, limits={"tasks": 20})
    assert inside("limits", "tasks", 60, limits={"tasks": 20}) == first
    assert outside("limits", "tasks", 60) == [60, "ok"]


def test_open_descriptors_are_limited() -> None:
    count, answer = inside("limits", "files", 300, limits={"files": 64})
    assert answer == "EMFILE" and count <= 64
    assert outside("limits", "files", 300) == [300, "ok"]


def test_a_program_cannot_raise_its_own_limits() -> None:
    assert inside("limits", "lift", 200, limits={"files": 64}) == [64, "refused"]
    assert outside("limits", "lift", 200) == [200, "ok"]


def test_endless_output_is_capped_and_said() -> None:
    result = run("limits", "output", limits={"output": 100_000, "wall": 1})
    assert result.truncated and len(result.stdout) == 100_000
    assert result.outcome == "timed-out"
    command, _ = arena.command_of("limits", "output")
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert len(process.stdout.read(1_000_000)) == 1_000_000
        process.kill()


def test_hiding_from_the_time_limit_is_of_no_use() -> None:
    """setsid, a double fork, every signal ignored, every stream closed."""
    before = set(map(str, leaks.family()))
    begin = time.monotonic()
    result = run("limits", "hide", limits={"wall": 0.3})
    assert result.outcome == "timed-out"
    assert time.monotonic() - begin < 10
    after = [p for p in leaks.family() if str(p) not in before and not p.resident]
    assert after == []
    command, _ = arena.command_of("limits", "hide")
    with subprocess.Popen(command) as process:
        time.sleep(0.3)
        process.terminate()
        time.sleep(0.1)
        assert process.poll() is None, "the control shows nothing"
        process.kill()
    for stray in [p for p in leaks.family() if str(p) not in before and not p.resident and not p.zombie]:
        os.kill(stray.pid, signal.SIGKILL)
