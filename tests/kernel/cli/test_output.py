"""Output beyond the limit: bounded memory, a file that has the rest, and a count of what was lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import stockade
from stockade import Policy, Result, Sandbox
from stockade.runs.register import register
from support.means import applies, need_program

PYTHON = "/usr/bin/python3"
MEBIBYTE = 1 << 20
#: A gigabyte where there is time for it.
MUCH = (1024 if os.environ.get("CI") else 256) * MEBIBYTE
#: What counts up can be told from what merely has the right size.
COUNT = "import sys\nw = sys.stdout.buffer.write\nfor i in range(int(sys.argv[1])): w(b'%08x' % i)"


def spilled(result: Result, stream: str = "stdout") -> bytes:
    """What the file of that stream has, which must be as much as the result says."""
    (found,) = [found for found in result.spilled if found.stream == stream]
    content = Path(found.path).read_bytes()
    assert len(content) == found.size and found.lost == 0
    return content


def test_what_is_kept_and_what_is_spilled_are_everything() -> None:
    result = stockade.run([PYTHON, "-c", COUNT, "500000"], Policy(limits={"output": 1_000_003}))
    assert result.ok and result.truncated and len(result.stdout) == 1_000_003
    assert result.stdout + spilled(result) == b"".join(b"%08x" % n for n in range(500_000))
    assert result.stderr == b""


def test_the_streams_are_spilled_apart() -> None:
    script = "import os\nfor i in range(3000): os.write(1, b'o%05d' % i); os.write(2, b'e%06d' % i)"
    result = stockade.run([PYTHON, "-c", script], Policy(limits={"output": 1001}))
    assert result.stdout + spilled(result) == b"".join(b"o%05d" % n for n in range(3000))
    assert result.stderr + spilled(result, "stderr") == b"".join(b"e%06d" % n for n in range(3000))
    assert len({found.path for found in result.spilled}) == 2


def test_only_what_is_too_much_is_spilled() -> None:
    policy = Policy(limits={"output": 1000})
    assert stockade.run(["head", "-c", "1000", "/dev/zero"], policy).spilled == ()
    result = stockade.run(["sh", "-c", "head -c 1000 /dev/zero; head -c 1001 /dev/zero >&2"], policy)
    assert [(found.stream, found.size) for found in result.spilled] == [("stderr", 1)]


def test_bytes_that_are_no_text_are_exact() -> None:
    every = bytes(range(256)) * 40
    script = "import sys; sys.stdout.buffer.write(bytes(range(256)) * 40)"
    result = stockade.run([PYTHON, "-c", script], Policy(limits={"output": 129}))
    assert result.stdout + spilled(result) == every
    assert "\ufffd" in result.text


def test_a_living_sandboxs_runs_have_files_of_their_own() -> None:
    with Sandbox(Policy(limits={"output": 10})) as box:
        results = [box.run(["echo", f"{n} and more than ten"]) for n in range(3)]
    assert [r.text + spilled(r).decode() for r in results] == [f"{n} and more than ten\n" for n in range(3)]


def test_the_file_is_for_its_owner_only(stockade_home: Path) -> None:
    result = stockade.run(["head", "-c", "5000", "/dev/zero"], Policy(limits={"output": 1000}))
    (found,) = result.spilled
    path = Path(found.path)
    assert path.is_relative_to(stockade_home) and path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_run_that_is_ended_keeps_what_it_had_printed() -> None:
    policy = Policy(limits={"output": 1000})
    result = stockade.run(["sh", "-c", "seq 1000; exec sleep 60"], policy, timeout=0.6)
    assert result.outcome == "timed-out"
    assert result.stdout + spilled(result) == b"".join(b"%d\n" % n for n in range(1, 1001))


KILLED = """
import os, signal, stockade
from stockade import Policy
seen = []
def kill(data):
    seen.append(data)
    if len(seen) > 5: os.kill(os.getpid(), signal.SIGKILL)
stockade.run(["yes"], Policy(limits={"output": 10}), on_stdout=kill)
"""


@pytest.mark.usefixtures("swept")
def test_what_a_killed_supervisor_had_written_of_it_is_swept(stockade_home: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED], timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert list(stockade_home.glob("run/*/*.stdout")), "nothing was written yet"
    assert register.sweep(str(stockade_home))
    assert not list(stockade_home.rglob("*.stdout"))


GROWTH = """
import json, os, sys
import stockade
from stockade import Policy

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

stockade.run(["head", "-c", "1000", "/dev/zero"], Policy(limits={"output": 10}))
before = peak()
result = stockade.run(["head", "-c", sys.argv[1], "/dev/zero"], Policy(limits={"output": "10M"}))
(spilled,) = result.spilled
size = os.stat(spilled.path).st_size
os.unlink(spilled.path)
print(json.dumps([peak() - before, result.ok, len(result.stdout), spilled.size, spilled.lost, size]))
"""


def test_much_output_costs_little_memory() -> None:
    command = [sys.executable, "-c", GROWTH, str(MUCH)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=200, check=True)
    grown, ok, kept, size, lost, on_disk = json.loads(done.stdout)
    assert ok and (kept, kept + size, lost, on_disk) == (10 * MEBIBYTE, MUCH, 0, size)
    assert grown < 32 * 1024, f"grew by {grown} KiB"


FULL = """
import json, resource, stockade
from stockade import Policy
assert stockade.run(["true"]).ok
limit = int({limit!r} or 0)
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
policy = Policy(limits={{"output": 1000}})
result = stockade.run(["sh", "-c", "head -c 5000000 /dev/zero; echo end >&2"], policy)
found = [[s.stream, s.size, s.lost] for s in result.spilled]
print(json.dumps([result.ok, len(result.stdout), result.stderr.decode(), result.truncated, found]))
"""


def judge_full(said: bytes) -> None:
    ok, kept, err, truncated, found = json.loads(said)
    assert ok and kept == 1000 and err == "end\n" and truncated
    ((stream, size, lost),) = found
    assert stream == "stdout" and size + lost == 5_000_000 - 1000
    assert lost > 0


def test_a_file_that_may_not_grow_loses_bytes_and_says_how_many() -> None:
    code = FULL.format(limit="1000000")
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=60, check=True)
    judge_full(done.stdout)


def test_a_full_disk_loses_bytes_and_says_how_many(stockade_home: Path) -> None:
    applies(os.geteuid() == 0, "for root only: it mounts a small file system")
    stockade_home.mkdir(mode=0o700)
    mount = f'mount -t tmpfs -o size=2M,mode=700 none {stockade_home} && exec {sys.executable} -c "$0"'
    command = [need_program("unshare"), "--mount", "sh", "-c", mount, FULL.format(limit="")]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=60, check=True)
    judge_full(done.stdout)


def test_a_place_that_cannot_be_written_loses_everything_beyond_and_says_so(stockade_home: Path) -> None:
    stockade.run(["true"]).check()
    (stockade_home / "output").write_text("a file in the way")
    result = stockade.run(["head", "-c", "5000", "/dev/zero"], Policy(limits={"output": 1000}))
    assert result.ok and len(result.stdout) == 1000
    ((stream, path, size, lost),) = [(s.stream, s.path, s.size, s.lost) for s in result.spilled]
    assert (stream, path, size, lost) == ("stdout", "", 0, 4000)


STOCKADE = [sys.executable, "-c", "import sys; from stockade import cli; sys.exit(cli.main(sys.argv[1:]))"]
#: What a terminal would obey: clear the screen, set the title, go back over the line.
NASTY = "\x1b[2J\x1b]0;title\x07\rx"


class TestCommandLine:
    @pytest.mark.parametrize("flags", [[], ["-v"], ["--json"]])
    def test_our_own_words_have_no_control_characters(self, workspace: Path, flags: list[str]) -> None:
        (workspace / NASTY).write_text("")
        for command in ([f"no-{NASTY}"], ["sh", "-c", f"echo > '{NASTY}2'; kill -9 $$"]):
            done = subprocess.run(
                [*STOCKADE, "run", *flags, "--", *command], cwd=workspace, capture_output=True, check=False
            )
            assert done.returncode in (127, 137)
            said = done.stderr + done.stdout
            assert said and not {0x1B, 0x07, 0x0D} & set(said)

    def test_the_programs_own_bytes_pass_through_untouched(self, workspace: Path) -> None:
        command = [*STOCKADE, "run", "--", "printf", r"\033[2J\007\r\377"]
        done = subprocess.run(command, cwd=workspace, capture_output=True, check=True)
        assert (done.stdout, done.stderr) == (b"\x1b[2J\x07\r\xff", b"")

    def test_in_json_the_spilled_file_is_named_with_its_size(self, workspace: Path) -> None:
        command = [
            *STOCKADE,
            "run",
            "--json",
            "--limit",
            "output=1000",
            "--",
            "head",
            "-c",
            "5000",
            "/dev/zero",
        ]
        done = subprocess.run(command, cwd=workspace, capture_output=True, check=True)
        (found,) = json.loads(done.stdout)["spilled"]
        assert (found["stream"], found["size"], found["lost"]) == ("stdout", 4000, 0)
        assert Path(found["path"]).read_bytes() == bytes(4000)
