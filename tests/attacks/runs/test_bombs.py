"""Bombs: a sandbox that takes all it can harms nobody else, and ends when it is to end."""

from __future__ import annotations

import resource
import subprocess
import time
from collections.abc import Iterator

import pytest

import stockade
from attacks import arena
from attacks.arena import outside
from stockade import Policy, Sandbox
from stockade.host import host
from support import leaks
from support.means import applies

MEMORY = 48 << 20
#: How much longer than alone a start may take while a bomb goes off next to it. Two bombs hold every core.
SLOWER = 100


def strays(name: str = "comet") -> list[str]:
    return [str(process) for process in leaks.family() if name in process.name and not process.zombie]


@pytest.fixture
def tasks() -> None:
    has = host().has("cgroup.pids") if arena.IS_ROOT else host().has("nproc")
    applies(has, "this user has no task limit on this host (root without cgroups)")


def comet(heads: int, life: int, **limits: object) -> tuple[list[str], Policy]:
    command, program = arena.command_of("comet.c", heads, life, "deaf")
    return command, Policy(read=program, limits={"tasks": 64, **limits})


@pytest.mark.usefixtures("tasks")
class TestForks:
    def test_the_host_stays_usable_beside_a_bomb(self) -> None:
        began = time.monotonic()
        stockade.run(["true"])
        alone = max(time.monotonic() - began, 0.01)
        bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass"
        with Sandbox(Policy(limits={"tasks": 64})) as box:
            process = box.start([arena.PYTHON, "-c", bomb])
            time.sleep(0.5)
            began = time.monotonic()
            assert stockade.run(["sh", "-c", "true & wait"], timeout=30).ok
            assert time.monotonic() - began < SLOWER * alone
            # And its own gate starts another command.
            assert box.run(["echo", "alive"], timeout=30).text == "alive\n"
            process.kill(0)
            assert process.wait(20).outcome == "cancelled"
            assert box.run(["sh", "-c", "echo /proc/[0-9]*"], timeout=30).text.count("/") <= 6

    @pytest.mark.parametrize(("heads", "life"), [(1, 0), (2, 100), (20, 300)])
    @pytest.mark.parametrize("living", [False, True])
    def test_nobody_forks_faster_than_a_run_is_ended(self, heads: int, life: int, living: bool) -> None:
        command, policy = comet(heads, life)
        began = time.monotonic()
        if living:
            with Sandbox(policy) as box:
                result = box.run(command, timeout=0.3, grace=0.1)
                assert leaks.settled(strays, 5) == []
                assert box.run(["echo", "alive"], timeout=10).text == "alive\n"
        else:
            result = stockade.run(command, policy, timeout=0.3, grace=0.1)
            assert strays() == []
        assert result.stdout == b"flying\n"
        assert result.outcome == "timed-out"
        assert time.monotonic() - began < 10

    @pytest.mark.parametrize(("heads", "life"), [(1, 0), (4, 100), (20, 300)])
    def test_nobody_forks_faster_than_processor_time_ends_it(self, heads: int, life: int) -> None:
        applies(host().has("cgroup.cpuacct"), "no cgroup counts processor time here")
        command, policy = comet(heads, life, cpu_time="300ms")
        with Sandbox(policy) as box:
            began = time.monotonic()
            result = box.run(command, timeout=30)
            assert (result.outcome, result.exit_code) == ("limit-exceeded", 137)
            assert time.monotonic() - began < 10
            assert leaks.settled(strays, 5) == []

    def test_outside_a_comet_goes_on_when_what_started_it_is_killed(self) -> None:
        """The control, in namespaces that are thrown away with it: its end does not end it."""
        command, _ = arena.command_of("comet.c", 1, 200_000)
        wrapped = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "sh", "-c"]
        script = '"$0" "$@" & sleep 0.3; kill -9 $!; exec sleep 60'
        with subprocess.Popen([*wrapped, script, *command], stdout=subprocess.DEVNULL) as process:
            try:
                time.sleep(0.8)
                assert leaks.settled(lambda: [] if strays() else ["no comet"], 5) == []
            finally:
                process.kill()
        assert leaks.settled(strays, 5) == []


@pytest.fixture
def bystander() -> Iterator[Sandbox]:
    """Another sandbox, which must live on."""
    with Sandbox(Policy()) as box:
        process = box.start(["sh", "-c", "while :; do sleep 0.1; done"])
        yield box
        assert process.poll() is None
        assert box.run(["echo", "alive"], timeout=10).text == "alive\n"
        process.kill(0)
        process.wait(10)
        process.close()


KINDS = ["heap", "tmp", "shm", "memfd", "sysv", "shared", "born"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("living", [False, True])
def test_a_memory_bomb_ends_its_own_sandbox_only(kind: str, living: bool, bystander: Sandbox) -> None:
    applies(host().has("cgroup.memory"), "this user has no memory cgroup here")
    command, _ = arena.command_of("memory", kind, 4 * MEMORY)
    policy = Policy(limits={"memory": MEMORY})
    if living:
        with Sandbox(policy) as box:
            result = box.run(command, timeout=60)
    else:
        result = stockade.run(command, policy, timeout=60)
    assert result.stdout == b"begun\n"
    assert (result.outcome, result.exit_code) == ("out-of-memory", 137), result
    assert result.usage.peak_memory <= MEMORY


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_without_a_limit_the_memory_is_had(kind: str) -> None:
    size = 4 * MEMORY
    verdict = outside("memory", kind, size, namespaces="user ipc mnt") if kind == "sysv" else None
    if verdict is None and kind in ("tmp", "shm"):
        verdict = arena.inside("memory", kind, size)
    if verdict is None:
        verdict = outside("memory", kind, size)
    assert verdict == {"got": size}


def test_the_second_command_pays_for_what_the_first_left_in_memory() -> None:
    """Whoever was born before or comes after, all of a sandbox share its limit."""
    applies(host().has("cgroup.memory"), "this user has no memory cgroup here")
    with Sandbox(Policy(limits={"memory": MEMORY})) as box:
        left, _ = arena.command_of("memory", "tmp", MEMORY // 2)
        assert box.run(left, timeout=30).ok
        more, _ = arena.command_of("memory", "heap", MEMORY // 2)
        result = box.run(more, timeout=30)
        assert result.outcome == "out-of-memory", result
    assert outside("memory", "heap", MEMORY // 2) == {"got": MEMORY // 2}


def test_the_buffers_of_connections_are_memory_too() -> None:
    """Else one sandbox could use up what the kernel has for the connections of the whole machine."""
    applies(host().has("cgroup.memory"), "this user has no memory cgroup here")
    result = arena.run("buffers", 20, limits={"memory": MEMORY // 2})
    # Version 1 counts them apart, and lets each connection have a little all the same.
    assert result.outcome == "out-of-memory" or arena.verdict_of(result.stdout)["got"] < MEMORY, result
    assert outside("buffers", 20)["got"] > MEMORY


SPINNING = {
    "forks": "import os\nfor _ in range(8):\n if not os.fork(): break\nwhile True: pass",
    "unwaited": "import os, signal, time\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
    "while True:\n if not os.fork():\n  end = time.process_time() + 0.05\n"
    "  while time.process_time() < end: pass\n  os._exit(0)\n time.sleep(0.02)",
    "daemon": "import os\nif os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    "while True: pass",
}


@pytest.mark.parametrize("kind", SPINNING)
def test_processor_time_is_counted_however_it_is_hidden(kind: str) -> None:
    applies(host().has("cgroup.cpuacct"), "no cgroup counts processor time here")
    policy = Policy(limits={"cpu_time": "500ms"})
    with Sandbox(policy) as box:
        began = time.monotonic()
        result = box.run([arena.PYTHON, "-c", SPINNING[kind]], timeout=30)
        if kind == "daemon":  # the run itself is over at once
            assert result.ok
            assert leaks.settled(lambda: strays("python3"), 10) == []
            result = box.run(["sleep", "20"], timeout=30)
        assert result.outcome == "limit-exceeded", result
        assert time.monotonic() - began < 15
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    code = "import time\nend = time.process_time() + 0.6\nwhile time.process_time() < end: pass"
    subprocess.run([arena.PYTHON, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime > 0.5
