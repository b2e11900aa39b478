"""A command that was started and goes on by itself."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import stockade
from stockade import Policy, PolicyError, Sandbox, SetupError
from stockade.gate import wire
from stockade.sandbox import Process
from support.marks import HIDES, MARK, gone, marked

PIPE, STDOUT, DEVNULL = subprocess.PIPE, subprocess.STDOUT, subprocess.DEVNULL
PYTHON = "/usr/bin/python3"


@pytest.fixture
def box() -> Iterator[Sandbox]:
    with Sandbox() as opened:
        yield opened


def sh(box: Sandbox, script: str, **options: object) -> Process:
    return box.start(["sh", "-c", script], **options)  # type: ignore[arg-type]


def line(process: Process) -> bytes:
    """The next line that it prints."""
    assert process.stdout is not None
    return process.stdout.readline()


class TestStreams:
    def test_what_is_written_to_it_is_read_by_it_and_the_other_way_round(self, box: Sandbox) -> None:
        with sh(box, "while read x; do echo got $x; echo err $x >&2; done", stdin=PIPE) as process:
            assert process.stdin is not None and process.stderr is not None
            for word in (b"one", b"two"):
                process.stdin.write(word + b"\n")
                assert line(process) == b"got %s\n" % word
                assert process.stderr.readline() == b"err %s\n" % word
            process.stdin.close()
            assert process.wait(10).ok

    def test_without_an_input_it_reads_an_empty_one(self, box: Sandbox) -> None:
        with box.start(["cat"]) as process:
            assert process.stdin is None
            assert process.wait(10).ok and line(process) == b""

    def test_stderr_may_go_to_stdout_and_both_nowhere(self, box: Sandbox) -> None:
        with sh(box, "echo out; echo err >&2", stderr=STDOUT) as process:
            assert process.stdout is not None and process.stderr is None
            assert process.stdout.read() == b"out\nerr\n"
        with sh(box, "echo out; echo err >&2; true", stdout=DEVNULL, stderr=DEVNULL) as process:
            assert (process.stdin, process.stdout, process.stderr) == (None, None, None)
            assert process.wait(10).outcome in ("exited", "signalled")

    def test_what_was_printed_can_be_read_after_the_end(self, box: Sandbox) -> None:
        with sh(box, "echo late; exit 3") as process:
            assert process.wait(10).exit_code == 3
            assert line(process) == b"late\n"

    def test_bytes_are_exact(self, box: Sandbox) -> None:
        given = os.urandom(1 << 20)
        with box.start(["cat"], stdin=PIPE) as process:
            assert process.stdin is not None and process.stdout is not None
            stdin = process.stdin

            def feed() -> None:
                view = memoryview(given)
                while view:
                    view = view[stdin.write(view) :]
                stdin.close()

            thread = threading.Thread(target=feed)
            thread.start()
            assert process.stdout.read() == given
            thread.join()

    @pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
    @pytest.mark.parametrize("given", [0, 1, 7, -4])
    def test_a_descriptor_of_the_host_is_not_handed_in(self, box: Sandbox, name: str, given: int) -> None:
        with pytest.raises(PolicyError, match=f"{name}={given}") as caught:
            box.start(["true"], **{name: given})  # type: ignore[arg-type]
        assert "PIPE" in caught.value.hint

    def test_only_stderr_can_go_to_stdout(self, box: Sandbox) -> None:
        for name in ("stdin", "stdout"):
            with pytest.raises(PolicyError, match=name):
                box.start(["true"], **{name: STDOUT})  # type: ignore[arg-type]


class TestWaiting:
    def test_the_result_is_that_of_a_run(self, box: Sandbox) -> None:
        result = sh(box, "exit 7").wait(10)
        assert (result.outcome, result.exit_code, result.reason) == ("exited", 7, "exited with 7")
        assert result.usage.wall > 0 and result.controls and result.plan

    def test_a_wait_that_is_too_short_leaves_it_running(self, box: Sandbox) -> None:
        with sh(box, "read x; exit 4", stdin=PIPE) as process:
            began = time.monotonic()
            with pytest.raises(stockade.TimeoutError, match=r"0\.2 s") as caught:
                process.wait(0.2)
            assert 0.2 <= time.monotonic() - began < 5 and "kill()" in caught.value.hint
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.write(b"\n")
            assert process.wait(10).exit_code == 4

    def test_every_wait_gives_the_same_result(self, box: Sandbox) -> None:
        process = sh(box, "exit 5")
        first = process.wait(10)
        assert process.wait() is first and process.poll() is first

    def test_several_threads_may_wait(self, box: Sandbox) -> None:
        with sh(box, "read x; exit 6", stdin=PIPE) as process, ThreadPoolExecutor(4) as threads:
            waiting = [threads.submit(process.wait, 20) for _ in range(4)]
            time.sleep(0.1)
            assert process.stdin is not None
            process.stdin.write(b"\n")
            assert [found.result().exit_code for found in waiting] == [6] * 4

    def test_a_thread_that_waits_shortly_beside_one_that_waits_long_is_told_in_time(
        self, box: Sandbox
    ) -> None:
        with box.start(["sleep", "60"]) as process, ThreadPoolExecutor(1) as threads:
            long = threads.submit(process.wait, 30)
            time.sleep(0.1)
            with pytest.raises(stockade.TimeoutError):
                process.wait(0.1)
            assert process.poll() is None
            process.kill(0)
            assert long.result().outcome == "cancelled"

    def test_its_number_is_that_of_the_process_on_the_host(self, box: Sandbox) -> None:
        with box.start(["sleep", "60"]) as process:
            assert Path(f"/proc/{process.pid}/comm").read_text() in ("sleep\n", "stockade-gate\n")
            status = Path(f"/proc/{process.pid}/status").read_text()
            assert "NSpid:" in status


class TestNotStarted:
    def test_a_command_that_is_not_found(self, box: Sandbox) -> None:
        process = box.start(["no-such-command"])
        result = process.wait(10)
        assert (result.outcome, result.exit_code) == ("setup-failed", 127)
        assert "no such command" in result.reason and process.poll() is result
        process.signal(signal.SIGTERM)
        process.kill()
        process.pause()
        process.resume()
        process.close()

    def test_a_directory_that_is_not_there(self, box: Sandbox) -> None:
        with box.start(["true"], cwd="/none") as process:
            assert process.wait(10).exit_code == 125

    def test_a_terminal_for_a_command_that_is_not_found(self, box: Sandbox) -> None:
        with box.start(["no-such-command"], pty=True) as process:
            assert process.wait(10).exit_code == 127

    def test_a_sandbox_that_is_not_open(self) -> None:
        with pytest.raises(SetupError, match="not open"):
            Sandbox().start(["true"])


class TestEnding:
    def test_a_signal_goes_to_its_process_group(self, box: Sandbox) -> None:
        with sh(box, "trap 'echo heard; exit 9' USR1; echo up; while :; do sleep 0.05; done") as process:
            assert line(process) == b"up\n"
            process.signal(signal.SIGUSR1)
            assert process.wait(10).exit_code == 9 and line(process) == b"heard\n"

    def test_a_deadly_signal_of_ours_is_told_as_a_signal(self, box: Sandbox) -> None:
        with box.start(["sleep", "60"]) as process:
            process.signal(signal.SIGUSR2)
            result = process.wait(10)
        assert (result.outcome, result.signal) == ("signalled", signal.SIGUSR2)

    def test_what_is_no_signal_is_refused(self, box: Sandbox) -> None:
        with box.start(["sleep", "60"]) as process, pytest.raises(ValueError, match="999"):
            process.signal(999)

    def test_kill_asks_first_and_the_result_says_cancelled(self, box: Sandbox) -> None:
        with sh(box, "trap 'echo asked; exit 0' TERM; echo up; sleep 60 & wait") as process:
            assert line(process) == b"up\n"
            process.kill()
            result = process.wait(10)
            assert (result.outcome, result.exit_code, line(process)) == ("cancelled", 130, b"asked\n")

    def test_kill_without_grace_does_not_ask(self, box: Sandbox) -> None:
        with sh(box, "trap 'echo asked' TERM; echo up; sleep 60 & wait") as process:
            assert line(process) == b"up\n"
            process.kill(0)
            assert process.wait(10).outcome == "cancelled" and line(process) == b""

    def test_the_grace_can_be_cut_short(self, box: Sandbox) -> None:
        with sh(box, "trap '' TERM; echo up; while :; do sleep 1; done", grace=60) as process:
            assert line(process) == b"up\n"
            process.kill()
            with pytest.raises(stockade.TimeoutError):
                process.wait(0.3)
            process.kill(0)
            assert process.wait(10).outcome == "cancelled"

    @pytest.mark.parametrize("grace", [0, 0.2])
    def test_kill_ends_what_has_hidden_from_it(self, box: Sandbox, grace: float) -> None:
        with sh(box, f"{HIDES}; echo up; sleep 60") as process:
            assert line(process) == b"up\n" and marked()
            process.kill(grace)
            process.wait(10)
        assert marked() == []

    def test_kill_leaves_the_others_alone(self, box: Sandbox) -> None:
        with sh(box, "echo up; read x; echo done", stdin=PIPE) as other, box.start(["sleep", "60"]) as one:
            one.kill(0)
            assert one.wait(10).outcome == "cancelled"
            assert other.stdin is not None and line(other) == b"up\n"
            other.stdin.write(b"\n")
            assert other.wait(10).ok and line(other) == b"done\n"

    def test_after_its_end_nothing_can_be_done_to_it(self, box: Sandbox) -> None:
        with sh(box, "exit 0") as process:
            process.wait(10)
            process.signal(signal.SIGTERM)
            process.kill()
            process.pause()
            process.resume()
            assert process.wait().ok


class TestTime:
    def test_its_time_is_kept_though_nobody_waits(self, box: Sandbox) -> None:
        process = sh(box, f"{HIDES}; echo up; trap '' TERM; sleep 60; sleep 60", timeout=0.6, grace=0.2)
        assert line(process) == b"up\n"
        time.sleep(1.5)
        assert marked() == []
        result = process.poll()
        assert result is not None and (result.outcome, result.exit_code) == ("timed-out", 124)
        process.close()

    def test_its_time_goes_on_while_it_is_stopped(self, box: Sandbox) -> None:
        with box.start(["sleep", "60"], timeout=0.5) as process:
            process.pause()
            assert process.wait(10).outcome == "timed-out"

    def test_the_policys_wall_limit_holds_too(self) -> None:
        with Sandbox(Policy(limits={"wall": "300ms"})) as box, box.start(["sleep", "60"]) as process:
            assert process.wait(10).outcome == "timed-out"


TICKS = "import time, sys\nn = 0\nwhile True:\n  print(n := n + 1, flush=True)\n  time.sleep(0.02)"


def test_a_paused_process_does_nothing_until_it_is_resumed(box: Sandbox) -> None:
    with sh(box, f"{HIDES}; exec {PYTHON} -c '{TICKS}'") as process:
        assert line(process) == b"1\n"
        process.pause()
        time.sleep(0.3)
        assert process.stdout is not None
        states = {Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in marked()}
        assert states == {"T"}
        os.set_blocking(process.stdout.fileno(), False)
        seen = process.stdout.read() or b""
        time.sleep(0.2)
        assert not process.stdout.read()
        process.resume()
        os.set_blocking(process.stdout.fileno(), True)
        assert int(line(process)) == (int(seen.split()[-1]) if seen else 1) + 1


def test_a_paused_process_can_be_killed(box: Sandbox) -> None:
    with box.start(["sleep", "60"]) as process:
        process.pause()
        process.kill()
        assert process.wait(10).outcome == "cancelled"


class TestTerminal:
    def test_it_is_one_and_is_the_programs_own(self, box: Sandbox) -> None:
        with sh(box, "tty; stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all", pty=True) as process:
            assert process.stderr is None and process.stdout is not None
            said = process.stdout.read().split(b"\r\n")
            assert process.wait(10).ok
        assert said == [b"/dev/pts/0", b"24 80", b"all", b""]

    def test_its_size_is_as_given_and_changes(self, box: Sandbox) -> None:
        script = "trap 'stty size; exit' WINCH; stty size; while :; do sleep 0.05; done"
        with sh(box, script, pty=(50, 132)) as process:
            assert line(process) == b"50 132\r\n"
            process.resize(10, 20)
            assert line(process) == b"10 20\r\n"
            assert process.wait(10).ok

    def test_what_is_typed_arrives_and_control_c_is_a_signal(self, box: Sandbox) -> None:
        with sh(box, "read x; echo got $x; exec sleep 60", pty=True) as process:
            assert process.stdin is not None
            process.stdin.write(b"word\n")
            assert (line(process), line(process)) == (b"word\r\n", b"got word\r\n")
            process.stdin.write(b"\x03")
            assert process.wait(10).signal == signal.SIGINT

    def test_a_program_that_was_stopped_from_its_terminal_can_be_resumed(self, box: Sandbox) -> None:
        with sh(box, "echo ready; read x; echo got $x", pty=True) as process:
            assert process.stdin is not None and process.stdout is not None
            assert process.stdout.readline() == b"ready\r\n"
            process.stdin.write(b"\x1a")
            status = Path(f"/proc/{process.pid}/stat")
            while status.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.01)
            process.resume()
            process.stdin.write(b"this\n")
            assert b"got this\r\n" in process.stdout.read()
            assert process.wait(10).ok

    def test_closing_hangs_up(self, box: Sandbox) -> None:
        process = sh(box, f"{HIDES}; echo up; sleep 60", pty=True, grace=0.2)
        assert line(process) == b"up\r\n"
        process.close()
        assert gone()

    def test_only_a_terminal_has_a_size(self, box: Sandbox) -> None:
        with box.start(["sleep", "60"]) as process, pytest.raises(SetupError, match="no terminal") as caught:
            process.resize(1, 1)
        assert "pty=True" in caught.value.hint


class TestLettingGo:
    def test_leaving_with_ends_it(self, box: Sandbox) -> None:
        with sh(box, f"{HIDES}; echo up; sleep 60", grace=0.2) as process:
            assert line(process) == b"up\n" and marked()
        assert gone()
        with pytest.raises(SetupError, match="was closed"):
            process.wait()
        process.close()

    def test_closing_it_ends_the_wait_of_another_thread(self, box: Sandbox) -> None:
        process = box.start(["sleep", "60"])
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(process.wait)
            time.sleep(0.2)
            process.close()
            with pytest.raises(SetupError, match="was closed"):
                waiting.result(10)

    def test_closing_the_sandbox_ends_the_wait_of_another_thread(self) -> None:
        box = Sandbox()
        box.open()
        process = box.start(["sleep", "60"])
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(process.wait)
            time.sleep(0.2)
            box.close()
            assert waiting.result(10).outcome == "cancelled"
        process.close()

    def test_a_forked_child_that_closes_it_leaves_it_to_the_parent(self, box: Sandbox) -> None:
        with sh(box, "read x; exit 4", stdin=PIPE) as process, ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(process.wait, 30)
            time.sleep(0.1)
            child = os.fork()
            if child == 0:
                process.close()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert process.stdin is not None and not waiting.done()
            process.stdin.write(b"\n")
            assert waiting.result().exit_code == 4

    def test_what_nobody_refers_to_any_more_is_ended(self, box: Sandbox) -> None:
        process = sh(box, f"{HIDES}; echo up; sleep 60", grace=0.2)
        assert line(process) == b"up\n" and marked()
        del process
        gc.collect()
        assert gone()

    def test_closing_the_sandbox_ends_it(self) -> None:
        box = Sandbox()
        box.open()
        process = sh(box, f"{HIDES}; echo up; sleep 60")
        assert line(process) == b"up\n" and marked()
        box.close()
        assert marked() == []
        result = process.wait(10)
        assert (result.outcome, result.exit_code) == ("cancelled", 130)
        assert line(process) == b""
        process.close()

    def test_a_process_that_left_a_daemon_and_ended_by_itself_leaves_it_to_the_sandbox(
        self, box: Sandbox
    ) -> None:
        with sh(box, HIDES) as process:
            assert process.wait(10).ok
        assert marked()
        box.run(["sh", "-c", f"pkill -9 -f {MARK[:-1]}[{MARK[-1]}] || kill -9 -1"])
        assert gone()

    def test_many_leave_no_descriptor(self, box: Sandbox) -> None:
        with box.start(["true"]) as process:
            process.wait(10)
        before = sorted(os.listdir("/proc/self/fd"))
        for pty in (False, True) * 10:
            with box.start(["true"], stdin=None if pty else PIPE, pty=pty) as process:
                process.wait(10)
            box.start(["no-such-command"], pty=pty).close()
        assert sorted(os.listdir("/proc/self/fd")) == before

    def test_a_killed_gate_is_told(self, box: Sandbox) -> None:
        assert box._box is not None
        with box.start(["sleep", "60"]) as process:
            signal.pidfd_send_signal(box._box.pidfd, signal.SIGKILL)
            result = process.wait(10)
        assert (result.outcome, result.exit_code) == ("setup-failed", 125) and "gate" in result.reason


def test_last_words_are_heard_although_not_all_that_was_said_before_was_read() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel = wire.Channel(ours)
    channel.signal(0)
    theirs.send(wire.REPLY.pack(wire.REPLY_EXITED, 0, 0, 4 << 8, 0, 0, 0, 0, 0, 0, 0, b""))
    theirs.close()
    try:
        reply = channel.receive()
        assert reply is not None and (reply.kind, reply.status) == (wire.REPLY_EXITED, 4 << 8)
        assert channel.receive() is None
    finally:
        channel.close()
