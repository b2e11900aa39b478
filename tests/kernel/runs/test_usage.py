"""What a run used, and who counted it."""

from __future__ import annotations

from subprocess import PIPE

import stockade
from stockade import Policy, Sandbox
from stockade.host import host
from support.means import applies

PYTHON = "/usr/bin/python3"
MEBIBYTE = 1 << 20
SPIN = "import time\nwhile time.process_time() < 0.4: pass"
FILL = "x = bytearray(64 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
#: Three children, all there at once, that nobody waits for.
ORPHANS = (
    "import os, time\n"
    "done, tell = os.pipe()\n"
    "for _ in range(3):\n"
    "  if not os.fork():\n"
    "    x = bytearray(30 << 20)\n"
    "    while time.process_time() < 0.2: pass\n"
    "    os.write(tell, b'.'); time.sleep(60); os._exit(0)\n"
    "for _ in range(3): os.read(done, 1)\n"
)
#: More tasks than there may be.
REFUSED = "import os, time\nfor _ in range(80):\n  if not os.fork():\n    time.sleep(60); os._exit(0)\n"


def need_cgroups() -> None:
    names = ("cgroup.memory", "cgroup.pids", "cgroup.cpuacct")
    applies(all(host().has(name) for name in names), "no cgroups for this user")


def test_time_is_counted() -> None:
    usage = stockade.run([PYTHON, "-c", SPIN]).check().usage
    assert 0.4 <= usage.cpu_user + usage.cpu_system == usage.cpu < 5
    assert usage.wall >= 0.3
    idle = stockade.run(["sleep", "0.4"]).check().usage
    assert 0.4 <= idle.wall < 5 and idle.cpu < 0.3


def test_the_time_in_the_kernel_is_told_apart() -> None:
    usage = stockade.run(["head", "-c", "300M", "/dev/zero"], on_stdout=lambda _: None).usage
    assert usage.cpu_system > 0


def test_the_peak_of_memory_is_that_of_the_largest_process() -> None:
    usage = stockade.run([PYTHON, "-c", FILL]).check().usage
    assert 64 * MEBIBYTE < usage.peak_memory < 200 * MEBIBYTE
    assert usage.source["memory"] == "rusage"


def test_context_switches_are_counted() -> None:
    few = stockade.run(["true"]).usage.context_switches
    script = "import time\nfor _ in range(200): time.sleep(0.001)"
    many = stockade.run([PYTHON, "-c", script]).usage.context_switches
    assert many >= 200 > few


def test_without_a_cgroup_it_says_that_the_kernel_counted_what_was_waited_for() -> None:
    usage = stockade.run(["true"]).usage
    assert (usage.source["cpu"], usage.source["memory"]) == ("rusage", "rusage")
    assert (usage.peak_tasks is None) is ("tasks" not in usage.source)


def test_a_cgroup_counts_everybody() -> None:
    need_cgroups()
    policy = Policy(limits={"memory": "512M", "cpu_time": "60s", "tasks": 20})
    usage = stockade.run([PYTHON, "-c", ORPHANS], policy).check().usage
    assert usage.source == {"cpu": "cgroup", "memory": "cgroup", "tasks": "cgroup"}
    assert usage.cpu >= 0.6
    assert 90 * MEBIBYTE < usage.peak_memory < 512 * MEBIBYTE
    assert usage.peak_tasks in (4, None)


def test_by_default_root_learns_how_many_tasks_there_were() -> None:
    need_cgroups()
    assert stockade.run([PYTHON, "-c", ORPHANS]).usage.peak_tasks in (4, None)
    assert stockade.run(["true"]).usage.peak_tasks in (1, None)


def test_in_a_living_sandbox_each_run_has_its_own_time() -> None:
    with Sandbox() as box:
        assert box.run([PYTHON, "-c", SPIN]).usage.cpu >= 0.4
        assert box.run(["true"]).usage.cpu < 0.3


def test_in_a_living_sandbox_with_cgroups_each_run_has_its_own_time_and_its_own_peaks() -> None:
    need_cgroups()
    with Sandbox(Policy(limits={"memory": "512M", "cpu_time": "60s", "tasks": 50})) as box:
        first = box.run([PYTHON, "-c", FILL + "\n" + SPIN]).usage
        second = box.run(["true"]).usage
        wider = box.run(["sh", "-c", "sleep 0.1 & sleep 0.1 & sleep 0.1 & wait"]).usage
        refused = box.run([PYTHON, "-c", REFUSED])
        later = box.run(["false"])
    assert first.cpu >= 0.4 and second.cpu < 0.3
    assert second.source["cpu"] == "rusage"
    assert first.peak_memory >= 64 * MEBIBYTE and first.source["memory"] == "cgroup"
    assert second.peak_memory < 48 * MEBIBYTE
    # The kernel does not forget the most tasks: of a run with fewer they are not known.
    assert second.peak_tasks is None and "tasks" not in second.source
    if first.peak_tasks is not None:
        assert (first.peak_tasks, wider.peak_tasks) == (1, 4)
    assert "more were refused" in refused.hint and "more were refused" not in later.hint


def test_runs_at_the_same_time_have_the_peak_of_the_sandbox_while_they_lasted() -> None:
    need_cgroups()
    with (
        Sandbox(Policy(limits={"memory": "512M"})) as box,
        box.start([PYTHON, "-c", FILL + "\nprint(1, flush=True); input()"], stdin=PIPE) as large,
    ):
        assert large.stdout is not None and large.stdin is not None and large.stdout.readline()
        with box.start(["cat"], stdin=PIPE) as beside:
            assert box.run(["true"]).usage.peak_memory >= 64 * MEBIBYTE
            large.stdin.write(b"\n")
            assert large.wait(20).usage.peak_memory >= 64 * MEBIBYTE
            small = box.run(["true"]).usage
            assert beside.stdin is not None
            beside.stdin.close()
            assert beside.wait(20).usage.peak_memory >= 64 * MEBIBYTE
    assert small.peak_memory < 48 * MEBIBYTE


def test_a_run_that_was_ended_has_used_something_too() -> None:
    usage = stockade.run([PYTHON, "-c", "while True: pass"], timeout=0.6, grace=0).usage
    assert usage.wall >= 0.6 and usage.cpu > 0.02


def test_what_did_not_start_has_used_no_processor_time() -> None:
    usage = stockade.run(["no-such-command"]).usage
    assert usage.wall > 0 and usage.cpu_user == usage.cpu_system == 0
