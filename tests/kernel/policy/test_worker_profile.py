"""The profile `worker`: a snippet gets one second of processor time, 64 MiB and 64 tasks, and no network."""

from __future__ import annotations

import pytest

import stockade
from stockade import Policy, Sandbox
from stockade.host import host
from support.means import applies, need

PYTHON = "/usr/bin/python3"
WORKER = Policy(profile="worker")


@pytest.fixture
def cgroups() -> None:
    applies(host().has("cgroup.memory") and host().has("cgroup.cpuacct"), "no cgroups for this user")


def test_a_snippet_works() -> None:
    snippet = "import asyncio, json, re, sqlite3; print(json.dumps(sorted([3, 1, 2])))"
    result = stockade.run([PYTHON, "-c", snippet], WORKER)
    assert (result.outcome, result.text) == ("exited", "[1, 2, 3]\n"), result.stderr
    with Sandbox(WORKER) as box:
        assert box.python().run("6 * 7").value == 42


def test_every_limit_of_the_budget_is_in_the_result() -> None:
    controls = stockade.run(["true"], WORKER).controls
    assert {"limits.memory", "limits.cpu_time", "limits.tasks", "network.none"} <= set(controls)
    if host().has("cgroup.memory"):
        assert controls["limits.memory"].grade.enforced


def test_a_snippet_that_does_not_end_is_stopped_after_a_second_of_processor_time() -> None:
    result = stockade.run([PYTHON, "-c", "while True: pass"], WORKER, timeout=100)
    assert (result.outcome, result.exit_code) == ("limit-exceeded", 137)
    assert 'limits.cpu_time = "1s"' in result.reason


def test_forks_share_the_processor_time(cgroups: None) -> None:
    script = "import os\nfor _ in range(4): os.fork()\nwhile True: pass"
    result = stockade.run([PYTHON, "-c", script], WORKER, timeout=100)
    assert result.outcome == "limit-exceeded"
    assert result.usage.cpu_user + result.usage.cpu_system < 5


def test_a_snippet_gets_64_mebibytes_with_all_that_it_starts(cgroups: None) -> None:
    script = "import os\nos.fork()\nx = bytearray(48 << 20)\nimport time; time.sleep(50)"
    assert stockade.run([PYTHON, "-c", script], WORKER).outcome == "out-of-memory"


def test_what_it_writes_to_its_private_files_counts_as_memory(cgroups: None) -> None:
    script = "file = open('/tmp/x', 'wb')\nfor _ in range(100): file.write(bytes(1 << 20))"
    assert stockade.run([PYTHON, "-c", script], WORKER).outcome == "out-of-memory"


#: Prints how many of 80 threads could live at once.
THREADS = """
import threading
threading.stack_size(1 << 18)
hold, made = threading.Event(), 0
try:
    for _ in range(80):
        threading.Thread(target=hold.wait).start()
        made += 1
except RuntimeError:
    pass
hold.set()
print(made)
"""


def test_a_snippet_gets_64_tasks_unless_the_policy_writes_more() -> None:
    need(host().has("nproc") or host().has("cgroup.pids"), "this user has no task limit on this host")
    assert 50 < int(stockade.run([PYTHON, "-c", THREADS], WORKER).text) < 64
    more = Policy(profile="worker", limits={"tasks": 200})
    assert stockade.run([PYTHON, "-c", THREADS], more).text == "80\n"
