"""Time, tasks and descriptors: a run gets what it was given and no more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.host import host
from support.means import applies, need, need_program

PYTHON = "/usr/bin/python3"
MARK = "stockade-test-mark"
ORDINARY = os.geteuid() != 0


def marked() -> list[str]:
    """Processes of this machine with the mark among their arguments, besides this one."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if f"{MARK}-{os.getpid()}".encode() in words and int(pid) != os.getpid():
            found.append(pid)
    return found


def gone() -> bool:
    end = time.monotonic() + 5
    while marked() and time.monotonic() < end:
        time.sleep(0.02)
    return not marked()


def test_a_run_ends_when_its_time_is_over() -> None:
    began = time.monotonic()
    result = stockade.run(["sleep", "60"], timeout=0.3)
    assert (result.outcome, result.exit_code, result.signal) == ("timed-out", 124, None)
    assert "0.3 s" in result.reason
    assert 0.3 <= time.monotonic() - began < 10


def test_what_was_printed_until_then_is_kept() -> None:
    result = stockade.run(["sh", "-c", "echo early; exec sleep 60"], timeout=0.5)
    assert (result.outcome, result.text) == ("timed-out", "early\n")


def test_a_program_may_clean_up_within_the_grace() -> None:
    script = "trap 'echo cleaned; exit 0' TERM; sleep 60 & wait"
    result = stockade.run(["sh", "-c", script], timeout=0.5)
    assert (result.outcome, result.exit_code, result.text) == ("timed-out", 124, "cleaned\n")


def test_a_program_that_ignores_the_request_is_killed_after_the_grace() -> None:
    script = "trap '' TERM; echo ready; while :; do sleep 1; done"
    began = time.monotonic()
    result = stockade.run(["sh", "-c", script], timeout=0.3, grace=0.3)
    assert (result.outcome, result.text) == ("timed-out", "ready\n")
    assert time.monotonic() - began < 10


def test_a_daemon_goes_with_the_run_that_started_it() -> None:
    script = f"(setsid setsid sh -c 'trap \"\" TERM HUP; sleep 60' {MARK}-{os.getpid()} &) ; echo started"
    result = stockade.run(["sh", "-c", script], timeout=30)
    assert result.text == "started\n"
    assert marked() == []


def test_a_daemon_goes_with_a_run_that_timed_out() -> None:
    daemon = f"setsid setsid sh -c 'trap \"\" TERM HUP; sleep 60' {MARK}-{os.getpid()}"
    result = stockade.run(["sh", "-c", f"({daemon} &) ; trap '' TERM; sleep 60"], timeout=0.3, grace=0.2)
    assert result.outcome == "timed-out"
    assert marked() == []


def test_the_policys_wall_limit_ends_a_run() -> None:
    result = stockade.run(["sleep", "60"], Policy(limits={"wall": "300ms"}))
    assert (result.outcome, result.exit_code) == ("timed-out", 124)
    assert result.controls["limits.wall"].requested == 'limits.wall = "300ms"'


def test_the_shorter_of_wall_limit_and_timeout_counts() -> None:
    began = time.monotonic()
    assert stockade.run(["sleep", "60"], Policy(limits={"wall": "60s"}), timeout=0.2).outcome == "timed-out"
    assert stockade.run(["sleep", "60"], Policy(limits={"wall": "200ms"}), timeout=60).outcome == "timed-out"
    assert time.monotonic() - began < 20


def test_a_run_within_its_time_is_not_touched() -> None:
    assert stockade.run(["sh", "-c", "sleep 0.2; echo done"], timeout=30).text == "done\n"


class TestInALivingSandbox:
    def test_a_run_that_times_out_leaves_the_sandbox_usable(self) -> None:
        with Sandbox() as box:
            box.run(["sh", "-c", "echo kept > /tmp/x"]).check()
            assert box.run(["sh", "-c", "trap '' TERM; sleep 60"], timeout=0.2).outcome == "timed-out"
            assert box.run(["cat", "/tmp/x"]).text == "kept\n"

    def test_a_run_that_times_out_takes_its_children_with_it(self) -> None:
        with Sandbox() as box:
            script = f"sh -c 'sleep 60; :' {MARK}-{os.getpid()} & sleep 60"
            assert box.run(["sh", "-c", script], timeout=0.3).outcome == "timed-out"
            assert gone()

    def test_a_run_that_times_out_takes_its_daemons_with_it(self) -> None:
        with Sandbox() as box:
            script = f"setsid sh -c 'sleep 60; :' {MARK}-{os.getpid()} & sleep 60"
            assert box.run(["sh", "-c", script], timeout=0.3).outcome == "timed-out"
            assert gone()

    def test_the_wall_limit_counts_for_each_run(self) -> None:
        with Sandbox(Policy(limits={"wall": "400ms"})) as box:
            assert box.run(["sleep", "60"]).outcome == "timed-out"
            assert box.run(["echo", "again"]).text == "again\n"

    def test_everything_ends_when_the_sandbox_is_closed(self) -> None:
        with Sandbox() as box:
            # Until it is a session of its own it is still being born.
            box.run(
                [
                    "sh",
                    "-c",
                    f"setsid sh -c 'echo >/tmp/up; sleep 60; :' {MARK}-{os.getpid()} & "
                    "until [ -e /tmp/up ]; do sleep 0.01; done",
                ]
            ).check()
            assert marked()
        assert marked() == []


COUNT_FORKS = """
import os
children = []
try:
    while len(children) < 2000:
        pid = os.fork()
        if pid == 0:
            import time
            time.sleep(60)
        children.append(pid)
except OSError as error:
    print(len(children), error.errno)
"""


def need_task_limit() -> None:
    need(host().has("nproc") or host().has("cgroup.pids"), "this user has no task limit on this host")


class TestTasks:
    def test_a_program_gets_as_many_tasks_as_the_policy_says(self) -> None:
        need_task_limit()
        result = stockade.run([PYTHON, "-c", COUNT_FORKS], Policy(limits={"tasks": 20}), timeout=60)
        # The program itself is one of them.
        assert result.text == "19 11\n"

    def test_by_default_a_fork_bomb_is_bounded(self) -> None:
        need_task_limit()
        result = stockade.run([PYTHON, "-c", COUNT_FORKS], timeout=60)
        assert result.text == "255 11\n"

    def test_the_gate_can_start_a_program_beside_a_fork_bomb(self) -> None:
        need_task_limit()
        hold = COUNT_FORKS + "\nimport sys; sys.stdout.flush(); os._exit(0)"
        with Sandbox(Policy(limits={"tasks": 20})) as box:
            assert box.run([PYTHON, "-c", hold], timeout=30).text == "19 11\n"
            assert box.run(["sh", "-c", "kill -9 -1"], timeout=30).outcome in ("exited", "signalled")
            assert box.run(["echo", "alive"], timeout=30).text == "alive\n"

    def test_one_sandboxs_tasks_do_not_count_for_another(self) -> None:
        need_task_limit()
        policy = Policy(limits={"tasks": 20})
        with Sandbox(policy) as box:
            box.run([PYTHON, "-c", COUNT_FORKS + "\nimport sys; sys.stdout.flush(); os._exit(0)"]).check()
            assert stockade.run([PYTHON, "-c", COUNT_FORKS], policy, timeout=30).text == "19 11\n"

    def test_root_without_cgroups_is_refused_a_task_limit_that_it_wrote_and_may_do_without(self) -> None:
        applies(not ORDINARY, "an ordinary user has a task limit")
        script = (
            "import stockade\n"
            "policy = {'limits': {'tasks': 20}}\n"
            "try: stockade.run(['true'], stockade.Policy(**policy))\n"
            "except stockade.UnsupportedError as error: print(error, error.hint)\n"
            "accepted = stockade.run(['true'], stockade.Policy(**policy, accept=['limits.tasks']))\n"
            "print(accepted.exit_code, accepted.controls['limits.tasks'].observed)\n"
        )
        hide = f'mount -t tmpfs none /sys/fs/cgroup && exec {sys.executable} -c "$0"'
        command = [need_program("unshare"), "--mount", "sh", "-c", hide, script]
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert "limits.tasks" in said and 'accept = ["limits.tasks"]' in said
        assert said.endswith("0 accepted weaker\n")


COUNT_FILES = """
import os
found = []
try:
    while True:
        found.append(os.open("/dev/null", os.O_RDONLY))
except OSError as error:
    print(max(found) + 1, error.errno)
"""


class TestOpenFiles:
    @pytest.mark.parametrize("limit", [16, 300])
    def test_a_program_opens_as_many_files_as_the_policy_says(self, limit: int) -> None:
        result = stockade.run([PYTHON, "-c", COUNT_FILES], Policy(limits={"files": limit}))
        assert result.text == f"{limit} 24\n"

    def test_by_default_there_are_1024(self) -> None:
        assert stockade.run(["sh", "-c", "ulimit -Sn; ulimit -Hn"]).text == "1024\n1024\n"

    def test_the_limit_cannot_be_raised(self) -> None:
        assert stockade.run(["sh", "-c", "ulimit -n 4096 2>/dev/null; ulimit -n"]).text == "1024\n"


def test_no_core_is_dumped() -> None:
    assert stockade.run(["sh", "-c", "ulimit -Sc; ulimit -Hc"]).text == "0\n0\n"
