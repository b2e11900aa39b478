"""Pools whose policy lets them use a sandbox again: what is shared, what is not, and when it ends."""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stockade import Policy, PolicyError, Pool
from stockade.host import host
from stockade.sandbox import pool as module
from support.means import need

WHICH = ["sh", "-c", "readlink /proc/self/ns/pid"]
PLAIN: dict[str, Any] = {"backend": "landlock", "accept": ["files", "processes", "devices"]}


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit, "that never happened"
        time.sleep(0.005)


def reusing(size: int = 1, reuse: Mapping[str, Any] | None = None, **clauses: Any) -> Pool:
    return Pool(Policy(reuse={} if reuse is None else reuse, **clauses), size=size)


#: Each outlives its run in another way, and says so in a file.
LEFT = """
cd "$HOME"
beat() { while :; do date >>"$1"; sleep 0.01; done; }
(setsid sh -c 'trap "" TERM HUP INT; while :; do date >>one; sleep 0.01; done' &)
(beat two & kill -STOP $! ; true)
beat three >/dev/null 2>&1 &
echo left
"""
FORKS = """
import os, sys
os.chdir(os.environ["HOME"])
if os.fork():
    sys.exit()
os.setsid()
while True:
    if os.fork():
        os._exit(0)
    with open("four", "a") as file:
        file.write("x")
"""
LOOK = 'cd "$HOME"; wc -c one two three four 2>/dev/null; sleep 0.1; wc -c one two three four 2>/dev/null'


@pytest.mark.parametrize("backend", ["native", "landlock"])
def test_no_process_of_a_run_lives_on_beside_the_next(backend: str) -> None:
    need(backend == "native" or host().has("scopes"), "this kernel's Landlock cannot keep signals inside")
    with reusing(**(PLAIN if backend == "landlock" else {})) as pool:
        wait_for(lambda: pool.ready == 1)
        assert pool.run(["sh", "-c", LEFT], timeout=20).text == "left\n"
        boxes = {slot.box for slot in pool._ready if slot.requests}
        assert len(boxes) == 1
        pool.run(["/usr/bin/python3", "-c", FORKS], timeout=20)
        if backend == "native":
            seen = pool.run(["sh", "-c", "echo /proc/[0-9]*"]).text.split()
            assert len(seen) == 2, seen  # the gate, the shell
        before, after = (lines for lines in _halves(pool.run(["sh", "-c", LOOK]).text))
        assert before == after


def _halves(text: str) -> tuple[list[str], list[str]]:
    lines = text.splitlines()
    return lines[: len(lines) // 2], lines[len(lines) // 2 :]


def test_runs_share_a_sandbox_and_its_private_files_one_after_another() -> None:
    with reusing() as pool:
        wait_for(lambda: pool.ready == 1)
        assert len({pool.run(WHICH).text for _ in range(5)}) == 1
        pool.run(["sh", "-c", "echo mine >/tmp/x"]).check()
        assert pool.run(["cat", "/tmp/x"]).text == "mine\n"
        # Whoever comes while it is in use gets another.
        script = "mkdir /tmp/busy || exit 9; readlink /proc/self/ns/pid; sleep 0.2; rmdir /tmp/busy"
        results: list[tuple[int, str]] = []

        def work() -> None:
            result = pool.run(["sh", "-c", script], timeout=30)
            results.append((result.exit_code, result.text))

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {code for code, _ in results} == {0}
        with pool.acquire() as box:  # never one that was used
            assert not box.run(["test", "-e", "/tmp/x"]).ok


@pytest.mark.parametrize(
    ("reuse", "pause"), [({"requests": 2}, 0.0), ({"age": "150ms"}, 0.2), ({"idle": "100ms"}, 0.2)]
)
def test_it_takes_no_more_than_its_requests_its_age_and_its_idle_time(
    reuse: Mapping[str, Any], pause: float
) -> None:
    with reusing(reuse=reuse) as pool:
        wait_for(lambda: pool.ready == 1)
        first = [pool.run(WHICH).text for _ in range(2)]
        time.sleep(pause)
        assert pool.run(WHICH).text not in first
        if "requests" in reuse:
            assert first[0] == first[1]


def test_one_that_idles_is_ended_and_one_that_was_never_used_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK", 0.02)
    with reusing(reuse={"idle": "200ms"}, limits={"wall": "150ms"}) as pool:
        wait_for(lambda: pool.ready == 1)
        time.sleep(0.3)
        fresh = pool._ready[0]
        assert pool.run(["true"]).ok
        assert pool._ready[0] is fresh and fresh.requests == 1
        wait_for(lambda: pool.ready == 1 and pool._ready[0] is not fresh)
        assert fresh.box.gate is None


def test_after_a_run_that_did_not_end_by_itself_it_is_not_used_again() -> None:
    with reusing(limits={"wall": "200ms"}) as pool:
        first = pool.run(WHICH).text
        assert pool.run(["sleep", "60"], grace=0).outcome == "timed-out"
        assert pool.run(WHICH).text != first


def test_those_that_die_are_replaced_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.05)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(module, "LOOK", 0.01)
    caplog.set_level(logging.WARNING, "stockade")
    with reusing() as pool:
        for _ in range(4):
            wait_for(lambda: pool.ready == 1)
            box = pool._ready[0].box
            gate = box.gate
            assert gate is not None
            signal.pidfd_send_signal(gate, signal.SIGKILL)
            wait_for(lambda box=box: box not in [slot.box for slot in pool._ready])  # type: ignore[misc]
        assert pool.run(["echo", "well"]).text == "well\n"
    told = [
        record.getMessage().rsplit(" ", 2)[1] for record in caplog.records if "has died" in record.message
    ]
    assert told == ["0.05", "0.1", "0.2", "0.2"]


def test_a_workspace_that_keeps_changes_is_not_shared(workspace: Path) -> None:
    with pytest.raises(PolicyError, match="reuse: each run would see the changes"):
        reusing(workspace=str(workspace))
    with reusing(workspace={"path": str(workspace), "mode": "ro"}) as pool:
        assert pool.run(["pwd"]).text == f"{workspace}\n"
