"""A sandbox that lives: several commands behind the same walls, from threads and forks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from support import leaks


def test_commands_share_the_private_directories() -> None:
    with Sandbox() as box:
        box.run(["sh", "-c", "echo t > /tmp/x; echo h > ~/x; echo s > /dev/shm/x"]).check()
        assert box.run(["sh", "-c", "cat /tmp/x ~/x /dev/shm/x"]).text == "t\nh\ns\n"


def test_two_sandboxes_share_nothing() -> None:
    with Sandbox() as one, Sandbox() as other:
        one.run(["touch", "/tmp/x"]).check()
        assert one.run(["test", "-e", "/tmp/x"]).ok
        assert not other.run(["test", "-e", "/tmp/x"]).ok


def test_a_process_outlives_its_run_and_is_seen_by_the_next() -> None:
    with Sandbox() as box:
        pid = box.run(["sh", "-c", "sleep 60 >/dev/null 2>&1 & echo $!"]).text.strip()
        box.run(["kill", "-0", pid]).check()
        box.run(["kill", pid]).check()


def test_a_failed_command_harms_no_later_one() -> None:
    with Sandbox() as box:
        assert box.run(["no-such-command"]).exit_code == 127
        assert box.run(["true"], cwd="/none").exit_code == 125
        assert box.run(["sh", "-c", "kill -9 $$"]).signal == 9
        assert box.run(["echo", "x" * 200_000]).outcome != "exited"
        assert box.run(["echo", "fine"]).text == "fine\n"


def test_many_commands_leave_no_descriptor() -> None:
    with Sandbox() as box:
        box.run(["true"])
        before = sorted(os.listdir("/proc/self/fd"))
        for _ in range(100):
            box.run(["true"]).check()
        assert sorted(os.listdir("/proc/self/fd")) == before
        inside = box.run(["sh", "-c", "ls /proc/self/fd"]).text.split()
    assert inside == ["0", "1", "2", "3"], "3 is the directory that ls reads"


def test_a_killed_gate_is_told_and_ends_the_sandbox() -> None:
    with Sandbox() as box:
        done: list[stockade.Result] = []
        running = threading.Thread(target=lambda: done.append(box.run(["sleep", "60"])))
        running.start()
        time.sleep(0.3)
        assert box._box is not None
        signal.pidfd_send_signal(box._box.pidfd, signal.SIGKILL)
        running.join(20)
        assert done and (done[0].outcome, done[0].exit_code) == ("setup-failed", 125)
        assert "gate" in done[0].reason


def test_an_abandoned_run_does_not_go_on_in_the_sandbox() -> None:
    def give_up(_: bytes) -> None:
        raise KeyboardInterrupt

    with Sandbox() as box:
        with pytest.raises(KeyboardInterrupt):
            box.run(["sh", "-c", "echo x; sleep 300"], on_stdout=give_up)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            names = box.run(["sh", "-c", "cat /proc/[0-9]*/comm"]).text.split()
            if "sleep" not in names:
                break
        assert "sleep" not in names


def test_input_environment_and_directory_are_each_runs_own(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace))) as box:
        assert box.run(["cat"], input=b"one").stdout == b"one"
        assert box.run(["cat"]).stdout == b""
        assert box.run(["sh", "-c", 'echo "$X"; pwd'], env={"X": "1"}, cwd="/usr").text == "1\n/usr\n"
        assert box.run(["sh", "-c", 'echo "$X"; pwd']).text == f"\n{workspace}\n"


def test_sixteen_threads_each_get_their_own_answers() -> None:
    def five(number: int) -> list[str]:
        return [
            stockade.run(
                ["sh", "-c", "cat; echo $X"], input=b"%d-%d " % (number, turn), env={"X": f"{turn}"}
            ).text
            for turn in range(5)
        ]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(five, range(16)))
    assert answers == [[f"{number}-{turn} {turn}\n" for turn in range(5)] for number in range(16)]


def test_threads_may_share_one_sandbox() -> None:
    with Sandbox() as box, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda n: box.run(["echo", str(n)]).text, range(24)))
    assert answers == [f"{n}\n" for n in range(24)]


def test_a_sandbox_may_be_used_from_a_thread_that_did_not_open_it() -> None:
    with Sandbox() as box:
        seen: list[str] = []
        thread = threading.Thread(target=lambda: seen.append(box.run(["echo", "thread"]).text))
        thread.start()
        thread.join()
        assert seen == ["thread\n"]
        assert box.run(["echo", "main"]).text == "main\n"


def test_a_sandbox_outlives_the_thread_that_opened_it() -> None:
    box = Sandbox()
    opener = threading.Thread(target=box.open)
    opener.start()
    opener.join()
    try:
        time.sleep(0.1)
        assert box.run(["echo", "alive"]).text == "alive\n"
    finally:
        box.close()


def test_a_close_that_is_interrupted_while_it_waits_closes_all_the_same(workspace: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    box = Sandbox(Policy(workspace=str(workspace)))
    box.open()
    box.run(["true"]).check()
    assert box._box is not None
    signal.pidfd_send_signal(box._box.pidfd, signal.SIGSTOP)  # so that there is something to wait for
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            box.close()
    finally:
        signal.signal(signal.SIGALRM, before)


def in_child(action: Callable[[], None]) -> int:
    """The exit code of a fork of this process that does it."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            action()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def runs_and_shuts_down() -> None:
    assert stockade.run(["echo", "child"]).text == "child\n"
    shut_down()


def shut_down() -> None:
    """What the end of a process does that `os._exit` does not."""
    leaks.quiesce()
    leaks.let_go_of_register()


def test_a_fork_of_the_host_program_runs_sandboxes_of_its_own() -> None:
    stockade.run(["true"]).check()
    assert in_child(runs_and_shuts_down) == 0
    assert stockade.run(["echo", "parent"]).text == "parent\n"


def test_a_fork_does_not_keep_its_parents_sandbox_alive_nor_end_it() -> None:
    with Sandbox() as box:
        assert in_child(runs_and_shuts_down) == 0
        assert box.run(["echo", "parent"]).text == "parent\n"


def test_a_fork_taken_while_another_thread_launches_can_launch_too() -> None:
    stop = threading.Event()

    def launch() -> None:
        while not stop.is_set():
            stockade.run(["true"])

    thread = threading.Thread(target=launch)
    thread.start()
    try:
        for _ in range(5):
            assert in_child(runs_and_shuts_down) == 0
    finally:
        stop.set()
        thread.join()


def test_the_host_program_may_wait_for_any_child() -> None:
    stockade.run(["true"]).check()
    from stockade.gate import client

    client.shutdown()
    stockade.run(["true"]).check()
    with pytest.raises(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
        raise ChildProcessError
    stockade.run(["true"]).check()


#: Nobody closes any of them, or lets go of one before the interpreter takes itself apart.
UNCLOSED = """
import asyncio, stockade
python = stockade.functions.WarmPython(size=0)
box, later, other = python.sandbox(), stockade.AsyncSandbox(), stockade.Sandbox()
box.open(); other.open(); asyncio.run(later.open())
shell, job = other.shell(), other.background(["sleep", "60"])
print(box.run(["echo", "here"]).text + shell.run("echo there").text, end="")
"""


def test_what_nobody_closed_is_closed_at_the_end_of_the_interpreter_and_said(stockade_home: Path) -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", UNCLOSED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("here\nthere\n", 0)
    said = [line for line in done.stderr.splitlines() if not line.startswith(" ")]
    assert len(said) == 4 and all("ResourceWarning: a" in line for line in said), done.stderr
    assert os.listdir(stockade_home / "run") == []
