"""Pools: sandboxes that are ready before they are asked for, each used once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Pool, SetupError
from stockade.sandbox import pool as module
from support import leaks
from support.means import applies


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "that never happened"
        time.sleep(0.005)


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(size=2) as made:
        wait_for(lambda: made.ready == 2)
        yield made


def test_a_run_is_as_any_other(pool: Pool) -> None:
    result = pool.run(["sh", "-c", 'cat; echo "$A" >&2; exit 3'], input=b"given", env={"A": "b"}, cwd="/tmp")
    assert (result.outcome, result.exit_code) == ("exited", 3)
    assert (result.stdout, result.stderr) == (b"given", b"b\n")
    assert result.controls == stockade.run(["true"]).controls
    assert result.usage.wall > 0


def test_what_was_used_is_replaced(pool: Pool) -> None:
    for _ in range(5):
        pool.run(["true"]).check()
    wait_for(lambda: pool.ready == 2)


def test_one_without_a_sandbox_ready_opens_one(pool: Pool) -> None:
    with pool.acquire() as one, pool.acquire() as two, pool.acquire() as three:
        assert [box.run(["echo", "x"]).text for box in (one, two, three)] == ["x\n"] * 3


def test_no_sandbox_meets_what_another_left(pool: Pool) -> None:
    look = (
        "readlink /proc/self/ns/net /proc/self/ns/pid /proc/self/ns/user; ls -A /tmp /dev/shm ~; "
        "touch /tmp/mine /dev/shm/mine ~/mine; (setsid sleep 300 &) >/dev/null 2>&1"
    )
    seen = [pool.run(["sh", "-c", look]).text for _ in range(5)]
    spaces = [tuple(text.splitlines()[:3]) for text in seen]
    assert len({space for found in spaces for space in found}) == 15
    assert not any("mine" in text for text in seen)


def test_an_acquired_sandbox_runs_several_commands_and_is_gone_afterwards(pool: Pool) -> None:
    with pool.acquire() as box:
        box.run(["sh", "-c", "echo 1 > /tmp/x"]).check()
        assert box.run(["cat", "/tmp/x"]).text == "1\n"
        gate = box.gate
        assert gate is not None and not box.ended
    wait_for(lambda: box.gate is None)


def test_limits_hold(pool: Pool) -> None:
    assert pool.run(["sleep", "30"], timeout=0.2, grace=0.1).outcome == "timed-out"
    with Pool(Policy(limits={"files": 50}), size=1) as narrow:
        assert narrow.run(["sh", "-c", "ulimit -n"]).text == "50\n"


BOMB = """
import os, signal
born = 0
try:
    while born < 99:
        if os.fork() == 0:
            signal.pause()
        born += 1
except OSError:
    print(born)
"""


def test_a_bomb_meets_the_limit_of_tasks() -> None:
    with Pool(Policy(limits={"tasks": 10}, accept=["limits.tasks"]), size=1) as pool:
        applies(pool.run(["true"]).controls["limits.tasks"].observed != "accepted weaker", "a limit of tasks")
        result = pool.run(["/usr/bin/python3", "-c", BOMB], timeout=20, grace=0)
        assert result.text == "9\n"


def test_a_slot_outlives_the_wall_limit_of_a_run() -> None:
    with Pool(Policy(limits={"wall": "100ms"}), size=1) as pool:
        wait_for(lambda: pool.ready == 1)
        time.sleep(0.4)
        assert pool.ready == 1
        assert pool.run(["true"]).ok


def test_one_that_died_while_it_waited_is_replaced(pool: Pool) -> None:
    box = pool._ready[0].box
    gate = box.gate
    assert gate is not None
    signal.pidfd_send_signal(gate, signal.SIGKILL)
    wait_for(lambda: box.ended)
    assert pool.run(["echo", "well"]).text == "well\n"
    wait_for(lambda: pool.ready == 2 and box not in [slot.box for slot in pool._ready])


def test_changes_in_a_workspace_are_kept_aside(workspace: Path) -> None:
    (workspace / "a").write_text("old")
    with Pool(Policy(workspace=str(workspace)), size=1) as pool:
        result = pool.run(["sh", "-c", "echo new > a"])
        assert [change.path for change in result.changes] == ["a"]
        assert (workspace / "a").read_text() == "old"
    assert result.workspace_id is not None
    stockade.Workspace.open(result.workspace_id).discard()


def test_threads_share_it() -> None:
    texts: list[str] = []
    with Pool(size=3) as pool:

        def work(n: int) -> None:
            for i in range(3):
                texts.append(pool.run(["echo", f"{n}.{i}"]).text)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(texts) == sorted(f"{n}.{i}\n" for n in range(4) for i in range(3))


def test_failures_are_told_to_whoever_asks_and_tried_again_later(
    monkeypatch: pytest.MonkeyPatch, workspace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    missing = workspace / "later"
    with Pool(Policy(read=[str(missing)]), size=1) as pool:
        with pytest.raises(PolicyError, match="later"):
            pool.run(["true"])
        wait_for(lambda: "tries again in 0.1 s" in caplog.text)
        missing.mkdir()
        wait_for(lambda: pool.ready == 1)
        assert pool.run(["ls", str(missing)]).ok


def test_closed_it_leaves_nothing_and_runs_nothing() -> None:
    pool = Pool(size=2)
    wait_for(lambda: pool.ready == 2)
    pool.close()
    pool.close()
    assert leaks.settled(lambda: [str(p) for p in leaks.family() if p.nested and not p.spare]) == []
    with pytest.raises(SetupError, match="closed"):
        pool.run(["true"])


def test_what_is_in_use_when_it_is_closed_ends_when_it_is_given_back() -> None:
    pool = Pool(size=1)
    with pool.acquire() as box:
        pool.close()
        assert box.run(["echo", "still"]).text == "still\n"
    assert box.gate is None


def test_a_forked_child_has_sandboxes_of_its_own(pool: Pool) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, pool.run(["echo", "child"]).stdout)
            pool.close()
            leaks.let_go_of_register()
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, "rb") as said:
        assert said.read() == b"child\n"
    assert pool.ready == 2 and pool.run(["echo", "parent"]).text == "parent\n"


@pytest.mark.parametrize("size", [0, -1, 1001, 1.5, True, "2"])
def test_a_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(PolicyError, match="size = "):
        Pool(size=size)


def test_one_that_was_forgotten_goes_with_the_process() -> None:
    script = (
        "import stockade, time\npool = stockade.Pool(size=2)\n"
        "while pool.ready < 2: time.sleep(0.01)\nprint(pool.run(['echo', 'bye']).text)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "bye\n\n" and not done.stderr
