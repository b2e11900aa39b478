"""Ending `stockade run` from outside: by Ctrl-C, by a signal, by the worst one; and its colours."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

STOCKADE = str(Path(sys.executable).with_name("stockade"))


def marked(mark: str) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0] == b"sh" and mark.encode() in words:
            found.append(int(name))
    return found


@contextmanager
def running(
    workspace: Path, *options: str, script: str = ""
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A `stockade run` whose command has started, with a daemon of its own, and the mark of both."""
    mark = f"stockade-cancel-{os.getpid()}-{time.monotonic_ns()}"
    inner = script or "setsid sh -c 'trap \"\" TERM HUP INT; sleep 300; :' sh $0 & echo started; sleep 300; :"
    command = [STOCKADE, "run", *options, "--", "sh", "-c", inner, mark]
    with subprocess.Popen(
        command, cwd=workspace, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        assert marked(mark)
        try:
            yield process, mark
        finally:
            process.kill()


def left(mark: str) -> list[int]:
    end = time.monotonic() + 10
    while (found := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_cancels_the_run_and_nothing_is_left(workspace: Path, number: signal.Signals) -> None:
    with running(workspace) as (process, mark):
        process.send_signal(number)
        _, said = process.communicate(timeout=30)
        assert process.returncode == 130, said
        assert said == b"stockade: cancelled: ended because the caller cancelled it\n"
        assert left(mark) == []


@pytest.mark.usefixtures("swept")
def test_when_it_is_killed_nothing_is_left(workspace: Path) -> None:
    with running(workspace) as (process, mark):
        process.kill()
        process.wait()
        assert left(mark) == []


@pytest.mark.parametrize("options", [(), ("--discard",)])
def test_a_second_ctrl_c_does_not_wait_and_names_where_changes_are(
    workspace: Path, stockade_home: Path, options: tuple[str, ...]
) -> None:
    command = [STOCKADE, "run", *options, "--", "sh", "-c"]
    inner = "trap 'echo ending' TERM; echo y > made; echo started; while :; do sleep 0.1; done"
    with subprocess.Popen(
        [*command, inner], cwd=workspace, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for word in (b"started\n", b"ending\n"):
            assert process.stdout.readline() == word
            process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    kept = list((stockade_home / "workspaces").iterdir())
    where = b"; `stockade workspaces` lists changes that were kept"
    assert (said.endswith(where + b"\n"), len(kept)) == ((False, 0) if options else (True, 1))


def test_a_cancelled_quiet_run_says_nothing(workspace: Path) -> None:
    with running(workspace, "-q") as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == b""
        assert process.returncode == 130


def test_a_cancelled_run_in_json_says_so(workspace: Path, tmp_path: Path) -> None:
    import json

    (tmp_path / "out").mkdir()
    flag = tmp_path / "out" / "started"
    command = [STOCKADE, "run", "--json", "--write", str(tmp_path / "out"), "--"]
    with subprocess.Popen(
        [*command, "sh", "-c", f"touch {flag}; sleep 300"], cwd=workspace, stdout=subprocess.PIPE
    ) as process:
        while not flag.exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        printed, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    result = json.loads(printed)
    assert (result["outcome"], result["exit_code"]) == ("cancelled", 130)


def test_a_cancelled_run_leaves_no_half_made_workspace(workspace: Path, stockade_home: Path) -> None:
    with running(workspace) as (process, _):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    directory = stockade_home / "workspaces"
    assert not directory.exists() or list(directory.iterdir()) == []


def at_a_terminal(
    arguments: list[str], workspace: Path, typed: bytes = b"", environment: dict[str, str] | None = None
) -> tuple[int, bytes]:
    """The exit code and all that was shown of a command run on a terminal of its own."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(workspace)
        os.execve(STOCKADE, [STOCKADE, *arguments], os.environ | (environment or {}))
    shown = b""
    try:
        if typed:
            os.write(terminal, typed)
        end = time.monotonic() + 30
        while time.monotonic() < end and select.select([terminal], [], [], 30)[0]:
            try:
                data = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                break
            if not data:
                break
            shown += data
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status), shown


class TestAtATerminal:
    def test_an_error_is_coloured(self, workspace: Path) -> None:
        clean = {"TERM": "xterm", "NO_COLOR": ""}
        _, shown = at_a_terminal(["run", "--", "no-such-command"], workspace, environment=clean)
        assert b"\x1b[31merror:" in shown

    @pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=["NO_COLOR", "dumb"])
    def test_unless_colour_is_not_wanted(self, workspace: Path, environment: dict[str, str]) -> None:
        _, shown = at_a_terminal(["run", "--", "no-such-command"], workspace, environment=environment)
        assert b"error:" in shown and b"\x1b" not in shown
