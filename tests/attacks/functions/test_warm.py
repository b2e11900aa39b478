"""Copies of a template: nothing of the host, of the gate or of another sandbox is in them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import stockade
from stockade import Policy, SetupError
from stockade.backends.mechanisms import LANDLOCK_SCOPES
from stockade.functions import WarmPython
from stockade.gate import client
from stockade.gate import operations as ops
from stockade.host import host
from stockade.runs import prepare
from support.gatebuild import sabotaged_library
from support.means import applies
from support.warm import environment, template_pid

#: Looks for words in all of its own memory. Each letter of theirs is moved on by one, here and in what is
#: read, so that no copy of a word is made by the search itself.
SEARCH = """
import sys
words = [word.encode() for word in sys.argv[1:]]
moved = bytes((byte + 1) % 256 for byte in range(256))
found = set()
with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb", 0) as memory:
    for line in maps.readlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if line.split()[1][0] == "r" and "[v" not in line:
            memory.seek(first)
            content = memory.read(last - first).translate(moved)
            found |= {word for word in words if word in content}
print(*sorted(word.decode() for word in found))
"""


def moved(word: str) -> str:
    return "".join(chr(ord(letter) + 1) for letter in word)


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with WarmPython(preload=["json"], size=0) as found:
        yield found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def gone(*pids: int) -> bool:
    limit = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < limit:
        time.sleep(0.01)
    return not any(map(alive, pids))


def test_a_copy_has_three_descriptors_and_shares_no_memory(python: WarmPython) -> None:
    descriptor = os.open("/etc", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    look = (
        "import os, json\n"
        "shared = [line for line in open('/proc/self/maps') if 's ' in line and 'gconv-' not in line]\n"
        "numbers = os.listdir('/proc/self/fd')[:3]\n"
        "print(json.dumps([{n: os.readlink('/proc/self/fd/' + n).split(':')[0] for n in numbers}, shared]))"
    )
    try:
        with WarmPython(size=0) as fresh, fresh.sandbox() as box:
            results = [fresh.run(look), box.run(fresh.code(look)), box.run(fresh.code(look))]
    finally:
        os.close(descriptor)
    for result in results:
        assert json.loads(result.check().text) == [{"0": "pipe", "1": "pipe", "2": "pipe"}, []]
    listed = "import os; print(sorted(os.listdir('/proc/self/fd')))"
    assert python.run(listed).text == "['0', '1', '2', '3']\n"  # the last is the look itself


def test_nothing_of_the_host_or_of_another_sandbox_is_in_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stockade_home: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "denied-name-7f3a").write_text("")
    monkeypatch.setenv("HOST_TOKEN", "host-secret-91bc")
    policy = Policy(workspace=str(place), deny=[str(place / "denied-name-7f3a")])
    earlier = "kept = 'earlier-secret-55d0'; print(kept)"
    hidden = ["host-secret-91bc", "earlier-secret-55d0", "variable-secret-2e", "denied-name-7f3a"]
    hidden.append(str(stockade_home))
    words = list(map(moved, hidden))
    with WarmPython(policy, size=0, on_exit="discard") as python:
        for _ in range(3):
            assert python.run(earlier, env={"X": "variable-secret-2e"}).text == "earlier-secret-55d0\n"
        # A control: what it is given itself is found.
        own = python.run(SEARCH, args=[*words, moved("given-own")], env={"Y": "given-own"}).check().text
        assert own == moved("given-own") + "\n"
        with python.sandbox() as box:
            box.run(["true"], env={"X": "variable-secret-2e"}).check()
            box.run(python.code(earlier)).check()
            assert box.run(python.code(SEARCH, words)).check().text == "\n"


def test_the_environment_is_the_sandboxes(python: WarmPython, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_TOKEN", "x")
    code = (
        "import os\n"
        "print(sorted(os.environ), sorted(line.split('=')[0] for line in os.popen('env')))\n"
        "print('TOKEN' in open('/proc/self/environ').read())"
    )
    cold = stockade.run(["python3", "-c", code]).text.splitlines()
    assert python.run(code).text.splitlines() == [cold[0], "False"]


def test_the_gate_and_the_template_cannot_be_looked_into(python: WarmPython) -> None:
    code = (
        "import os\n"
        "for name in ('mem', 'environ', 'fd', 'maps'):\n"
        "    try:\n"
        "        found = os.readlink('/proc/1/fd/0') if name == 'fd' else open('/proc/1/' + name).read(1)\n"
        "        print(name, 'ok', found)\n"
        "    except OSError as error:\n"
        "        print(name, type(error).__name__)\n"
        "print(sorted(filter(str.isdigit, os.listdir('/proc'))))"
    )
    *refused, seen = python.run(code).check().text.splitlines()
    assert [line.split()[1] for line in refused] == ["PermissionError"] * 4
    assert seen == "['1', '2']"
    # What is not dumpable belongs to root in /proc.
    applies(os.geteuid() != 0, "to root everything in /proc belongs anyway")
    assert os.stat(f"/proc/{template_pid(python)}/environ").st_uid == 0
    assert os.stat("/proc/self/environ").st_uid != 0


#: Which way to change a file of one's own is refused, and how.
CHANGES = """
import os, sys
path = sys.argv[1]
ways = {
    "mode": lambda: os.chmod(path, 0o4777),
    "times": lambda: os.utime(path, (1, 1)),
    "attribute": lambda: os.setxattr(path, "user.x", b"1"),
    "write": lambda: os.close(os.open(path, os.O_WRONLY)),
    "held": lambda: os.close(os.open(f"/proc/self/fd/{os.open(path, os.O_PATH)}", os.O_RDWR)),
}
for name, way in ways.items():
    try:
        way()
        print(name, "ok")
    except OSError as error:
        print(name, os.strerror(error.errno))
"""


@pytest.mark.parametrize("backend", ["native", "landlock"])
def test_the_interpreters_own_file_cannot_be_changed(tmp_path: Path, backend: str) -> None:
    """Past the sandbox's mounts /proc/self/exe leads to a file of the host, which may be the user's own."""
    interpreter = environment(tmp_path / "e")
    interpreter.unlink()
    shutil.copy(os.path.realpath("/usr/bin/python3"), interpreter)
    before = interpreter.stat()
    accept = ["files", "processes", "devices"] if backend == "landlock" else []
    with WarmPython(Policy(backend=backend, accept=accept), python=interpreter, size=0) as python:
        refused = python.run(CHANGES, args=["/proc/self/exe"]).check().text.splitlines()
    if backend == "native":
        assert [line.partition(" ")[2] for line in refused[:3]] == ["Read-only file system"] * 3
    assert len(refused) == 5 and not any(line.endswith("ok") for line in refused)
    after = interpreter.stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
    # A control: nothing else keeps its owner from it.
    done = subprocess.run(
        ["/usr/bin/python3", "-c", CHANGES, interpreter], capture_output=True, text=True, check=True
    )
    assert done.stdout.count("ok") >= 4


SUPERVISOR = """
import sys, time, threading
import stockade
sys.path.insert(0, sys.argv[2])
from support.warm import template_pid
python = stockade.functions.WarmPython(size=1)
threading.Thread(target=lambda: python.run("import time; time.sleep(300)"), daemon=True).start()
time.sleep(0.5)
print(template_pid(python), flush=True)
sys.stdin.read()
"""
HANGING = """
import sys, stockade
stockade.functions.WarmPython(preload=["hang"], python=sys.argv[1])
"""


def below(pid: int) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found += [int(name), *below(int(name))]
        except OSError:
            continue
    return found


@pytest.mark.usefixtures("swept")
def test_a_killed_supervisor_leaves_no_template_and_no_copy() -> None:
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", SUPERVISOR, "", tests]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        template = int(process.stdout.readline())
        everything = [template, *below(template)]
        assert len(everything) >= 3 and all(map(alive, everything))
        process.kill()
        process.wait()
        assert gone(*everything)


@pytest.mark.usefixtures("swept")
def test_nor_does_one_that_is_killed_while_the_template_still_loads(tmp_path: Path) -> None:
    marker = tmp_path / "loading"
    text = f"import os, time\nopen({str(marker)!r}, 'w').write(str(os.getpid()))\ntime.sleep(300)"
    interpreter = environment(tmp_path / "e", hang=text)
    with subprocess.Popen([sys.executable, "-c", HANGING, interpreter]) as process:
        limit = time.monotonic() + 20
        while not (marker.exists() and marker.read_text()) and time.monotonic() < limit:
            time.sleep(0.01)
        template = int(marker.read_text())
        assert alive(template)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert gone(template)


def test_no_step_can_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate in a template is one like any other, which has such a test of all its steps; here are some."""
    library = sabotaged_library(tmp_path)
    monkeypatch.setattr("stockade.gate.library", lambda: str(library))
    place = tmp_path / "place"
    place.mkdir()
    policy = Policy(workspace=str(place), limits={"files": 512})
    prepared = prepare.prepare(policy, command=["/usr/bin/python3"])
    prepared.close(discard=True)
    kinds = {type(op): index for index, op in enumerate(prepared.plan.ops)}
    walls = (
        ops.Overlay,
        ops.Proc,
        ops.Pivot,
        ops.Limit,
        ops.Privileges,
        ops.LandlockRules,
        ops.BindGrant,
        ops.Seccomp,
    )
    orders = [f"op:{kinds[wall]}" for wall in walls]
    orders += [f"flags:{ops.NAMESPACES[name]:#x}" for name in ("user", "pid", "net")]
    orders += ["maps", "filter", *(["scopes"] if host().landlock >= LANDLOCK_SCOPES else [])]
    with WarmPython(policy, python="/usr/bin/python3", size=0, on_exit="discard") as python:
        unnoticed = []
        for order in ["op:9999", *orders]:
            client.shutdown()
            monkeypatch.setattr(client, "EXTRA_ARGUMENTS", (order,))
            try:
                python.run("pass").check()
            except SetupError:
                continue
            unnoticed.append(order)
    assert unnoticed == ["op:9999"]
