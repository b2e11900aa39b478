"""Faults that are done: deaths, full disks, nothing left to use, jumping clocks, a stopped supervisor."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade.linux import cgroups
from support import leaks
from support.means import applies, need_program
from support.paths import ROOT

IS_ROOT = os.geteuid() == 0
ROUNDS = """
import json, os, sys
from pathlib import Path
from stockade.bench import faults
from stockade.runs.register import register
if "unswept" in sys.argv:
    sweep, register.sweep, faults.SETTLED = register.sweep, lambda home: [], 0.5
home = Path(os.environ["STOCKADE_HOME"])
found = faults.rounds(int(sys.argv[1]), home, Path(sys.argv[2]), seed=int(sys.argv[3]))
if "unswept" in sys.argv:
    sweep(str(home))
print(json.dumps([[one.work, one.victim, one.after is not None, one.wrong] for one in found]))
"""


def rounds(count: int, workspace: Path, seed: int, *more: str) -> list[Any]:
    command = [sys.executable, "-c", ROUNDS, str(count), str(workspace), str(seed), *more]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


class TestDeaths:
    """The whole of it, three hundred rounds, is `stockade bench soak`."""

    @pytest.mark.timeout(300)
    def test_after_a_death_at_any_moment_nothing_is_left_and_the_next_run_works(
        self, workspace: Path
    ) -> None:
        found = rounds(30, workspace, 2024)
        assert [one for one in found if one[3]] == []
        assert sum(killed for _, _, killed, _ in found) > 5  # some of the moments come too late
        assert {victim for _, victim, _, _ in found} == {
            "supervisor",
            "resident",
            "gate",
            "keeper",
            "program",
        }

    def test_what_a_death_leaves_would_be_seen(self, workspace: Path) -> None:
        """The control: no one sweeps after the first round, in which the supervisor dies.

        One that dies before it has a sandbox leaves nothing, so several are tried.
        """
        for seed in range(3, 13):
            ((_, victim, _, wrong),) = rounds(1, workspace, seed, "unswept")
            assert victim == "supervisor"
            if any(one.startswith("run/") for one in wrong):
                return
        pytest.fail("ten supervisors died and none left anything")


def short(what: str, how: str, cold: bool, workspace: Path, around: tuple[str, ...] = ()) -> dict[str, Any]:
    """What became of a supervising process that was short of something."""
    command = [sys.executable, str(ROOT / "tests/support/scarce.py"), what, how]
    command += ["cold" if cold else "warm", str(workspace)]
    done = subprocess.run([*around, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["wrong"] == []
    return found


@pytest.mark.usefixtures("swept")
class TestNothingLeftToUse:
    @pytest.mark.parametrize("cold", [False, True], ids=["warm", "cold"])
    @pytest.mark.parametrize("what", ["once", "living", "terminal", "async", "spawned"])
    def test_descriptors(self, what: str, cold: bool, workspace: Path, stockade_home: Path) -> None:
        """From none that is free up to enough: every failure is a refusal, and leaks none."""
        found = short(what, "descriptors", cold, workspace)
        assert len(found["refused"]) == found["enough"] > 5
        assert "Too many open files" in found["refused"][-1][1]

    def test_address_space(self, workspace: Path) -> None:
        assert short("once", "memory", True, workspace)["refused"]

    def test_file_size(self, workspace: Path, stockade_home: Path) -> None:
        found = short("once", "file size", False, workspace)
        assert len(found["refused"]) == found["enough"] == 5  # the last for want of a receipt
        assert os.listdir(stockade_home / "workspaces") == []

    def test_tasks_of_the_user(self, workspace: Path) -> None:
        applies(not IS_ROOT, "the kernel does not count root's tasks")
        assert short("once", "tasks", True, workspace)["refused"]

    def test_tasks_of_a_cgroup_around_the_supervisor(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        applies(IS_ROOT, "for root only: it makes a cgroup")
        with confined() as directory:
            monkeypatch.setenv("SCARCE_CGROUP", str(directory))
            enter = ("sh", "-c", f'echo 0 > {directory}/cgroup.procs && exec "$@"', "sh")
            found = short("living", "cgroup", True, workspace, enter)
        assert found["refused"] and found["enough"] >= 2


@contextlib.contextmanager
def confined() -> Iterator[Path]:
    """A cgroup with a limit of tasks around a supervisor."""
    place = cgroups.places().at("pids")
    applies(place is not None and place.version == 1, "there is no pids cgroup of version 1")
    assert place is not None
    directory = Path(place.directory, f"stockade-test-{os.getpid()}")
    directory.mkdir()
    try:
        yield directory
    finally:
        assert leaks.settled(lambda: (directory / "cgroup.procs").read_text().split(), 5) == []
        directory.rmdir()


FULL = """
import json, os, sys
import stockade
from stockade import Policy
home, workspace, step = os.environ["STOCKADE_HOME"], sys.argv[1], int(sys.argv[2])

def ballast():
    \"\"\"All the room there is, but for a few pages.\"\"\"
    file = os.open(home + "/ballast", os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        while True:
            os.write(file, bytes(4096))
    except OSError:
        pass
    os.ftruncate(file, max(0, os.fstat(file).st_size - step * 4096))
    os.close(file)

def kept():
    return sorted(name for place in ("run", "workspaces", "output") if os.path.isdir(f"{home}/{place}")
                  for name in os.listdir(f"{home}/{place}") if not name.startswith(f"{os.getpid()}-"))

policy = Policy(workspace=workspace, limits={"output": 1000})
if sys.argv[3] == "known":
    stockade.run(["true"], policy)
found = {}
ballast()
try:
    result = stockade.run(["sh", "-c", "head -c 200000 /dev/zero; exit 3"], policy)
    (spilled,) = result.spilled
    found["result"] = [result.exit_code, len(result.stdout), result.truncated, spilled.size + spilled.lost]
    if spilled.path:
        assert os.stat(spilled.path).st_size == spilled.size
        os.unlink(spilled.path)
except (stockade.SetupError, stockade.ReceiptError) as error:
    found["refused"] = [str(error), error.hint]
    for spilled in getattr(getattr(error, "result", None), "spilled", ()):
        os.unlink(spilled.path)  # it has run, and only its receipt is missing
found["left"] = kept()
os.unlink(home + "/ballast")
found["after"] = stockade.run(["echo", "x"], policy).text
print(json.dumps(found))
"""


class TestFullDisk:
    @pytest.mark.parametrize("known", ["known", "new"])
    def test_a_full_state_directory_refuses_or_loses_only_what_is_too_much(
        self, known: str, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A file system of its own, of some pages, in a mount namespace that goes with the process."""
        applies(IS_ROOT, "for root only: it mounts a small file system")
        home = tmp_path / "small"
        home.mkdir(mode=0o700)
        monkeypatch.setenv("STOCKADE_HOME", str(home))
        mount = f'mount -t tmpfs -o size=512k,mode=700 none {home} && exec "$@"'
        refused = worked = 0
        for step in (0, 1, 2, 3, 4, 8, 12, 40):
            command = [sys.executable, "-c", FULL, str(workspace), str(step), known]
            around = [need_program("unshare"), "--mount", "sh", "-c", mount, "sh"]
            done = subprocess.run([*around, *command], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            found = json.loads(done.stdout)
            assert found["left"] == [] and found["after"] == "x\n", (step, found)
            if "refused" in found:
                refused += 1
                assert all(found["refused"]), found
            else:
                worked += 1
                assert found["result"] == [3, 1000, True, 199_000]
        assert refused and worked


#: Every clock of the wall's jumps by days at each look; the others go on as they are.
CLOCKS = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static long jump(void) { static long n; return (n = n * 1103515245 + 12345) % 10000000; }
int clock_gettime(clockid_t id, struct timespec *ts)
{
	int result = syscall(SYS_clock_gettime, id, ts);
	if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI)
		ts->tv_sec += jump();
	return result;
}
int gettimeofday(struct timeval *tv, void *zone)
{
	(void)zone;
	*tv = (struct timeval){jump(), 0};
	return 0;
}
time_t time(time_t *at) { time_t now = jump(); if (at) *at = now; return now; }
"""
JUMPING = """
import time, stockade
from stockade import Policy, Sandbox
first, second = time.time(), time.time()
assert abs(first - second) > 1000 or abs(second - time.time()) > 1000, "the clock does not jump"
began = time.monotonic()
print(stockade.run(["sleep", "60"], timeout=0.5, grace=0.2).outcome)
print(stockade.run(["sleep", "0.5"], timeout=20).outcome)
with Sandbox(Policy(limits={"wall": 0.5})) as box, box.start(["sleep", "60"]) as process:
    print(box.run(["sleep", "60"], grace=0.2).outcome, process.wait(10).outcome)
    try:
        with box.start(["sleep", "60"], timeout=30) as other:
            other.wait(0.3)
    except stockade.TimeoutError:
        print("waited")
assert 1.5 < time.monotonic() - began < 15
"""


def test_no_limit_depends_on_the_clock_on_the_wall(tmp_path: Path) -> None:
    source, library = tmp_path / "clocks.c", tmp_path / "clocks.so"
    source.write_text(CLOCKS)
    subprocess.run([need_program("gcc"), "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    environ = os.environ | {"LD_PRELOAD": str(library)}
    command = [sys.executable, "-c", JUMPING]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.stdout.split("\n")[:-1] == ["timed-out", "exited", "timed-out timed-out", "waited"], (
        done.stderr
    )
    # The gate is linked statically, so it is read instead.
    for file in (ROOT / "src/stockade/gate/src").glob("*.c"):
        words = file.read_text()
        assert "CLOCK_REALTIME" not in words and "gettimeofday" not in words and " time(" not in words


SUPERVISING = """
import json, sys
import stockade
from stockade import Policy, Sandbox
kind, place, timeout = sys.argv[1], sys.argv[2], int(sys.argv[3])
some = "head -c 30000 /dev/zero"
wait = "while ! test -e stopped; do sleep 0.05; done"
words = ["sh", "-c", f"cd {place}; {some}; touch begun; {wait}; {some}; touch printed; sleep 600"]
policy = Policy(write=[place])
print("ready", flush=True)
if kind == "living":
    with Sandbox(policy) as box:
        result = box.run(words, timeout=timeout, grace=0.2)
        after = box.run(["echo", "x"]).text
else:
    result = stockade.run(words, policy, timeout=timeout, grace=0.2)
    after = stockade.run(["echo", "x"]).text
print(json.dumps([result.outcome, len(result.stdout), after]))
"""


def _end_while_stopped(kind: str, place: Path, timeout: int) -> Any:
    """What a supervisor says of a run that had to end while it was stopped."""

    def programs() -> list[str]:
        return [str(p) for p in leaks.family() if p.nested and p.name in ("sh", "sleep", "head")]

    def begun() -> bool:
        return (place / "begun").exists() or process.poll() is not None

    command = [sys.executable, "-c", SUPERVISING, kind, str(place), str(timeout)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            assert leaks.settled(lambda: [] if begun() else ["nothing runs"], 60) == []
            process.send_signal(signal.SIGSTOP)
            (place / "stopped").touch()
            assert leaks.settled(programs, 60) == []
            process.send_signal(signal.SIGCONT)
            said = json.loads(process.stdout.readline())
            assert process.wait(60) == 0
            return said
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["once", "living"])
def test_a_run_ends_in_time_while_its_supervisor_is_stopped(kind: str, tmp_path: Path) -> None:
    """Nothing that was printed meanwhile is lost, as far as a pipe holds it."""
    for timeout in (2, 4, 8, 16, 32):
        place = tmp_path / str(timeout)
        place.mkdir()
        said = _end_while_stopped(kind, place, timeout)
        if (place / "printed").exists():  # otherwise the machine is busy, and its time was over before
            assert said == ["timed-out", 60_000, "x\n"]
            return
    pytest.fail("the program has not printed in any time")
