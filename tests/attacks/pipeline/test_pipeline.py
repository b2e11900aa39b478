"""Hostile stages: each can harm the data that it passes on, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

from attacks.arena import PYTHON
from stockade import Gather, Outcome, Pipeline, Stage

SECONDS = 30
#: Passes data against the direction of a pipe, if both ends can be opened the other way round.
BACK_WRITER = """
import os, sys, time
os.read(0, 1)
try:
    os.write(os.open("/proc/self/fd/0", os.O_WRONLY), b"private")
    print("wrote")
except OSError as error:
    print(error.strerror)
time.sleep(1)
"""
BACK_READER = """
import os, sys, time
os.write(1, b"x")
time.sleep(0.6)
try:
    print(os.read(os.open("/proc/self/fd/1", os.O_RDONLY | os.O_NONBLOCK), 99), file=sys.stderr)
except OSError as error:
    print(error.strerror, file=sys.stderr)
"""
LOOK = """
import json, os, sys
found = {}
for entry in os.listdir("/proc/self/fd"):
    try: found[entry] = os.readlink("/proc/self/fd/" + entry)
    except OSError: pass
print(json.dumps({"fds": found, "pids": [int(p) for p in os.listdir("/proc") if p.isdigit()]}),
file=sys.stderr)
"""


def python(script: str, policy: dict[str, object] | None = None) -> Stage:
    return Stage(policy or {}, [PYTHON, "-c", script])


def sh(script: str) -> Stage:
    return Stage({}, ["sh", "-c", script])


def test_data_passes_no_pipe_backwards() -> None:
    """Else a writer with private files could hand them to a fetcher with a network."""
    outside = subprocess.run(
        ["sh", "-c", f"{PYTHON} -c '{BACK_READER}' | {PYTHON} -c '{BACK_WRITER}'"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "private" in outside.stderr and outside.stdout == "wrote\n"
    result = (python(BACK_READER) | python(BACK_WRITER)).run(timeout=SECONDS)
    assert result.stages["stage-0"].stderr_text == result.text == "Permission denied\n"


def test_no_pipe_between_stages_can_be_opened_again_by_its_name() -> None:
    """A name that waited for a writer that has ended would keep the stage waiting for ever."""
    result = (sh("exit 0") | sh("sleep 0.2; cat /dev/stdin; cat && echo end")).run(timeout=SECONDS)
    assert result.text == "end\n" and "Permission denied" in result.stderr_text


def test_a_consumer_can_pass_nothing_back_to_any_source() -> None:
    write = """
import os
for number in (0, 3):
    try: os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NONBLOCK); print("opened")
    except OSError as error: print(error.strerror)
try: os.write(3, b"x"); print("wrote")
except OSError as error: print(error.strerror)
"""
    result = Gather({"a": sh("sleep 1"), "b": sh("sleep 1")}, into=python(write)).run(timeout=SECONDS)
    assert result.text == "Permission denied\nPermission denied\nBad file descriptor\n"


def test_a_pipe_gets_no_name_inside_by_which_it_could_be_opened() -> None:
    link = """
import os
try: os.link("/proc/self/fd/0", "/tmp/pipe", follow_symlinks=True); print("linked")
except OSError as error: print(error.strerror)
"""
    result = (sh("sleep 0.5") | python(link)).run(timeout=SECONDS)
    assert result.text in ("No such file or directory\n", "Invalid cross-device link\n")


def test_a_stage_sees_no_descriptor_and_no_process_of_another() -> None:
    result = Pipeline([python(LOOK), python(LOOK + "sys.stdin.read()"), python(LOOK)]).run(timeout=SECONDS)
    for place, stage in result.stages.items():
        seen = json.loads(stage.stderr)
        assert set(seen["fds"]) <= {"0", "1", "2", "3"}, place  # 3 is the directory that it lists
        assert seen["pids"] == [1, 2], place
    inodes = [json.loads(stage.stderr)["fds"]["2"] for stage in result.stages.values()]
    assert len(set(inodes)) == 3  # each has its own stderr


def test_a_daemon_that_holds_the_writing_end_does_not_keep_the_next_stage_waiting() -> None:
    daemon = "setsid sleep 60 & echo $!"
    with subprocess.Popen(["sh", "-c", f"({daemon}) | cat"], stdout=subprocess.PIPE, text=True) as outside:
        assert outside.stdout is not None
        pid = int(outside.stdout.readline())
        with pytest.raises(subprocess.TimeoutExpired):
            outside.wait(0.5)
        os.kill(pid, 9)
    result = (sh(daemon) | sh("cat; echo end")).run(timeout=SECONDS)
    assert result.text.endswith("\nend\n") and result.outcome is Outcome.EXITED


def test_a_daemon_that_holds_the_reading_end_does_not_keep_the_stage_before_from_its_signal() -> None:
    result = (Stage({}, ["yes"]) | sh("setsid sleep 60 & head -n 1")).run(timeout=SECONDS)
    assert result.text == "y\n" and result.stages["stage-0"].exit_code == 141


def test_a_stage_that_reads_ahead_or_closes_early_harms_only_itself() -> None:
    greedy = python("import os\nwhile os.read(0, 1 << 20): pass\nprint('all mine')")
    assert (sh("seq 1 100000") | greedy).run(timeout=SECONDS).text == "all mine\n"
    closing = python("import os, time\nos.close(0); os.close(1); time.sleep(0.3)")
    result = (Stage({}, ["yes"]) | closing | sh("cat; echo end")).run(timeout=SECONDS)
    assert result.text == "end\n" and result.stages["stage-1"].ok
    assert result.stages["stage-0"].exit_code == 141


def test_a_flood_on_every_stream_is_bounded() -> None:
    flood = sh("cat /dev/zero >&2 & exec cat /dev/zero")
    bounded = {"limits": {"output": "64K"}}
    last = Stage(
        bounded,
        ["sh", "-c", "cat >/dev/null & head -c 2000000 /dev/zero; head -c 2000000 /dev/zero >&2; sleep 1"],
    )
    first = Stage(bounded, flood.command)
    result = (first | last).run(timeout=2)
    assert result.outcome is Outcome.TIMED_OUT or result.stages["stage-0"].exit_code
    for stage in result.stages.values():
        assert len(stage.stdout) <= 1 << 16 and len(stage.stderr) <= 1 << 16
    assert result.truncated and result.stages["stage-0"].truncated


def test_a_stage_that_holds_its_pipes_open_ends_with_the_time_of_the_whole() -> None:
    holding = python("import os, signal, time\nsignal.signal(15, 1); signal.signal(13, 1)\ntime.sleep(60)")
    began = time.monotonic()
    result = Pipeline([holding, sh("cat"), sh("cat; echo end")]).run(timeout=1)
    assert result.outcome is Outcome.TIMED_OUT
    assert time.monotonic() - began < 20


def test_a_stage_that_makes_its_end_nonblocking_does_not_disturb_its_neighbour() -> None:
    first = python("import os, time\nos.set_blocking(1, False); os.write(1, b'x'); time.sleep(0.5)")
    second = python("import os\nprint(os.get_blocking(0), os.read(0, 9), os.read(0, 9))")
    assert (first | second).run(timeout=SECONDS).text == "True b'x' b''\n"
