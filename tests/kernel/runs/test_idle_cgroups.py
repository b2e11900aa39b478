"""A cgroup that is used again: the next run is limited and counted as in a new one, or it gets a new one.

Version 1 is tried for real, by root; version 2 in a pretend tree, because its controllers are not here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Result, Sandbox
from stockade.host import host
from stockade.linux import cgroups
from stockade.linux.cgroupfs import Cgroup
from stockade.linux.cgroups import CgroupParent, CgroupParents
from stockade.runs import idle_cgroups
from stockade.runs.cgroup import GroupLimits, SandboxCgroups
from stockade.runs.register import register
from support.means import applies, clauses_for, need
from support.pretend_cgroups import Tree

PYTHON = "/usr/bin/python3"
NAME = ["/bin/cat", "/proc/self/cgroup"]
#: Reads its group's name, then has three children at once.
FORKING = (
    "import os, signal\n"
    "print(open('/proc/self/cgroup').read(), flush=True)\n"
    "pids = [os.fork() or signal.pause() for _ in range(3)]\n"
    "for pid in pids: os.kill(pid, 9)\n"
)
THREADED = (
    "import threading\n"
    "print(open('/proc/self/cgroup').read(), flush=True)\n"
    "thread = threading.Thread(target=print)\n"
    "thread.start(); thread.join()\n"
)
WAITING = (
    "import time\n"
    "print(open('/proc/self/cgroup').read())\n"
    "began = time.monotonic(); time.sleep(1); print(began, time.monotonic())\n"
)
#: As many processes at once as it may have.
BOMB = (
    "import os, signal\n"
    "pids = []\n"
    "try:\n"
    "  while len(pids) < 40: pids.append(os.fork() or signal.pause())\n"
    "except OSError: pass\n"
    "print(len(pids) + 1)\n"
    "for pid in pids: os.kill(pid, 9)\n"
)
SUPERVISOR = """
import os, sys, time
import stockade
from stockade.runs import idle_cgroups
from stockade.runs.register import register
for _ in range(3):
    stockade.run(["/bin/true"]).check()
((home, group),) = idle_cgroups._groups
print(group.path, register.living(home), flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def with_groups() -> None:
    need(host().has("cgroup.pids") or os.geteuid() != 0, "cgroups do not work here")


@pytest.fixture
def again() -> str:
    """The name of the group that the next run uses again."""
    applies(os.geteuid() == 0, "ordinary users have no cgroup by default")
    for _ in range(2):
        stockade.run(["/bin/true"]).check()
    (group,) = idle()
    return os.path.basename(group.path)


def idle() -> list[Cgroup]:
    return [group for _, group in idle_cgroups._groups]


def group_of(result: Result) -> str:
    """The name of the group in which a program was that printed /proc/self/cgroup."""
    lines = result.check().text.splitlines()
    (path,) = [line.split(":", 2)[2] for line in lines if ":pids:" in line]
    return path.rpartition("/")[2]


def counts(result: Result) -> tuple[object, ...]:
    """What a cgroup counted in a run."""
    usage = result.usage
    return usage.peak_tasks, usage.source.get("tasks"), result.hint, result.outcome


def at_once(count: int, command: list[str]) -> list[Result]:
    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(stockade.run, [command] * count))


def test_a_run_without_forks_leaves_its_group_to_the_next(again: str) -> None:
    runs = [stockade.run(NAME) for _ in range(3)]
    assert {group_of(result) for result in runs} == {again}
    assert {counts(result) for result in runs} == {(1, "cgroup", "", stockade.Outcome.EXITED)}
    assert [os.path.basename(group.path) for group in idle()] == [again]


@pytest.mark.parametrize("script", [FORKING, THREADED], ids=["processes", "a thread"])
def test_a_run_that_had_another_task_is_the_last_in_its_group(again: str, script: str) -> None:
    first = stockade.run([PYTHON, "-c", script])
    path = f"{cgroups.places().found['pids'].directory}/{again}"
    assert group_of(first) == again and first.usage.peak_tasks in (2, 4)
    assert not os.path.exists(path) and idle() == []
    second = stockade.run(NAME)
    assert group_of(second) != again and second.usage.peak_tasks == 1


def test_what_is_counted_and_refused_is_that_of_the_run(again: str) -> None:
    small = Policy(limits={"tasks": 6})
    bombs = [stockade.run([PYTHON, "-c", BOMB], small)]
    stockade.run(["/bin/true"]).check()
    bombs.append(stockade.run([PYTHON, "-c", BOMB], small))
    # The first in a group that was used before, the second in one that was not.
    assert counts(bombs[0]) == counts(bombs[1])
    assert [bomb.text for bomb in bombs] == ["6\n", "6\n"] and bombs[0].usage.peak_tasks == 6
    after = stockade.run(["/bin/false"])
    assert after.usage.peak_tasks == 1 and "refused" not in after.hint


@pytest.mark.parametrize("tasks", [3, 300])
def test_the_limit_is_that_of_the_run(again: str, tasks: int) -> None:
    with open(f"{cgroups.places().found['pids'].directory}/{again}/pids.max") as file:
        before = file.read()
    program = [PYTHON, "-c", BOMB]
    assert stockade.run(program, Policy(limits={"tasks": tasks})).check().text == f"{min(tasks, 41)}\n"
    assert before == "257\n"


def test_without_the_checks_a_run_would_be_charged_with_the_tasks_of_another(
    again: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_cgroups, "_had_one_program", lambda group: True)
    assert stockade.run([PYTHON, "-c", FORKING]).usage.peak_tasks == 4
    second = stockade.run(NAME)
    assert group_of(second) == again and second.usage.peak_tasks == 4


def test_a_group_that_has_a_task_is_not_used_again(again: str) -> None:
    (group,) = idle()
    with subprocess.Popen(["sleep", "100"]) as stranger:
        group.add(stranger.pid)
        other = stockade.run(NAME)
        stranger.kill()
    assert group_of(other) != again and other.usage.peak_tasks == 1
    assert sorted(os.path.basename(one.path) for one in idle()) == sorted([again, group_of(other)])


def test_a_group_that_somebody_removed_is_not_used_again(again: str) -> None:
    (group,) = idle()
    os.rmdir(group.path)
    assert group_of(stockade.run(NAME)) != again


@pytest.mark.parametrize("limits", [{"memory": "64M"}, {"cpu": 1}, {"cpu_time": "9s"}], ids=str)
def test_a_group_that_counts_more_than_tasks_is_not_used_again(again: str, limits: dict[str, object]) -> None:
    policy = Policy(limits=limits)
    names = {group_of(stockade.run(NAME, policy)) for _ in range(2)}
    assert len(names) == 2 and again not in names
    assert [os.path.basename(group.path) for group in idle()] == [again]


def test_a_living_sandbox_has_a_group_of_its_own(again: str) -> None:
    with Sandbox() as box:
        path = box.run(NAME).check().text
        assert again not in path
    assert again in stockade.run(NAME).check().text


@pytest.mark.parametrize("backend", ["native", "bwrap", "landlock"])
def test_every_run_has_the_fewest_tasks_with_each_backend(again: str, backend: str) -> None:
    policy = Policy(**clauses_for(backend))
    for command in ("/bin/true", "/bin/none"):
        idle_cgroups.shutdown()
        assert [stockade.run([command], policy).usage.peak_tasks for _ in range(2)] == [1, 1]


def test_runs_at_the_same_time_never_share_a_group(again: str) -> None:
    for _ in range(2):
        results = at_once(4, [PYTHON, "-c", WAITING])
        spans = [tuple(map(float, result.text.splitlines()[-1].split())) for result in results]
        assert max(began for began, _ in spans) < min(ended for _, ended in spans)
        assert len({group_of(result) for result in results}) == 4
        assert [result.usage.peak_tasks for result in results] == [1] * 4
        assert 1 <= len(idle()) <= 4


def test_at_most_a_few_groups_wait(monkeypatch: pytest.MonkeyPatch, again: str) -> None:
    monkeypatch.setattr(idle_cgroups, "MOST_IDLE", 1)
    names = {group_of(result) for result in at_once(3, [PYTHON, "-c", WAITING])}
    (group,) = idle()
    assert set(os.listdir(os.path.dirname(group.path))) & names == {os.path.basename(group.path)}
    assert list(idle_cgroups._entries) == [group.path]
    idle_cgroups.shutdown()
    assert not os.path.exists(group.path) and idle_cgroups._entries == {}


def test_a_group_is_used_again_only_under_the_same_state_directory(
    again: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("STOCKADE_HOME", str(tmp_path / "other"))
    assert group_of(stockade.run(NAME)) != again


def test_a_process_that_runs_one_sandbox_keeps_nothing_for_another() -> None:
    applies(os.geteuid() == 0, "ordinary users have no cgroup by default")
    script = "import stockade, sys\nstockade.run(['/bin/true']).check()\n"
    script += "print('stockade.runs.idle_cgroups' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", script]) == b"False\n"


@pytest.mark.parametrize("how", ["exits", "is killed"])
def test_what_waits_goes_with_its_supervisor(stockade_home: Path, how: str) -> None:
    applies(os.geteuid() == 0, "ordinary users have no cgroup by default")
    with subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as supervisor:
        assert supervisor.stdin is not None and supervisor.stdout is not None
        path, _, living = supervisor.stdout.readline().partition(" ")
        assert os.path.isdir(path)
        # It is no sandbox, for its own supervisor as for another process.
        assert living == "[]\n" and register.living(str(stockade_home)) == []
        register.sweep(str(stockade_home))
        assert os.path.isdir(path)
        if how == "is killed":
            supervisor.send_signal(signal.SIGKILL)
            supervisor.wait()
            assert os.path.isdir(path)
            assert register.sweep(str(stockade_home)) == []
        else:
            supervisor.stdin.close()
            assert supervisor.wait() == 0
    assert not os.path.exists(path)
    assert os.listdir(stockade_home / "run") == []


def test_purge_removes_what_waits_and_its_supervisor_makes_another(again: str, stockade_home: Path) -> None:
    (path,) = (group.path for group in idle())
    purge = [sys.executable, "-m", "stockade", "purge", "-q", "--yes"]
    assert os.path.isdir(path) and subprocess.run(purge, check=False).returncode == 0
    assert not os.path.exists(path) and not stockade_home.exists()
    assert group_of(stockade.run(NAME)) != again


def test_a_forked_child_has_groups_of_its_own_and_leaves_those_of_its_parent(again: str) -> None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.write(writer, f"{idle()} {' '.join(group_of(stockade.run(NAME)) for _ in range(2))}".encode())
            idle_cgroups.shutdown()
            register.shutdown()
        finally:
            os._exit(0)
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0
    words = os.read(reader, 4096).decode().split()
    os.close(reader)
    assert words[0] == "[]" and len(words) == 3 and again not in words
    assert group_of(stockade.run(NAME)) == again


class TestVersion2:
    """In a pretend tree."""

    @pytest.fixture
    def found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CgroupParents:
        tree = Tree(tmp_path, monkeypatch, "memory pids cpu", "/own")
        tree.write(str(tree.root / "cgroup.procs"), str(os.getpid()))
        tree.write(str(tree.root / "own/cgroup.subtree_control"), "+pids")
        place = CgroupParent(str(tree.root / "own"), 2)
        return CgroupParents(found={"pids": place}, proc=str(tree.proc))

    def used(self, found: CgroupParents, peak: str = "2\n", **files: str) -> SandboxCgroups:
        """The group of a sandbox that has ended."""
        group = SandboxCgroups("one", GroupLimits(tasks=3), found)
        given = {"pids.peak": peak, "pids.events": "max 0\n", "pids.current": "0\n"}
        for name, text in (given | {key.replace("_", "."): text for key, text in files.items()}).items():
            Path(group.paths[0], name).write_text(text)
        return group

    def test_the_processor_time_of_earlier_sandboxes_is_not_counted(
        self, found: CgroupParents, stockade_home: Path
    ) -> None:
        used = self.used(found)
        (path,) = used.paths
        assert used.cpu_times() == (1.0, 0.5) and used.cpu_used() == 1.5
        idle_cgroups.give_back(str(stockade_home), used)
        assert used.paths == () and used.cpu_times() is None and used.peak_tasks() is None
        group = idle_cgroups.take(str(stockade_home), found.found["pids"])
        assert group is not None
        again = SandboxCgroups("two", GroupLimits(tasks=5), found, idle=group)
        assert again.paths == (path,) and again.kept == {"pids.max": "6"}
        assert again.cpu_times() == (0, 0) and again.cpu_used() == 0
        Path(path, "cpu.stat").write_text("usage_usec 1750000\nuser_usec 1100000\nsystem_usec 650000\n")
        assert again.cpu_times() == pytest.approx((0.1, 0.15)) and again.cpu_used() == pytest.approx(0.25)
        assert again.peak_tasks() == 1 and again.task_refusals() == 0
        Path(path, "pids.peak").write_text("3\n")
        idle_cgroups.give_back(str(stockade_home), again)
        assert not os.path.exists(path) and again.paths == () and idle() == []

    @pytest.mark.parametrize("peak", ["3\n", ""])
    def test_a_peak_of_more_or_none_keeps_nothing(
        self, found: CgroupParents, stockade_home: Path, peak: str
    ) -> None:
        used = self.used(found, peak)
        (path,) = used.paths
        if not peak:
            os.unlink(f"{path}/pids.peak")
        idle_cgroups.give_back(str(stockade_home), used)
        assert not os.path.exists(path) and idle() == []

    @pytest.mark.parametrize(
        ("counter", "later"), [("current", "1\n"), ("peak", "3\n"), ("events", "max 1\n")]
    )
    def test_what_happens_while_it_waits_is_seen(
        self, found: CgroupParents, stockade_home: Path, counter: str, later: str
    ) -> None:
        used = self.used(found)
        (path,) = used.paths
        idle_cgroups.give_back(str(stockade_home), used)
        Path(path, f"pids.{counter}").write_text(later)
        assert idle_cgroups.take(str(stockade_home), found.found["pids"]) is None
        assert idle_cgroups.take(str(stockade_home), CgroupParent(os.path.dirname(path), 1)) is None
        Path(path, "pids.current").write_text("0\n")
        idle_cgroups.shutdown()
        assert not os.path.exists(path)

    def test_a_group_that_the_register_cannot_name_is_removed(
        self, found: CgroupParents, stockade_home: Path
    ) -> None:
        used = self.used(found)
        (path,) = used.paths
        stockade_home.write_text("not a directory")
        idle_cgroups.give_back(str(stockade_home), used)
        assert not os.path.exists(path) and idle() == []


#: Runs sandboxes in a function that the interpreter calls after Stockade's own have put everything away.
LAST_RUNS = """
import atexit

def run_more():
    for _ in range(3):
        print(stockade.run(NAME).stdout.decode(), flush=True)

atexit.register(run_more)
import stockade
NAME = ["/bin/cat", "/proc/self/cgroup"]
for _ in range(2):
    stockade.run(NAME)
"""


def test_runs_while_the_interpreter_exits_work_and_leave_no_group(stockade_home: Path) -> None:
    applies(os.geteuid() == 0, "ordinary users have no cgroup by default")
    done = subprocess.run([sys.executable, "-c", LAST_RUNS], capture_output=True, text=True, check=True)
    assert done.stderr == "" and done.stdout.count("pids:") >= 3
    names = {line.rpartition("/")[2] for line in done.stdout.splitlines() if "stockade-run" in line}
    left = [name for name in names if any(Path("/sys/fs/cgroup").glob(f"*/**/{name}"))]
    register.sweep(str(stockade_home))
    assert left == []
