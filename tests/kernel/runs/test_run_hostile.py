"""Programs, threads and forks that mean no good: the supervisor keeps its word all the same."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox
from support import leaks

PYTHON = "/usr/bin/python3"


def test_no_standard_stream_is_a_file_of_the_hosts() -> None:
    """Root's program owns root's inodes: a mode or a time could be set through the descriptor."""
    code = "import os, stat; print(*(stat.S_ISFIFO(os.fstat(fd).st_mode) for fd in (0, 1, 2)))"
    before = os.stat("/dev/null")
    assert stockade.run([PYTHON, "-c", code]).text == "True True True\n"
    stockade.run([PYTHON, "-c", "import os; [os.fchmod(fd, 0) for fd in (0, 1, 2)]"])
    after = os.stat("/dev/null")
    assert (before.st_mode, before.st_ctime_ns) == (after.st_mode, after.st_ctime_ns)


def test_a_program_that_reads_its_own_output_away_does_not_stop_the_clock() -> None:
    thief = """
import os
fd = os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK)
while True:
    os.write(1, b"x")
    try:
        os.read(fd, 100)
    except BlockingIOError:
        pass
"""
    result = stockade.run([PYTHON, "-c", thief], timeout=1, grace=0.2)
    assert result.outcome == "timed-out" and result.usage.wall < 10


def test_a_run_ends_though_its_background_writes_for_ever() -> None:
    with Sandbox() as box:
        began = time.monotonic()
        slow = box.run(["sh", "-c", "yes & yes & exit 3"], timeout=20, on_stdout=lambda _: time.sleep(0.002))
        assert slow.exit_code == 3 and time.monotonic() - began < 10


def test_closing_in_another_thread_ends_the_run() -> None:
    box = Sandbox()
    box.open()
    found: list[stockade.Result] = []
    thread = threading.Thread(target=lambda: found.append(box.run(["sleep", "60"])))
    thread.start()
    time.sleep(0.3)
    box.close()
    thread.join(10)
    assert not thread.is_alive() and not found[0].ok


def test_a_forked_child_that_closes_leaves_the_parents_sandbox_alone(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        box.run(["touch", "kept"])
        child = os.fork()
        if child == 0:
            box.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert box.run(["ls"]).text == "kept\n"


def test_a_fork_in_the_middle_of_a_launch_does_not_hold_the_child() -> None:
    from stockade.gate import client

    stockade.run(["true"])
    with client._ResidentTable.lock:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = stockade.run(["true"]).exit_code
                client.shutdown()
                leaks.let_go_of_register()
            finally:
                os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_what_a_cancelled_run_changed_is_kept(workspace: Path, stockade_home: Path) -> None:
    def stop(_: bytes) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stockade.run(
            ["sh", "-c", "echo work > done; echo ready; sleep 60"],
            Policy(workspace=str(workspace)),
            on_stdout=stop,
        )
    (layer,) = (stockade_home / "workspaces").iterdir()
    assert (layer / "upper" / "done").read_text() == "work\n"


def test_changes_are_listed_though_the_workspace_is_being_changed(workspace: Path) -> None:
    churn = "while :; do mkdir -p a/b; touch a/b/c; rm -rf a; done"
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        box.run(["sh", "-c", f"({churn}) > /dev/null 2>&1 &"])
        for _ in range(40):
            assert box.run(["true"]).ok


def test_what_is_held_of_a_sandbox_is_not_inherited() -> None:
    with Sandbox() as box:
        box.run(["true"])
        held = box._box
        assert held is not None
        assert not os.get_inheritable(held.pidfd) and not os.get_inheritable(held.network_fd)


def test_a_write_grant_in_an_overlay_does_not_open_what_is_protected(workspace: Path) -> None:
    (workspace / ".git" / "hooks").mkdir(parents=True)
    (workspace / ".git" / "config").write_text("mine\n")
    policy = Policy(workspace=str(workspace), write=[str(workspace / ".git")])
    script = "echo evil > .git/hooks/x; echo evil > .git/config; mv .git/hooks .git/h; echo fine > .git/index"
    stockade.run(["sh", "-c", script], policy, on_exit="discard")
    assert (workspace / ".git" / "config").read_text() == "mine\n"
    assert list((workspace / ".git" / "hooks").iterdir()) == []
    assert (workspace / ".git" / "index").read_text() == "fine\n"


def test_what_a_write_grant_could_create_and_is_protected_is_refused_by_name(workspace: Path) -> None:
    (workspace / ".git").mkdir()
    with pytest.raises(PolicyError, match=r"\.git/hooks"):
        stockade.run(["true"], Policy(workspace=str(workspace), write=[str(workspace / ".git")]))


def test_stockade_itself_cannot_be_granted_for_writing() -> None:
    package = os.path.dirname(os.path.realpath(stockade.__file__))
    with pytest.raises(PolicyError, match="Stockade itself"):
        stockade.run(["true"], Policy(write=[f"{package}/gate"]))


def test_memory_for_output_is_bounded_by_the_limit() -> None:
    result = stockade.run(["sh", "-c", "yes | head -c 3000000"], Policy(limits={"output": 1000}))
    assert (len(result.stdout), result.truncated) == (1000, True)


def test_a_run_that_ended_in_time_is_not_blamed_for_a_slow_callback() -> None:
    result = stockade.run(["echo", "done"], timeout=0.5, on_stdout=lambda _: time.sleep(1))
    assert (result.outcome, result.exit_code) == ("exited", 0)
