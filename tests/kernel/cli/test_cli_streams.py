"""The command line where a stream is closed, full, stalled or of the wrong kind: told, never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

STOCKADE = str(Path(sys.executable).with_name("stockade"))
Done = subprocess.CompletedProcess[bytes]


def shell(script: str, workspace: Path) -> Done:
    """A line of bash in the workspace, in which $S is the command."""
    return subprocess.run(
        ["bash", "-c", script],
        cwd=workspace,
        env=os.environ | {"S": STOCKADE},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("$S run -- echo hello > /dev/full", b"No space left on device"),
        ("$S run --json -- true > /dev/full", b"No space left on device"),
        ("$S run --json-fd 3 -- true 3> /dev/full", b"No space left on device"),
        ("$S run -- echo hello 1< /dev/null", b"Bad file descriptor"),
        ("$S profiles > /dev/full", b"No space left on device"),
        ("$S run --help > /dev/full", b"No space left on device"),
        ("$S run --json-fd 0 -- true < /dev/null", b"--json-fd 0: the descriptor is not open for writing"),
        ("$S run --json-fd=-1 -- true", b"--json-fd -1: the descriptor is not open for writing"),
        ("$S run --json-fd 99999999999999999999 -- true", b"is not open for writing"),
        ("$S run --limit tasks=² -- true", b"is not a whole number"),
        ("$S run --limit files=$(printf %05000d 1) -- true", b"is not a whole number"),
        ("$S run --timeout ² -- true", b"is not a time"),
    ],
)
def test_what_cannot_be_done_is_told(workspace: Path, script: str, said: bytes) -> None:
    done = shell(script, workspace)
    assert done.returncode == 125, done.stderr
    assert said in done.stderr
    assert all(line.startswith(b"stockade: ") for line in done.stderr.splitlines())


def test_a_stderr_that_cannot_be_written_changes_no_exit_code(workspace: Path) -> None:
    assert shell("$S run -- sh -c 'touch x; exit 7' 2> /dev/full", workspace).returncode == 7
    assert shell("$S run -- no-such-command 2> /dev/full", workspace).returncode == 127


class TestClosed:
    """A number that is free is the next file's: what is written to the stream must not go there."""

    @pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-", "0<&- 2>&-"])
    def test_what_is_written_to_a_closed_stream_goes_nowhere(self, workspace: Path, closed: str) -> None:
        script = "(cat; head -c 300000 /dev/zero; head -c 300000 /dev/zero >&2; exit 7)"
        done = shell(f"$S run -q -- bash -c '{script}' {closed}", workspace)
        assert done.returncode == 7, done.stderr
        assert len(done.stdout) == (0 if "1>&-" in closed else 300000)
        assert len(done.stderr) == (0 if "2>&-" in closed else 300000)

    def test_our_own_words_for_a_closed_stderr_do_not_go_to_stdout(self, workspace: Path) -> None:
        done = shell("$S run -- touch x 2>&-", workspace)
        assert (done.returncode, done.stdout) == (0, b"")

    @pytest.mark.parametrize("command", ["--help", "profiles", "plan --json -- true", "run --json -- true"])
    def test_every_command_works_without_stdout(self, workspace: Path, command: str) -> None:
        done = shell(f"$S {command} >&-", workspace)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_stdin_that_cannot_be_read_is_empty(workspace: Path) -> None:
    done = shell("$S run -- sh -c 'cat; echo end' 0> /dev/null", workspace)  # as `nohup` does it
    assert (done.returncode, done.stdout, done.stderr) == (0, b"end\n", b"")


class TestSlowReaders:
    def test_a_pipe_that_does_not_block_gets_everything(self, workspace: Path) -> None:
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        command = [STOCKADE, "run", "--", "head", "-c", "1000000", "/dev/zero"]
        with subprocess.Popen(command, cwd=workspace, stdin=subprocess.DEVNULL, stdout=writer) as process:
            os.close(writer)
            time.sleep(0.5)
            with os.fdopen(reader, "rb") as file:
                assert len(file.read()) == 1000000
        assert process.returncode == 0

    @pytest.mark.parametrize("limit", ["--timeout 1", "--limit wall=1s"])
    def test_one_that_stalls_does_not_lengthen_the_time(self, workspace: Path, limit: str) -> None:
        began = time.monotonic()
        reader, writer = os.pipe()
        run = [STOCKADE, "run", *limit.split(), "--", "sh", "-c", "head -c 1000000 /dev/zero; sleep 60"]
        with subprocess.Popen(
            run, cwd=workspace, stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE
        ) as process:
            os.close(writer)
            _, said = process.communicate(timeout=30)
        assert process.returncode == 124 and time.monotonic() - began < 20
        assert b"timed-out" in said and b"output was lost" in said
        with os.fdopen(reader, "rb") as file:
            assert len(file.read()) >= 4096


def test_a_damaged_record_of_trust_is_told(workspace: Path, stockade_home: Path) -> None:
    (workspace / "stockade.toml").write_text('net = "open"\n')
    stockade_home.mkdir(mode=0o700)
    (stockade_home / "trust").write_bytes(b"\xff" * 64 + b" /x\0")
    for command in ("run -- true", "trust", "trust --list"):
        done = shell(f"$S {command}", workspace)
        assert done.returncode == 125 and b"trust is damaged" in done.stderr, done.stderr
        assert b"Traceback" not in done.stderr
    done = shell("$S run --json -- true", workspace)
    assert "trust is damaged" in json.loads(done.stdout)["reason"]
