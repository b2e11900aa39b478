"""`stockade pipe`: stages from a file or from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FILE = """
name = "report"
timeout = "20s"

[source.data]
command = ["sh", "-c", "echo $NUMBER; echo noise >&2"]
env = { NUMBER = "42" }

[source.code]
command = ["cat"]
stdin = "code.txt"

[consumer]
command = ["sh", "-c", "cat <&3; cat; exit 3"]
"""


def pipe(*words: str, cwd: Path, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "stockade", "pipe", *words]
    return subprocess.run(command, cwd=cwd, input=given, capture_output=True, check=False)


def test_commands_with_bars_between_them(workspace: Path) -> None:
    done = pipe(
        "--", "cat", "|", "sh", "-c", "cat; echo said >&2", "|", "wc", "-c", cwd=workspace, given=b"12345"
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"5\n", b"said\n")


def test_the_policy_of_the_command_line_is_that_of_every_stage(workspace: Path) -> None:
    (workspace / "seen").write_text("here\n")
    done = pipe("-q", "--mode", "ro", "--", "cat", "seen", "|", "cat", "-", "seen", cwd=workspace)
    assert done.stdout == b"here\nhere\n"


def test_a_file_with_sources_and_their_own_stdin(workspace: Path) -> None:
    (workspace / "code.txt").write_text("code\n")
    (workspace / "p.toml").write_text(FILE)
    done = pipe("p.toml", cwd=workspace, given=b"not read")
    assert (done.returncode, done.stdout, done.stderr) == (3, b"42\ncode\n", b"noise\n")
    found = json.loads(pipe("--json", "p.toml", cwd=workspace).stdout)
    assert (found["name"], found["exit_code"], found["ok"]) == ("report", 3, False)
    assert list(found["stages"]) == ["source-data", "source-code", "consumer"]
    assert found["stages"]["source-data"]["stderr"] == "noise\n"
    assert found["stages"]["consumer"]["stdout"] == found["stdout"] == "42\ncode\n"
    assert all(stage["receipt"]["id"] for stage in found["stages"].values())


def test_pipefail_and_a_timeout(workspace: Path) -> None:
    assert pipe("--pipefail", "--", "sh", "-c", "exit 3", "|", "cat", cwd=workspace).returncode == 3
    done = pipe("--timeout", "500ms", "--", "sh", "-c", "echo x; sleep 60", "|", "cat", cwd=workspace)
    assert done.returncode == 124 and done.stdout == b"x\n" and b"timed-out" in done.stderr


def test_verbose_says_how_each_stage_ended(workspace: Path) -> None:
    done = pipe("-v", "--", "sh", "-c", "exit 3", "|", "cat", cwd=workspace)
    assert b"stage-0: exited: exited with 3\n" in done.stderr and b"stage-1: exited" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to run"),
        (["--", "cat"], "at least two stages"),
        (["--", "cat", "|"], "a stage has no command"),
        (["p.toml", "--", "a", "|", "b"], "a file and commands"),
        (["--read", "/etc", "p.toml"], "--read: the stages of a file have their own policies"),
        (["--secret", "API_KEY@api.example.com", "p.toml"], "--secret: the stages of a file have their own"),
        (["--proxy", "p.toml"], "--proxy: the stages of a file have their own policies"),
        (["missing.toml"], "commands come after --: stockade pipe -- a '|' b"),
        (["-w", "@12ab", "--", "a", "|", "b"], "several stages cannot continue one workspace"),
        (["p.toml", "more"], "unexpected argument 'more'"),
    ],
)
def test_mistakes_are_refused_in_words(words: list[str], said: str, workspace: Path) -> None:
    (workspace / "p.toml").write_text(FILE)
    done = pipe(*words, cwd=workspace)
    assert done.returncode == 125 and said in done.stderr.decode()


def test_ctrl_c_ends_all_stages(workspace: Path) -> None:
    command = [sys.executable, "-m", "stockade", "pipe", "--json", "--", "sh", "-c", "echo up >&2; sleep 60"]
    with subprocess.Popen(
        [*command, "|", "cat"], cwd=workspace, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    ) as process:
        time.sleep(2)
        os.kill(process.pid, signal.SIGINT)
        shown = process.communicate(timeout=20)[0]
    assert process.returncode == 130
    assert json.loads(shown)["outcome"] == "cancelled"
