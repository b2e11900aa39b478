"""The cgroups of a sandbox: limits that hold, counts that nobody evades, and nothing left.

Version 1 is tried for real, by root. Of version 2 this kernel has the groups
but not the controllers: killing and freezing are real, limits are pretend.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from stockade.backends.selection import select as select_backend
from stockade.errors import SetupError
from stockade.host import Host, host
from stockade.linux import cgroups
from stockade.linux.cgroupfs import Cgroup
from stockade.linux.cgroups import CgroupParent, CgroupParents
from stockade.policy import Policy
from stockade.runs.cgroup import GroupLimits, SandboxCgroups, hierarchies, planned_paths, remove
from support.means import applies, need
from support.pretend_cgroups import Tree

PYTHON = "/usr/bin/python3"
UNIFIED = "/sys/fs/cgroup/unified"
FORKING = "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n"
FILL = "\nfor _ in range(200): os.write(file, bytes(1 << 20))"
BOMBS = {
    "heap": "x = bytearray(200 << 20)",
    "memfd": f"import os; file = os.memfd_create('x'){FILL}",
    "tmpfs": f"import os; file = os.open('/dev/shm', os.O_TMPFILE | os.O_RDWR){FILL}",
    "shared": "import mmap; m = mmap.mmap(-1, 200 << 20)\nfor i in range(0, 200 << 20, 4096): m[i] = 1",
}
BUSY = "while True: pass"
#: As the gate does: in version 1 through a file, in version 2 it would be born in the directory.
ENTER = """
import os, sys
for door in map(int, sys.argv[1:]):
    if os.path.isdir(f"/proc/self/fd/{door}"):
        door = os.open("cgroup.procs", os.O_WRONLY, dir_fd=door)
    os.write(door, b"0")
    os.close(door)
print("inside", flush=True)
"""


@pytest.fixture
def here() -> CgroupParents:
    """Where root makes groups on this machine."""
    applies(os.geteuid() == 0, "for root only")
    need(all(host().has(f"cgroup.{name}") for name in ("memory", "pids", "cpu")), "cgroups do not work here")
    return cgroups.places()


@contextlib.contextmanager
def grouped(limits: GroupLimits, places: CgroupParents, *, living: bool = False) -> Iterator[SandboxCgroups]:
    group = SandboxCgroups(uuid4().hex, limits, places, living=living)
    try:
        yield group
    finally:
        remove(group.paths)
        group.close()
        assert group.paths == ()


@contextlib.contextmanager
def waiting(script: str, *groups: SandboxCgroups, program: bool = False) -> Iterator[subprocess.Popen[bytes]]:
    """A program that enters the groups by itself, and does nothing more until its input has a line."""
    doors = [door for group in groups for _, door in group.entrances()]
    if program:
        doors += [door for group in groups if (door := group.program_entrance()) is not None]
    begin = [PYTHON, "-c", f"{ENTER}sys.stdin.readline()\n{script}", *map(str, doors)]
    process = subprocess.Popen(begin, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=doors)
    for door in doors:
        os.close(door)
    with process:
        try:
            assert process.stdout is not None and process.stdout.readline() == b"inside\n"
            yield process
        finally:
            process.kill()


def go(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.write(b"\n")
    process.stdin.flush()


def within(group: SandboxCgroups) -> list[int]:
    """Everything in the group, wherever in it."""
    found = []
    for path in group.paths:
        for directory, _, _ in os.walk(path):
            found += [int(pid) for pid in Path(directory, "cgroup.procs").read_text().split()]
    return found


def test_a_group_is_made_only_where_a_limit_needs_it(here: CgroupParents) -> None:
    with grouped(GroupLimits(tasks=4), here) as group:
        (path,) = group.paths
        assert planned_paths(path.rpartition("-")[2], hierarchies(group.limits, here)) == group.paths
        assert path.startswith(f"{here.found['pids'].directory}/stockade-run-")
        assert group.peak_memory() is None and group.oom_descriptor() is None and group.cpu_times() is None
        assert group.oom_kills() == 0
    with grouped(GroupLimits(memory=1 << 24, tasks=4, cpu=1, cpu_time=True), here) as group:
        assert len(group.paths) == len({here.found[name] for name in ("memory", "pids", "cpu", "cpuacct")})
    with grouped(GroupLimits(), here) as group:
        assert group.paths == ()


@pytest.mark.parametrize("kind", BOMBS)
def test_a_memory_bomb_is_ended_and_counted(here: CgroupParents, kind: str) -> None:
    with (
        grouped(GroupLimits(memory=32 << 20), here) as group,
        waiting(BOMBS[kind], group) as bomb,
        waiting(BOMBS[kind]) as control,
    ):
        descriptor = group.oom_descriptor()
        assert descriptor is not None and descriptor == group.oom_descriptor()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        assert poll.poll(0) == [] and group.oom_kills() == 0
        go(bomb)
        assert poll.poll(10_000)
        assert bomb.wait(10) == -signal.SIGKILL
        assert group.oom_kills() == 1
        peak = group.peak_memory()
        assert peak is not None and 16 << 20 < peak <= 32 << 20
        go(control)
        assert control.wait(10) == 0


def test_neither_swap_nor_what_is_counted_apart_extends_memory(here: CgroupParents) -> None:
    with grouped(GroupLimits(memory=(32 << 20) + 5), here) as group:
        for part in ("", "memsw.", "kmem.tcp."):
            name = f"memory.{part}limit_in_bytes"
            file = Path(group.paths[0], name)
            assert not file.exists() or int(file.read_text()) == 32 << 20


def test_a_fork_bomb_gets_as_many_tasks_as_it_was_given_and_is_killed_as_a_whole(here: CgroupParents) -> None:
    with (
        grouped(GroupLimits(tasks=20), here) as group,
        waiting("", group) as gate,
        waiting(FORKING, group) as bomb,
    ):
        go(bomb)
        end = time.monotonic() + 10
        while not group.task_refusals() and time.monotonic() < end:
            time.sleep(0.01)
        assert group.task_refusals()
        assert len(within(group)) <= 21
        assert group.peak_tasks() in (20, None)
        remove(group.paths)
        assert not any(map(os.path.exists, group.paths))
        assert bomb.wait(10) == gate.wait(10) == -signal.SIGKILL


def test_a_fork_bomb_is_killed_also_where_tasks_are_not_counted(here: CgroupParents) -> None:
    bounded = f"import resource as r\nr.setrlimit(r.RLIMIT_AS, (1 << 26, 1 << 26))\n{FORKING}"
    with grouped(GroupLimits(memory=64 << 20), here) as group, waiting(bounded, group) as bomb:
        go(bomb)
        end = time.monotonic() + 10
        while len(within(group)) < 20 and time.monotonic() < end:
            time.sleep(0.001)
        remove(group.paths)
        assert not any(map(os.path.exists, group.paths))
        assert bomb.wait(10) == -signal.SIGKILL


def test_in_a_living_sandbox_the_gate_can_start_more_while_a_bomb_holds_every_task(
    here: CgroupParents,
) -> None:
    forks = "import os\nif not os.fork(): os._exit(0)\nos.wait(); print('could', flush=True); input()"
    limits = GroupLimits(tasks=5)
    with (
        grouped(limits, here, living=True) as group,
        waiting(forks, group) as gate,
        waiting(FORKING, group, program=True) as bomb,
        waiting("", group, program=True) as another,
    ):
        go(bomb)
        end = time.monotonic() + 10
        while not group.task_refusals() and time.monotonic() < end:
            time.sleep(0.01)
        assert group.peak_tasks() in (5, None)
        go(gate)
        assert gate.stdout is not None and gate.stdout.readline() == b"could\n"
        remove(group.paths)
        assert not any(map(os.path.exists, group.paths))
        assert bomb.wait(10) == another.wait(10) == gate.wait(10) == -signal.SIGKILL


def test_a_busy_program_gets_no_more_than_its_share_of_the_cores(here: CgroupParents) -> None:
    with grouped(GroupLimits(cpu=0.2, cpu_time=True), here) as group, waiting(BUSY, group) as busy:
        go(busy)
        began, used = time.monotonic(), group.cpu_used()
        time.sleep(1.5)
        share = (group.cpu_used() - used) / (time.monotonic() - began)
        assert 0.02 < share < 0.4


def test_processor_time_is_counted_also_of_those_that_nobody_waits_for(here: CgroupParents) -> None:
    spend = "import os, time\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    spend += "while time.process_time() < 0.4: pass\n"
    with grouped(GroupLimits(cpu_time=True), here) as group, waiting(spend, group) as process:
        go(process)
        assert process.wait(10) == 0
        end = time.monotonic() + 10
        while within(group) and time.monotonic() < end:
            time.sleep(0.01)
        used, times = group.cpu_used(), group.cpu_times()
        assert 0.4 <= used < 3
        assert times is not None and sum(times) == pytest.approx(used, rel=0.3)


def test_a_group_that_does_not_count_says_so(here: CgroupParents) -> None:
    with grouped(GroupLimits(tasks=1), here) as group, pytest.raises(ValueError, match="does not count"):
        group.cpu_used()


def test_a_process_enters_by_itself_and_is_seen_there(here: CgroupParents) -> None:
    with grouped(GroupLimits(memory=64 << 20, tasks=8, cpu=1, cpu_time=True), here) as group:
        assert group.program_entrance() is None
        with waiting("", group) as process:
            group.confirm(process.pid)


def test_a_process_that_is_elsewhere_is_not_taken_for_one_inside(here: CgroupParents) -> None:
    with (
        grouped(GroupLimits(memory=64 << 20, tasks=8), here) as group,
        grouped(GroupLimits(tasks=8), here) as other,
        waiting("") as outside,
        waiting("", group, other) as elsewhere,
    ):
        for process in (outside, elsewhere):
            with pytest.raises(SetupError, match=f"process {process.pid}\\) is not in") as caught:
                group.confirm(process.pid)
            assert caught.value.stage == "cgroup"


def test_a_process_that_is_gone_is_not_taken_for_one_inside(here: CgroupParents) -> None:
    with grouped(GroupLimits(tasks=8), here) as group:
        with waiting("", group) as process:
            group.confirm(process.pid)
        with pytest.raises(SetupError) as caught:
            group.confirm(process.pid)
        assert (caught.value.stage, caught.value.errno) == ("cgroup", errno.ENOENT)


def test_a_limit_that_the_kernel_refuses_leaves_no_group(here: CgroupParents) -> None:
    name = uuid4().hex
    with pytest.raises(SetupError, match="nothing was run") as caught:
        SandboxCgroups(name, GroupLimits(memory=1 << 24, tasks=4, cpu=1e-9), here)
    assert (caught.value.stage, caught.value.errno) == ("cgroup", errno.EINVAL)
    assert not any(os.path.exists(f"{place.directory}/stockade-run-{name}") for place in here.found.values())


def test_a_limit_that_is_not_kept_is_refused(here: CgroupParents, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda *_: b"max\n")
    with pytest.raises(SetupError, match="the kernel set max instead of 5") as caught:
        SandboxCgroups(uuid4().hex, GroupLimits(tasks=4), here)
    assert caught.value.errno == errno.ERANGE


def test_without_a_place_nothing_is_made(here: CgroupParents) -> None:
    partly = CgroupParents(found={"pids": here.found["pids"]})
    with pytest.raises(SetupError, match="no cgroup with the cpu controller"):
        SandboxCgroups(uuid4().hex, GroupLimits(tasks=4, cpu=1), partly)


def test_a_group_of_that_name_is_not_taken_over(here: CgroupParents) -> None:
    name = uuid4().hex
    first = SandboxCgroups(name, GroupLimits(tasks=4), here)
    with pytest.raises(SetupError) as caught:
        SandboxCgroups(name, GroupLimits(tasks=4), here)
    assert caught.value.errno == errno.EEXIST
    assert os.path.isdir(first.paths[0])
    first.close()
    first.close()
    for bad in ("", "a/b", "../x"):
        with pytest.raises(ValueError, match="not a name"):
            SandboxCgroups(bad, GroupLimits(tasks=4), here)


def test_what_does_not_end_stays_among_the_paths(
    here: CgroupParents, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stockade.linux.cgroupfs.PATIENCE", 0.05)
    group = SandboxCgroups(uuid4().hex, GroupLimits(tasks=4), here)
    with waiting("", group) as process:
        group.close()
        assert len(group.paths) == 1
        remove(group.paths)
        assert process.wait(10) == -signal.SIGKILL
    group.close()
    assert group.paths == ()


@pytest.mark.parametrize("living", [False, True])
def test_what_a_killed_supervisor_left_is_removed_with_whatever_runs_in_it(
    here: CgroupParents, living: bool
) -> None:
    group = SandboxCgroups(uuid4().hex, GroupLimits(memory=1 << 26, tasks=8), here, living=living)
    with waiting("", group) as gate, waiting(FORKING, group, program=True) as bomb:
        go(bomb)
        time.sleep(0.1)
        remove(group.paths)
        assert not any(map(os.path.exists, group.paths))
        remove(group.paths)
        assert bomb.wait(10) == gate.wait(10) == -signal.SIGKILL
    group.close()


def test_a_group_within_another_counts_against_its_limits_and_goes_with_it(here: CgroupParents) -> None:
    outer = SandboxCgroups(uuid4().hex, GroupLimits(memory=1 << 26, tasks=6), here, living=True)
    inner = SandboxCgroups(uuid4().hex, GroupLimits(memory=1 << 26, tasks=6), outer.parents(), living=True)
    assert all(any(path.startswith(f"{above}/") for above in outer.paths) for path in inner.paths)
    with waiting("", outer) as gate, waiting(FORKING, inner, program=True) as bomb:
        go(bomb)
        time.sleep(0.1)
        assert len(set(within(outer))) <= 6 + 4
        remove(outer.paths)
        assert not any(map(os.path.exists, (*outer.paths, *inner.paths)))
        assert bomb.wait(10) == gate.wait(10) == -signal.SIGKILL
    inner.close()
    outer.close()


def test_nothing_that_is_not_a_group_of_ours_is_removed(here: CgroupParents, tmp_path: Path) -> None:
    place = here.found["pids"].directory
    other = f"{place}/other-{uuid4().hex}"
    delegated = f"{place}/stockade-{60000 + os.getpid() % 5000}"
    for path in (other, delegated):
        os.mkdir(path)
    plain = tmp_path / "stockade-run-x"
    plain.mkdir()
    (plain / "file").touch()
    link = tmp_path / "stockade-run-link"
    link.symlink_to(other)
    try:
        around = f"{place}/stockade-run-x/../{os.path.basename(other)}"
        remove([other, delegated, around, str(plain), str(link)])
        assert os.path.isdir(other) and os.path.isdir(delegated) and (plain / "file").exists()
    finally:
        for path in (other, delegated):
            os.rmdir(path)


def test_a_group_takes_of_a_policys_limits_those_that_it_is_to_enforce() -> None:
    policy = Policy(limits={"memory": "64M", "tasks": 9, "cpu": 1.5, "cpu_time": "2s"})
    chosen = select_backend(policy, Host.pretend())
    assert GroupLimits.of(policy.limits, chosen.by_cgroup) == GroupLimits(
        memory=64 << 20, cpu=1.5, cpu_time=True
    )
    root = select_backend(policy, Host.pretend(without=("nproc",), uid=0))
    assert GroupLimits.of(policy.limits, root.by_cgroup).controllers == ("memory", "pids", "cpu", "cpuacct")
    assert GroupLimits.of(policy.limits, ()).controllers == ()


@pytest.fixture
def unified() -> CgroupParents:
    """The real version 2 hierarchy, whose groups have no controllers here."""
    applies(os.geteuid() == 0, "for root only")
    need(os.path.exists(f"{UNIFIED}/cgroup.procs"), "version 2 is not mounted beside version 1")
    return CgroupParents(found={"cpuacct": CgroupParent(UNIFIED, 2)})


@pytest.mark.parametrize("kill", [True, False], ids=["kill", "before 5.14"])
def test_version_2_is_entered_counted_and_killed_as_one(
    unified: CgroupParents, kill: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = Cgroup.has
    monkeypatch.setattr(Cgroup, "has", lambda self, name: (kill or name != "cgroup.kill") and has(self, name))
    forking = "import os\nfor _ in range(6): os.fork()\nwhile True: pass"
    with grouped(GroupLimits(cpu_time=True), unified) as group, waiting(forking, group) as many:
        ((version, door),) = group.entrances()
        assert version == 2 and os.path.samestat(os.fstat(door), os.stat(group.paths[0]))
        os.close(door)
        go(many)
        end = time.monotonic() + 10
        while len(within(group)) < 64 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(within(group)) == 64
        assert group.cpu_used() > 0 and group.cpu_times() is not None
        remove(group.paths)
        assert not any(map(os.path.exists, group.paths))
        assert many.wait(10) == -signal.SIGKILL


ALL = GroupLimits(memory=64 << 20, tasks=9, cpu=1.5, cpu_time=True)


@pytest.fixture
def pretend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    tree = Tree(tmp_path, monkeypatch, "cpu memory pids", "/")
    tree.write(str(tree.root / "cgroup.subtree_control"), "+cpu +memory +pids")
    return tree


def test_pretend_version_2_has_one_group_for_every_limit(pretend: Tree) -> None:
    with grouped(ALL, cgroups.places(proc=str(pretend.proc))) as group:
        (path,) = map(Path, group.paths)
        found = {name: (path / name).read_text().strip() for name in ("memory.max", "memory.swap.max")}
        assert found == {"memory.max": str(64 << 20), "memory.swap.max": "0"}
        assert (path / "cpu.max").read_text().strip() == "150000 100000"
        assert (path / "pids.max").read_text().strip() == "10"
        ((version, door),) = group.entrances()
        assert version == 2 and os.readlink(f"/proc/self/fd/{door}") == str(path)
        os.close(door)
        pretend.enter(4711, path)
        group.confirm(4711)
        assert (group.oom_kills(), group.task_refusals(), group.peak_tasks()) == (3, 7, 4)
        assert (group.cpu_used(), group.cpu_times(), group.peak_memory()) == (1.5, (1.0, 0.5), 4096)
        descriptor = group.oom_descriptor()
        assert descriptor is not None
        assert os.readlink(f"/proc/self/fd/{descriptor}") == str(path / "memory.events")
        pretend.enter(4711, pretend.root)


def test_pretend_version_2_does_not_throttle_what_is_killed(pretend: Tree) -> None:
    with grouped(GroupLimits(cpu=1.5), cgroups.places(proc=str(pretend.proc))) as group:
        file = Path(group.paths[0]) / "cpu.max"
        assert file.read_text().strip() == "150000 100000"
        group.lift_cpu()
        assert file.read_text().startswith("max 100000")


def test_pretend_version_2_counts_for_each_run(pretend: Tree) -> None:
    with grouped(ALL, cgroups.places(proc=str(pretend.proc))) as group:
        (path,) = map(Path, group.paths)
        first = group.baseline()
        assert (first.oom_kills, first.task_refusals) == (3, 7)
        (path / "memory.peak").write_text("8192\n")
        assert (group.peak_memory(first), group.peak_tasks(first)) == (8192, None)
        # What is reset for a second run is remembered for the first.
        second = group.baseline()
        (path / "memory.peak").write_text("6000\n")
        (path / "pids.peak").write_text("9\n")
        assert (group.peak_memory(first), group.peak_memory(second)) == (8192, 6000)
        assert group.peak_tasks(first) == group.peak_tasks(second) == 8


def test_pretend_version_2_keeps_gate_and_programs_in_leaves(pretend: Tree) -> None:
    with grouped(ALL, cgroups.places(proc=str(pretend.proc)), living=True) as group:
        (path,) = map(Path, group.paths)
        ((version, door),) = group.entrances()
        entrance = group.program_entrance()
        assert version == 2 and os.readlink(f"/proc/self/fd/{door}") == str(path / "gate")
        assert entrance is not None
        assert os.readlink(f"/proc/self/fd/{entrance}") == str(path / "programs/cgroup.procs")
        os.close(door)
        os.close(entrance)
        pretend.enter(4711, path / "gate")
        group.confirm(4711)
        assert (path / "programs/pids.max").read_text().strip() == "9"
        assert (path / "pids.max").read_text() == "" and (path / "gate/pids.max").read_text() == ""
        assert (path / "memory.max").read_text().strip() == str(64 << 20)
        pretend.enter(4711, pretend.root)


def test_pretend_version_2_lets_groups_within_have_limits_of_their_own(pretend: Tree) -> None:
    with grouped(ALL, cgroups.places(proc=str(pretend.proc)), living=True) as outer:
        with grouped(ALL, outer.parents(), living=True) as inner:
            (above,), (path,) = map(Path, outer.paths), map(Path, inner.paths)
            assert path.parent == above
            assert (above / "pids.max").read_text().strip() == str(9 * 16)
            assert (path / "memory.max").read_text().strip() == str(64 << 20)
            assert (path / "programs/pids.max").read_text().strip() == "9"
        assert outer.parents() == outer.parents()
