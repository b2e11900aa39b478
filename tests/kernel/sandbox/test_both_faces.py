"""What holds for `Sandbox` and for `AsyncSandbox` alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, PolicyError, SetupError, UnsupportedError
from stockade.host import host
from support.faces import FACES, Face, opened
from support.marks import HIDES, gone, marked
from support.means import applies

PYTHON = "/usr/bin/python3"
Open = Callable[..., AbstractContextManager[Face]]


@pytest.fixture(params=FACES)
def face(request: pytest.FixtureRequest) -> Open:
    """Opens a sandbox of either kind."""
    return lambda **policy: opened(request.param, Policy(**policy))


class TestRun:
    @pytest.mark.parametrize("code", [0, 1, 125, 255])
    def test_the_exit_code_is_the_commands_own(self, face: Open, code: int) -> None:
        with face() as box:
            result = box.run(f"exit {code}")
        assert (result.outcome, result.exit_code, result.ok) == ("exited", code, code == 0)

    def test_input_environment_and_directory(self, face: Open) -> None:
        with face() as box:
            result = box.run("cat; echo $X; pwd", input=b"in ", env={"X": "1"}, cwd="/usr")
            assert result.stdout == b"in 1\n/usr\n"
            assert box.run("cat; echo $X").stdout == b"\n"

    def test_what_cannot_be_started(self, face: Open) -> None:
        with face() as box:
            assert box.run(["no-such-command"]).exit_code == 127
            assert box.run("true", cwd="/none").exit_code == 125
            for grace in (-1, 3601, float("nan")):
                with pytest.raises(PolicyError, match="grace"):
                    box.run("true", grace=grace)
            assert box.run("echo fine").text == "fine\n"

    def test_callbacks_get_everything_as_it_comes(self, face: Open) -> None:
        out: list[tuple[float, bytes]] = []
        err: list[bytes] = []
        with face() as box:
            result = box.run(
                "echo a; sleep 0.4; echo b; echo e >&2",
                on_stdout=lambda data: out.append((time.monotonic(), data)),
                on_stderr=err.append,
            )
        assert b"".join(data for _, data in out) == result.stdout == b"a\nb\n"
        assert b"".join(err) == result.stderr == b"e\n"
        assert out[-1][0] - out[0][0] > 0.2

    def test_a_callback_that_fails_ends_its_run_and_not_the_sandbox(self, face: Open) -> None:
        def fail(_: bytes) -> None:
            raise ZeroDivisionError

        with face() as box:
            with pytest.raises(ZeroDivisionError):
                box.run(f"{HIDES}; echo x; sleep 60", on_stdout=fail, grace=0.2)
            assert marked() == []
            assert box.run("echo on").text == "on\n"

    def test_several_at_once(self, face: Open) -> None:
        with face() as box:
            began = time.monotonic()
            running = [box.begin(f"sleep 0.5; echo {n}; exit {n}") for n in range(8)]
            results = [future.result(30) for future in running]
            assert time.monotonic() - began < 3.5
        assert [(r.text, r.exit_code) for r in results] == [(f"{n}\n", n) for n in range(8)]

    def test_output_past_the_limit_is_spilled(self, face: Open) -> None:
        with face(limits={"output": 1000}) as box:
            result = box.run("seq 1000; seq 2000 >&2")
        for stream, kept in (("stdout", result.stdout), ("stderr", result.stderr)):
            (spilled,) = [found for found in result.spilled if found.stream == stream]
            whole = b"".join(b"%d\n" % n for n in range(1, 1001 if stream == "stdout" else 2001))
            rest = Path(spilled.path).read_bytes()
            assert kept + rest == whole and (len(kept), spilled.size) == (1000, len(rest))
        assert result.truncated


class TestTime:
    def test_a_program_may_clean_up_within_the_grace(self, face: Open) -> None:
        with face() as box:
            result = box.run("trap 'echo cleaned; exit 0' TERM; sleep 60 & wait", timeout=0.4)
            assert (result.outcome, result.exit_code, result.text) == ("timed-out", 124, "cleaned\n")
            assert "0.4 s" in result.reason

    @pytest.mark.parametrize(("grace", "least", "most"), [(0, 0.3, 3), (1, 1.3, 5)])
    def test_the_grace_is_as_given_and_then_it_is_killed(
        self, face: Open, grace: float, least: float, most: float
    ) -> None:
        with face() as box:
            began = time.monotonic()
            result = box.run("trap '' TERM; echo up; while :; do sleep 5; done", timeout=0.3, grace=grace)
            assert least <= time.monotonic() - began < most
            assert (result.outcome, result.text) == ("timed-out", "up\n")

    def test_what_has_hidden_goes_too(self, face: Open) -> None:
        with face() as box:
            result = box.run(f"{HIDES}; echo up; sleep 60", timeout=0.6, grace=0.2)
            assert (result.outcome, result.text) == ("timed-out", "up\n")
            assert marked() == []
            assert box.run("echo on").text == "on\n"

    def test_another_run_goes_on(self, face: Open) -> None:
        with face() as box:
            other = box.begin(f"{HIDES}; sleep 1.5; echo survived")
            assert box.run("trap '' TERM; sleep 60; sleep 60", timeout=0.3, grace=0.2).outcome == "timed-out"
            assert box.run("kill -9 $$").signal == 9
            assert other.result(30).text == "survived\n"
            assert marked(), "what another run has left is not this one's"


class TestCancelling:
    def test_a_cancelled_run_is_ended_and_the_sandbox_lives_on(self, face: Open) -> None:
        with face() as box:
            other = box.begin("sleep 2; echo survived")
            running = box.begin(f"{HIDES}; while :; do echo x; sleep 0.1; done", grace=0.2)
            while not marked():
                time.sleep(0.01)
            box.cancel(running)
            with pytest.raises((CancelledError, KeyboardInterrupt)):
                running.result(30)
            assert gone()
            assert box.run("echo on").text == "on\n"
            assert other.result(30).text == "survived\n"

    def test_closing_the_sandbox_cancels_what_runs(self, face: Open) -> None:
        with face() as box:
            running = [box.begin(f"{HIDES}; sleep 60") for _ in range(2)]
            while not marked():
                time.sleep(0.01)
            time.sleep(0.3)
            box.close()
            for future in running:
                result = future.result(1)
                assert (result.outcome, result.exit_code) == ("cancelled", 130)
            assert marked() == []

    def test_a_closed_one_cannot_be_used(self, face: Open) -> None:
        with face() as box:
            pass
        with pytest.raises(SetupError, match="not open"):
            box.begin("true").result(10)


def need_cgroups() -> None:
    applies(host().has("cgroup.memory") and host().has("cgroup.cpuacct"), "no cgroups for this user")


#: Ways to use memory, the last by many small processes.
HOGS = {
    "heap": "x = bytearray(500 << 20)",
    "tmpfs": "f = open('/dev/shm/x', 'wb')\nfor _ in range(500): f.write(bytes(1 << 20)); f.flush()",
    "many": """
import os, time
for _ in range(24):
    try:
        if not os.fork():
            x = bytearray(20 << 20)
            time.sleep(9)
    except OSError:
        pass  # there may be no memory for a process either
time.sleep(9)
""",
}


class TestLimits:
    @pytest.mark.parametrize("kind", HOGS)
    def test_running_out_of_memory_is_told_with_the_limit_and_what_was_used(
        self, face: Open, kind: str
    ) -> None:
        need_cgroups()
        with face(limits={"memory": "96M"}) as box:
            result = box.run([PYTHON, "-c", HOGS[kind]], timeout=60)
            assert (result.outcome, result.exit_code) == ("out-of-memory", 137)
            assert 'limits.memory = "96M"' in result.reason and "used)" in result.reason
            assert "limits.memory" in result.hint
            with pytest.raises(stockade.LimitError, match="memory ran out"):
                result.check()

    def test_the_sandbox_lives_on_after_it(self, face: Open) -> None:
        need_cgroups()
        with face(limits={"memory": "96M"}) as box:
            assert box.run([PYTHON, "-c", HOGS["heap"]], timeout=60).outcome == "out-of-memory"
            result = box.run("echo on; exit 3")
            assert (result.outcome, result.exit_code, result.text) == ("exited", 3, "on\n")

    def test_a_crash_is_no_want_of_memory(self, face: Open) -> None:
        need_cgroups()
        with face(limits={"memory": "96M"}) as box:
            for number in (9, 11, 6):
                result = box.run(f"kill -{number} $$")
                assert (result.outcome, result.signal) == ("signalled", number)

    @pytest.mark.parametrize("processes", [1, 3])
    def test_processor_time_is_that_of_the_whole_sandbox(self, face: Open, processes: int) -> None:
        need_cgroups()
        busy = "while :; do :; done"
        with face(limits={"cpu_time": "600ms"}) as box:
            began = time.monotonic()
            script = "&".join([f"setsid sh -c '{busy}'"] * (processes - 1) + [f"sh -c '{busy}'"])
            result = box.run(script, timeout=60)
            assert (result.outcome, result.exit_code) == ("limit-exceeded", 137)
            assert 'limits.cpu_time = "600ms"' in result.reason and "s used)" in result.reason
            assert time.monotonic() - began < 20
            used = float(result.reason.rpartition("(")[2].split()[0])
            assert 0.6 <= used < 2

    def test_once_the_processor_time_is_used_up_nothing_more_is_started(self, face: Open) -> None:
        need_cgroups()
        with face(limits={"cpu_time": "300ms"}) as box:
            assert box.run("while :; do :; done", timeout=60).outcome == "limit-exceeded"
            for _ in range(3):
                result = box.run("echo x")
                assert (result.outcome, result.text) == ("limit-exceeded", "")

    def test_cores_are_shared_out(self, face: Open) -> None:
        need_cgroups()
        spin = "import time as t\nwhile t.monotonic() < e: pass\nprint(t.process_time())"
        spin = spin.replace("\n", "\ne = t.monotonic() + 1.5\n", 1)
        with face(limits={"cpu": 0.3}) as box:
            assert float(box.run([PYTHON, "-c", spin]).text) < 0.9

    @pytest.mark.parametrize("limit", [{"memory": "64M"}, {"cpu": 1}, {"cpu_time": "5s"}])
    def test_without_cgroups_a_limit_is_refused_with_the_fix_and_the_line_that_waives_it(
        self, face: Open, limit: dict[str, Any]
    ) -> None:
        (name,) = limit
        applies(not host().has(f"cgroup.{name.replace('cpu_time', 'cpuacct')}"), "this user has cgroups")
        with pytest.raises(UnsupportedError, match=rf"limits\.{name}") as caught, face(limits=limit):
            pass
        assert f'accept = ["limits.{name}"]' in caught.value.hint
        assert any(fix in caught.value.hint for fix in ("mkdir", "systemd-run", "mount"))
        with face(limits=limit, accept=[f"limits.{name}"]) as box:
            result = box.run("true")
            assert result.ok and result.controls[f"limits.{name}"].observed == "accepted weaker"


LIES = (
    "out of memory", "timed-out", "memory ran out: limits.memory = \"1M\"", "stockade: cancelled",
    "processor time ran out", "Killed", "\x1b]0;denied\x07",
)  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_what_a_program_prints_never_changes_the_outcome(face: Open, lie: str) -> None:
    with face() as box:
        result = box.run(f"printf '%s\\n' '{lie}'; printf '%s\\n' '{lie}' >&2; exit 137")
        assert (result.outcome, result.exit_code, result.signal) == ("exited", 137, None)
        assert result.reason == "exited with 137" and result.hint == ""
        result = box.run(f"printf '%s\\n' '{lie}' >&2; kill -9 $$")
        assert (result.outcome, result.signal) == ("signalled", 9)
