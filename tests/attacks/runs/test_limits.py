"""Limits: what a program may use up, and that it cannot talk itself out of them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

import stockade
from attacks import arena
from attacks.arena import inside, outside, run
from stockade import LimitError, Policy, Sandbox
from stockade.gate import wire
from stockade.host import host
from support import leaks
from support.means import need


def test_a_fork_bomb_is_stopped_by_the_task_limit() -> None:
    need(host().has("nproc") or host().has("cgroup.pids"), "this user has no task limit on this host")
    made, answer = inside("limits", "tasks", 60, limits={"tasks": 20})
    assert answer == "EAGAIN" and made <= 20
    assert outside("limits", "tasks", 60) == [60, "ok"]


def test_the_task_limits_of_two_sandboxes_do_not_add_up_or_get_in_each_others_way() -> None:
    need(host().has("nproc") or host().has("cgroup.pids"), "this user has no task limit on this host")
    first = inside("limits", "tasks", 60, limits={"tasks": 20})
    assert inside("limits", "tasks", 60, limits={"tasks": 20}) == first
    assert outside("limits", "tasks", 60) == [60, "ok"]


def test_open_descriptors_are_limited() -> None:
    count, answer = inside("limits", "files", 300, limits={"files": 64})
    assert answer == "EMFILE" and count <= 64
    assert outside("limits", "files", 300) == [300, "ok"]


@pytest.mark.parametrize("backend", ["native", "bwrap"])
def test_no_few_sandboxes_take_the_terminals_of_all_others(backend: str) -> None:
    """The kernel has 3,072 for all sandboxes together. The terminal of a run is one of its sandbox's."""
    most = int(wire.MOST_TERMINALS)
    command, _ = arena.command_of("limits", "terminals", 600)
    with Sandbox(Policy(backend=backend)) as box:
        assert arena.verdict_of(box.run(command).check().stdout) == [most, "ENOSPC"]
        with box.start(command, pty=True) as process:
            assert process.stdout is not None
            assert arena.verdict_of(process.stdout.readline()) == [most - 1, "ENOSPC"]
            assert process.wait(10).exit_code == 0
    assert outside("limits", "terminals", 200) == [200, "ok"]
    assert 40 * most < 3072


SMALL = 8 << 20


@pytest.mark.parametrize("mode", ["ro", "rw", None])
def test_filling_the_private_memory_stops_at_the_disk_limit(workspace: Path, mode: str | None) -> None:
    place = {"workspace": {"path": str(workspace), "mode": mode}, "protect": []} if mode else {}
    filled, answer = inside("limits", "disk", 4 * SMALL, limits={"disk": SMALL}, **place)
    assert answer == "ENOSPC" and filled <= SMALL
    assert inside("limits", "disk", 4 * SMALL, **place) == [4 * SMALL, "ok"]
    assert outside("limits", "disk", 4 * SMALL) == [4 * SMALL, "ok"]


def test_files_without_content_stop_at_the_disk_limit_too() -> None:
    made, answer = inside("limits", "inodes", 4000, limits={"disk": SMALL})
    assert answer == "ENOSPC" and 1000 < made < SMALL // 4096
    assert outside("limits", "inodes", 4000) == [4000, "ok"]


def test_even_the_largest_disk_limit_starts_a_program() -> None:
    assert inside("limits", "inodes", 10, limits={"disk": (1 << 63) - 1}) == [10, "ok"]
    assert outside("limits", "inodes", 10) == [10, "ok"]


def test_even_the_smallest_disk_limit_starts_a_program() -> None:
    made, answer = inside("limits", "inodes", 4000, limits={"disk": 1})
    assert answer == "ENOSPC" and 500 < made < 1024
    assert outside("limits", "inodes", 4000) == [4000, "ok"]


def test_filling_an_overlay_workspace_stops_at_the_disk_limit_and_harms_no_other(
    workspace: Path, tmp_path: Path
) -> None:
    """Threat 27. Without the limit the same is written; another sandbox and the host notice nothing."""
    other = tmp_path / "other"
    other.mkdir()
    fill = ["sh", "-c", f"head -c {4 * SMALL} /dev/zero > big"]
    bounds = {"limits": {"disk": SMALL}, "protect": []}
    with (
        Sandbox(Policy(workspace=str(workspace), **bounds), on_exit="discard") as full,
        Sandbox(Policy(workspace=str(other), **bounds), on_exit="discard") as box,
    ):
        result = full.run(fill, timeout=60)
        assert result.exit_code == 1 and b"No space left on device" in result.stderr
        with pytest.raises(LimitError):
            full.files.write("more", b"x" * SMALL)
        assert box.run(["sh", "-c", "head -c 4M /dev/zero > big"], timeout=60).ok
        box.files.write("more", b"x" * 4096)
    assert os.listdir(workspace) == os.listdir(other) == []
    with Sandbox(Policy(workspace=str(workspace), protect=[]), on_exit="discard") as free:
        assert free.run(fill, timeout=60).ok


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


@pytest.mark.parametrize("stream", [1, 2])
def test_what_is_beyond_the_cap_is_spilled_whole(stream: int, stockade_home: Path) -> None:
    """A bound of the program's own, since an endless one would fill the disk that it is spilled to."""
    size = 3_000_000
    code = f"import os; [os.write({stream}, bytes([65 + n]) * 30_000) for n in range({size} // 30_000)]"
    result = stockade.run([arena.PYTHON, "-c", code], Policy(limits={"output": 100_000}), timeout=30)
    kept = (result.stdout, result.stderr)[stream - 1]
    (spilled,) = result.spilled
    rest = Path(spilled.path).read_bytes()
    assert result.truncated and len(kept) == 100_000 and spilled.size == len(rest) and spilled.lost == 0
    assert kept + rest == b"".join(bytes([65 + n]) * 30_000 for n in range(size // 30_000))
    assert Path(spilled.path).stat().st_mode & 0o777 == 0o600
    done = subprocess.run([arena.PYTHON, "-c", code], capture_output=True, check=True)
    assert len((done.stdout, done.stderr)[stream - 1]) == size


def test_hiding_from_the_time_limit_is_of_no_use() -> None:
    """setsid, a double fork, every signal ignored, every stream closed."""
    before = set(map(str, leaks.family()))
    begin = time.monotonic()
    result = run("limits", "hide", limits={"wall": 0.3})
    assert result.outcome == "timed-out"
    assert time.monotonic() - begin < 10
    after = [p for p in leaks.family() if str(p) not in before and not (p.resident or p.spare)]
    assert after == []
    command, _ = arena.command_of("limits", "hide")
    with subprocess.Popen(command) as process:
        time.sleep(0.3)
        process.terminate()
        time.sleep(0.1)
        assert process.poll() is None, "the control shows nothing"
        process.kill()
    for stray in [
        p for p in leaks.family() if str(p) not in before and not (p.resident or p.spare or p.zombie)
    ]:
        os.kill(stray.pid, signal.SIGKILL)
