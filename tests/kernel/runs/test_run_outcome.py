"""How a run ended, as its result says it."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import Policy, Result
from stockade.host import host
from stockade.runs import supervise
from stockade.runs.cgroup import SandboxCgroups
from support.means import applies


def sh(script: str, policy: Policy | None = None) -> Result:
    return stockade.run(["sh", "-c", script], policy)


@pytest.mark.parametrize("code", [0, 1, 2, 42, 125, 126, 127, 255])
def test_the_exit_code_is_the_commands_own(code: int) -> None:
    result = sh(f"exit {code}")
    assert (result.outcome, result.exit_code, result.signal) == ("exited", code, None)
    assert result.ok is (code == 0)


def test_the_reason_of_a_failure_is_its_exit_code_and_of_a_success_empty() -> None:
    assert sh("exit 3").reason == "exited with 3"
    assert sh("exit 0").reason == ""


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (signal.SIGSEGV, "memory"),
        (signal.SIGABRT, "aborted itself"),
        (signal.SIGKILL, "killed"),
        (signal.SIGFPE, "zero"),
        (signal.SIGBUS, "beyond its end"),
        (signal.SIGILL, "instruction"),
        (signal.SIGPIPE, "whose reader is gone"),
    ],
)
def test_a_death_by_signal_names_it_and_its_likely_cause(number: signal.Signals, cause: str) -> None:
    result = sh(f"kill -{int(number)} $$")
    assert (result.outcome, result.exit_code, result.signal) == ("signalled", 128 + number, number)
    assert number.name in result.reason and cause in result.reason


def test_a_signal_without_a_likely_cause_is_only_named() -> None:
    assert sh("kill -USR1 $$").reason == "ended by SIGUSR1"


def test_a_real_time_signal_has_a_number_for_a_name() -> None:
    result = sh("kill -40 $$")
    assert (result.exit_code, result.reason) == (168, "ended by signal 40")


def test_an_unknown_command_is_not_found() -> None:
    result = stockade.run(["no-such-command-anywhere"])
    assert (result.outcome, result.exit_code) == ("setup-failed", 127)
    assert "no-such-command-anywhere" in result.reason and "no such command" in result.reason
    assert result.hint


def test_a_command_that_the_policy_hides_says_where_it_is_and_how_to_show_it(tmp_path: Path) -> None:
    tool = tmp_path / "tools" / "tool"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho ran\n")
    tool.chmod(0o755)
    hidden = stockade.run([str(tool)], Policy(toolchain=False), advise=True)
    assert (hidden.outcome, hidden.exit_code) == ("setup-failed", 127)
    assert "hidden by the policy" in hidden.reason
    assert f'read = ["{tool}"]' in hidden.hint
    assert stockade.run([str(tool)], Policy(read=[str(tool)], toolchain=False)).text == "ran\n"


def test_a_hidden_command_is_found_on_the_hosts_path_for_the_hint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "only-on-the-host"
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin")
    result = stockade.run(["only-on-the-host"], Policy(toolchain=False), advise=True)
    assert result.exit_code == 127 and str(tool) in result.reason and str(tmp_path) in result.hint


def test_a_pipe_in_place_of_the_command_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pipe").chmod(0o755)
    result = stockade.run([str(tmp_path / "pipe")], advise=True)
    assert result.exit_code == 127 and "hidden" in result.reason


def test_a_file_that_is_not_executable_is_denied(workspace: Path) -> None:
    (workspace / "data").write_text("#!/bin/sh\n")
    result = stockade.run(["./data"], Policy(workspace=str(workspace)))
    assert (result.outcome, result.exit_code) == ("denied", 126)
    assert "./data" in result.reason and "Permission denied" in result.reason


def test_a_directory_is_not_a_command() -> None:
    result = stockade.run(["/usr/bin"])
    assert (result.outcome, result.exit_code) == ("denied", 126)


def test_a_missing_working_directory_names_it() -> None:
    result = stockade.run(["true"], cwd="/no/such/place")
    assert (result.outcome, result.exit_code) == ("setup-failed", 125)
    assert "/no/such/place" in result.reason and "exists" in result.hint


def test_a_hidden_working_directory_says_how_to_show_it(tmp_path: Path) -> None:
    result = stockade.run(["true"], cwd=str(tmp_path), advise=True)
    assert result.exit_code == 125
    assert f'read = ["{tmp_path}"]' in result.hint


def test_a_script_without_an_interpreter_says_what_it_lacks(workspace: Path) -> None:
    (workspace / "script").write_text("echo hello\n")
    (workspace / "script").chmod(0o755)
    result = stockade.run(["./script"], Policy(workspace=str(workspace)))
    assert (result.outcome, result.exit_code) == ("denied", 126) and "#!" in result.hint


def test_a_program_that_stops_itself_is_ended_by_its_time() -> None:
    result = stockade.run(["sh", "-c", "kill -STOP $$"], timeout=0.3)
    assert (result.outcome, result.exit_code) == ("timed-out", 124)


def test_a_program_cannot_end_the_gate() -> None:
    result = sh("for s in KILL TERM SEGV STOP HUP; do kill -$s 1; done; echo alive")
    assert result.text == "alive\n" and result.exit_code == 0


def test_a_sandbox_within_a_sandbox_is_refused_in_words() -> None:
    import stockade.runs.launch as inner

    # As one is now: without user namespaces nothing can be enforced, and the refusal says why.
    source = Path(inner.__file__).parents[2]
    needed = {str(source), os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)} - {"/usr"}
    policy = Policy(read=sorted(needed))
    script = "import stockade; stockade.run(['true'])"
    result = stockade.run([sys.executable, "-c", script], policy, env={"PYTHONPATH": str(source)})
    assert b"UnsupportedError" in result.stderr and b"user namespaces" in result.stderr


def test_a_call_of_a_foreign_architecture_is_denied(workspace: Path) -> None:
    from support.means import need, need_program

    need(os.uname().machine == "x86_64", "not an x86-64 machine")
    compiler = need_program("gcc")
    (workspace / "old.c").write_text(
        'int main(void) { __asm__ volatile("int $0x80" : : "a"(20)); return 0; }'
    )
    policy = Policy(workspace=str(workspace))
    built = sh(f"{compiler} -o old old.c && ./old", policy)
    # The shell reports its child's death; the same program as the command is what the wall ended.
    assert built.exit_code == 128 + signal.SIGSYS
    import subprocess

    subprocess.run([compiler, "-o", "old", "old.c"], cwd=workspace, check=True)
    result = stockade.run(["./old"], policy)
    assert (result.outcome, result.exit_code, result.signal) == ("denied", 126, signal.SIGSYS)
    with pytest.raises(stockade.DeniedError):
        result.check()


class TestCheck:
    def test_it_returns_the_result_of_a_success(self) -> None:
        result = sh("exit 0")
        assert result.check() is result

    def test_a_failed_command_raises(self) -> None:
        with pytest.raises(stockade.CommandError, match="exited with 7"):
            sh("exit 7").check()

    def test_the_error_has_the_result_and_the_last_words_without_control_characters(self) -> None:
        with pytest.raises(stockade.CommandError) as caught:
            sh("printf 'first\\n\\033[31mno such thing\\n\\n' >&2; exit 7").check()
        assert str(caught.value) == r"exited with 7; last line of stderr: '\x1b[31mno such thing'"
        assert caught.value.result is not None and caught.value.result.exit_code == 7
        assert caught.value.receipt is caught.value.result.receipt is not None

    def test_a_prompt_shows_the_streams_and_not_every_wall(self) -> None:
        assert (
            repr(sh("echo hello")) == r"Result(outcome='exited', exit_code=0, stdout=b'hello\n', stderr=b'')"
        )
        long = repr(sh("yes | head -c 100000; exit 3"))
        assert len(long) < 400 and "…" in long and "reason='exited with 3'" in long

    def test_a_signal_raises_as_a_failed_command(self) -> None:
        with pytest.raises(stockade.CommandError, match="SIGTERM"):
            sh("kill $$").check()

    def test_a_time_out_raises_an_error_that_is_also_pythons_own(self) -> None:
        with pytest.raises(TimeoutError) as caught:
            stockade.run(["sleep", "60"], timeout=0.1).check()
        assert isinstance(caught.value, stockade.TimeoutError)

    def test_a_missing_command_raises_with_its_hint(self) -> None:
        with pytest.raises(stockade.SetupError) as caught:
            stockade.run(["no-such-command"]).check()
        assert caught.value.hint

    def test_a_denied_command_raises(self) -> None:
        with pytest.raises(stockade.DeniedError):
            stockade.run(["/etc"]).check()


def test_the_usage_counts_time_memory_and_switches() -> None:
    busy = "x = bytearray(64 << 20)\nfor i in range(0, len(x), 4096): x[i] = 1\nsum(range(3_000_000))"
    usage = stockade.run(["/usr/bin/python3", "-c", busy]).check().usage
    assert usage.wall >= usage.cpu_user > 0.01
    assert 64 << 20 < usage.peak_memory < 1 << 30
    assert usage.context_switches > 0
    assert (usage.source["cpu"], usage.source["memory"]) == ("rusage", "rusage")


def test_every_requested_control_says_what_asked_how_it_is_enforced_and_how_that_was_seen(
    workspace: Path,
) -> None:
    policy = Policy(workspace=str(workspace), limits={"wall": "30s", "files": 200})
    controls = stockade.run(["true"], policy).check().controls
    assert set(controls) == {control.value for control in policy.controls()}
    for name, enforced in controls.items():
        assert enforced.requested and enforced.mechanism and enforced.observed, name
    assert controls["limits.files"].requested == "limits.files = 200"
    assert "read from the kernel" in controls["files"].observed


def test_the_result_names_the_plan_that_was_enforced() -> None:
    first, second = stockade.run(["true"]), stockade.run(["false"])
    assert len(first.plan) == 64
    assert first.plan == second.plan != stockade.run(["true"], Policy(limits={"files": 99})).plan


def test_the_task_limit_is_kept_by_a_cgroup_for_root_and_for_others_by_their_namespaces_count() -> None:
    tasks = stockade.run(["true"]).controls["limits.tasks"]
    if os.geteuid() == 0:
        assert tasks.observed == "limit and membership read from the kernel" and "cgroup" in tasks.mechanism
    else:
        assert "RLIMIT_NPROC" in tasks.mechanism
        assert tasks.observed == "limit of the process read from the kernel"


def test_a_run_that_ended_in_time_has_not_timed_out_because_the_caller_was_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The supervisor comes back from the caller when the run is over, and the gate seems to be late."""
    watches: list[supervise.Watch] = []
    real = supervise.Watch.start

    def start(watch: supervise.Watch, *words: Any, **options: Any) -> Any:
        watches.append(watch)
        return real(watch, *words, **options)

    def busy(_: bytes) -> None:
        monkeypatch.setattr(watches[-1], "_deadline", 0.0)
        while not watches[-1]._has_message():
            time.sleep(0.01)

    monkeypatch.setattr(supervise.Watch, "start", start)
    words = ["sh", "-c", "echo; sleep 0.2; exit 3"]
    result = stockade.run(words, timeout=60, on_stdout=busy)
    assert (result.outcome, result.exit_code) == ("exited", 3)
    with stockade.Sandbox() as box:
        result = box.run(words, timeout=60, on_stdout=busy)
        assert (result.outcome, result.exit_code) == ("exited", 3)
        assert box.run(["true"]).ok


class TestAGateThatCannotEndTheRunInTime:
    """Pretended by a gate that is stopped, as tasks that all wait for one lock of the kernel make it late."""

    @pytest.fixture(autouse=True)
    def stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = supervise.Watch.start

        def start(watch: supervise.Watch, *words: Any, **options: Any) -> Any:
            channel = real(watch, *words, **options)
            signal.pidfd_send_signal(watch.box.pidfd, signal.SIGSTOP)
            return channel

        monkeypatch.setattr(supervise.Watch, "start", start)
        monkeypatch.setattr(supervise, "LATE", 0.3)

    def test_its_run_has_timed_out(self) -> None:
        result = stockade.run(["sleep", "60"], timeout=0.3, grace=0.1)
        assert (result.outcome, result.exit_code) == ("timed-out", 124)
        assert "0.3 s" in result.reason

    def test_its_run_in_a_living_sandbox_has_timed_out(self) -> None:
        with stockade.Sandbox() as box:
            assert box.run(["sleep", "60"], timeout=0.3, grace=0.1).outcome == "timed-out"

    def test_what_is_killed_is_not_throttled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        applies(host().has("cgroup.cpu"), "no cgroups for this user")
        lifted: list[str] = []
        real = SandboxCgroups.lift_cpu

        def lift(group: SandboxCgroups) -> None:
            real(group)
            cpu = group._by["cpu"]
            lifted.append(cpu.read("cpu.max" if cpu.version == 2 else "cpu.cfs_quota_us").split()[0])

        monkeypatch.setattr(SandboxCgroups, "lift_cpu", lift)
        result = stockade.run(["sleep", "60"], Policy(limits={"cpu": 0.5}), timeout=0.3, grace=0.1)
        assert result.outcome == "timed-out"
        # When everything is to be killed, when the gate is late, and when the sandbox is closed.
        assert len(lifted) == 3 and set(lifted) <= {"-1", "max"}
