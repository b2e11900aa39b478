"""What else a program can make long, wide, deep or many, and what that costs whoever looks at it.

`test_supervisor_memory` has the changes of a layer. Here are the files of a living sandbox, outputs, logs,
answers of interpreters and functions, merges, repositories, requests for sandboxes, and the register. Each
look is taken in a process of its own, so that the peak of memory is that of the look.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import DeniedError, LimitError, Policy, Sandbox
from stockade.functions import channel
from stockade.functions.reply import FunctionError
from stockade.functions.sandboxed_function import call
from stockade.receipt import account
from stockade.workspace.files import files as files_module
from stockade.workspace.files import tree_operations
from support import jobs
from support.boxfiles import sandbox, sh
from support.paths import ROOT

MIB = 1 << 20
ALLOWED = 64 * MIB
#: No look takes longer, also on a busy machine.
SOON = 25.0
PYTHON = "/usr/bin/python3"

#: What every look begins with: `measured` notes what an act took, and what it gave or raised.
BEFORE = '''
import contextlib, io, json, os, subprocess, sys, time
import stockade, stockade.cli, stockade.sandbox.sandbox, stockade.workspace.files.files
import stockade.sessions.interpreter
import stockade.sandbox.workspace, stockade.sessions.background, stockade.receipt.builder
import stockade.workspace.merge.merge
from stockade import Policy, Sandbox, Workspace
from stockade.cli import ps
from stockade.runs.register import register
tree, noted = sys.argv[1], {}

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

def measured(name, act):
    before, begin = peak(), time.monotonic()
    try:
        said = act()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"[:1000]
    noted[name] = {"memory": peak() - before, "seconds": time.monotonic() - begin, "said": said}

def ran(code, *words, **policy):
    result = stockade.run(["/usr/bin/python3", "-c", code, *map(str, words)], Policy(**policy), timeout=60)
    assert result.ok, result.stderr[-500:]
    return result

NAMES = """
import os, sys
place, kind, count, deep, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
os.makedirs(place, exist_ok=True)
os.chdir(place)
for _ in range(deep):
    os.mkdir("d" * size)
    os.chdir("d" * size)
for number in range(count):
    name = f"{number:0255}"
    os.symlink("n" * 4000, name) if kind == "links" else os.mkdir(name)
"""
'''


def looked(tree: Path, look: str) -> dict[str, Any]:
    """What each act of a look gave, once its memory and time were seen to be small."""
    words = [sys.executable, "-c", f"{BEFORE}\n{look}\nprint(json.dumps(noted))", str(tree)]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tree, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    noted = json.loads(done.stdout.splitlines()[-1])
    for name, one in noted.items():
        assert one["memory"] < ALLOWED, (name, one)
        assert one["seconds"] < SOON, (name, one)
    return {name: one["said"] for name, one in noted.items()}


class TestFilesOfALivingSandbox:
    def test_with_long_paths_are_listed_searched_and_removed(self, workspace: Path) -> None:
        nested, many = 98, 4000
        assert nested * 255 * many > ALLOWED, "a path for each of them would be too much"
        said = looked(
            workspace,
            f"""
deep = "/tmp/t/x" + "/" + "/".join(["d" * 255] * {nested})
with Sandbox(Policy(workspace=tree)) as box:
    for place, kind in (("/tmp/t/x", "links"), ("/tmp/t/y", "directories")):
        made = [place, kind, "{many}", "{nested}", "255"]
        assert box.run(["/usr/bin/python3", "-c", NAMES, *made]).ok
    short = lambda found: (len(found), found.cut[:400])
    measured("list", lambda: short(box.files.list(deep)))
    measured("search", lambda: short(box.files.search("**", "/tmp/t")))
    measured("search in vain", lambda: short(box.files.search("**/nothing", "/tmp/t")))
    measured("move", lambda: box.files.move("/tmp/t/y", "y"))
    measured("remove", lambda: [box.files.remove(one, recursive=True) for one in ("/tmp/t/x", "/tmp/t/y")])
    measured("what is left", lambda: box.run(["sh", "-c", "ls -d /tmp/t/x /tmp/t/y y | wc -l"]).text.strip())
""",
        )
        for name in ("list", "search"):
            assert 0 < said[name][0] < many and "10 MiB" in said[name][1], name
        assert said["search in vain"][0] == 0 and "cannot be searched" in said["search in vain"][1]
        assert said["move"].startswith("LimitError") and "paths take more than 10 MiB" in said["move"]
        assert said["what is left"] == "0"

    def test_that_lie_deep_hold_nobody_up(self, workspace: Path) -> None:
        said = looked(
            workspace,
            """
with Sandbox(Policy(workspace=tree)) as box:
    assert box.run(["/usr/bin/python3", "-c", NAMES, "/tmp/t/x", "", "0", "1600", "1"]).ok
    measured("search", lambda: box.files.search("**/nothing", "/tmp/t").cut)
    measured("move", lambda: box.files.move("/tmp/t/x", "x"))
    measured("remove", lambda: box.files.remove("/tmp/t/x", recursive=True))
    measured("what is left", lambda: box.run(["sh", "-c", "ls -dA /tmp/t/x .??* * | wc -l"]).text.strip())
""",
        )
        assert "cannot be searched" in said["search"] and len(said["search"]) < 400
        assert said["move"].startswith("LimitError") and "deeply nested" in said["move"]
        assert said["remove"] is None and said["what is left"] == "0"

    def test_are_read_and_replaced_within_the_limit(self, workspace: Path) -> None:
        read, whole = 48, files_module.READ_LIMIT // MIB
        said = looked(
            workspace,
            f"""
with Sandbox(Policy(workspace=tree)) as box:
    box.run(["truncate", "-s", "{read}M", "/tmp/file"])
    box.run(["sh", "-c", "head -c 9000000 /dev/zero | tr '\\\\0' ' ' > /tmp/spaces"])
    measured("read", lambda: len(box.files.read("/tmp/file")))
    measured("read more", lambda: len(box.files.read("/tmp/file", limit=1 << 20)))
    measured("replace", lambda: box.files.replace("/tmp/spaces", " ", "x" * 10))
    measured("replace some", lambda: box.files.replace("/tmp/spaces", " ", "x" * 10, count=5))
""",
        )
        assert said["read"] == read * MIB and said["read more"].startswith("LimitError")
        assert (
            f"would become larger than {whole * MIB} bytes" in said["replace"] and said["replace some"] == 5
        )

    def test_that_somebody_goes_on_making_are_not_removed_for_ever(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fill = """
import itertools, os
os.mkdir("/tmp/full"); os.chdir("/tmp/full")
for number in itertools.count():
    try:
        os.makedirs(f"{number}/a")
    except FileNotFoundError:
        break
    if number == 3000: print(1, flush=True)
"""
        with sandbox(workspace) as (box, files), box.start([PYTHON, "-c", fill]) as process:
            assert process.stdout is not None and process.stdout.read(1) == b"1"
            with monkeypatch.context() as patched:
                patched.setattr(tree_operations, "REMOVAL_SECONDS", 0.05)
                with pytest.raises(DeniedError, match="filling it again"):
                    files.remove("/tmp/full", recursive=True)
            process.kill()
            process.wait()
            files.remove("/tmp/full", recursive=True)
            assert len(files.search("/tmp/full")) == 0

    def test_are_moved_when_they_are_not_too_many(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tree_operations, "MOST_COPIED", 50)
        with sandbox(workspace) as (box, files):
            sh(box, "mkdir -p few/sub many; touch few/sub/file; cd many; seq 60 | xargs touch")
            files.move("few", "/tmp/few")
            with pytest.raises(LimitError, match="more than 50 entries"):
                files.move("many", "/tmp/many")
            left = sh(box, "ls /tmp/few/sub; ls -dA /tmp/many /tmp/.s* | wc -l; ls many | wc -l")
            assert left.split() == ["file", "0", "60"]


#: Code that answers in place of its driver.
FORGE = """
import gc, os
driver = next(one for one in gc.get_objects() if type(one).__name__ == "Driver")
long = (1 << 16).to_bytes(8, "big")
def forged(letters, count, content):
    value = letters + b"\\xff" + count.to_bytes(8, "big") + content
    return type(driver).send.__globals__["encoder"].encode({"value": value}, 1 << 30)
def answer(request, status, said):
    body = %s
    view = memoryview(f"\\n{request['number']} 0 {len(body)}\\n".encode() + body)
    while view:
        view = view[os.write(driver.answers, view):]
driver.send = answer
"""
#: About as long as an answer may be under the usual limit of output.
FORGED = {
    "numbers": "forged(b'pdl', 10_000_000, bytes(10_000_000))",
    "lists": "forged(b'l', 5_000_000, b'l\\0' * 5_000_000)",
    "texts": "forged(b'l', 2_500_000, b'u\\2ab' * 2_500_000)",
    "keys": "forged(b'd', 1_000_000, b''.join(b'u\\7%07dN' % one for one in range(1_000_000)))",
    "dates": "forged(b'l', 400_000, b'x\\4datet\\3i\\2\\7\\xe8i\\1\\1i\\1\\1' * 400_000)",
    "paths": "forged(b'l', 150, (b'x\\x09PosixPatht\\1u\\xff%s' % long + b'a/' * 32768) * 150)",
    "no answer": "b'l\\1' * 5_000_000",
}


@pytest.mark.parametrize("kind", FORGED)
def test_an_answer_of_an_interpreter_takes_little(workspace: Path, kind: str) -> None:
    code = FORGE % FORGED[kind]
    said = looked(
        workspace,
        f"""
with Sandbox(Policy()) as box, box.python(ipython=False) as python:
    python.run("1")
    def forged():
        answer = python.run({code!r}, timeout=60)
        return answer.outcome, repr(answer.value), answer.left_out
    measured("forged", forged)
""",
    )
    assert said["forged"] in (["exited", "None", 1], ["exited", "<too large to keep>", 1])


def test_honest_answers_of_an_interpreter_still_arrive() -> None:
    with Sandbox(Policy()) as box, box.python(ipython=False) as python:
        text = python.run("'a, \"b\": [1], ' * 300_000").value
        assert len(text) == 13 * 300_000
        assert python.run("list(range(300_000))").value == list(range(300_000))
        assert python.run("{str(one): (one, b'') for one in range(9000)}").value["7"] == (7, b"")
        left = python.run("list(range(2_000_000))")
        assert left.left_out == 2 and "too large to send" in repr(left.value)


def test_what_is_printed_displayed_and_raised_takes_little(workspace: Path) -> None:
    said = looked(
        workspace,
        """
with Sandbox(Policy(workspace=tree)) as box:
    endless = ["head", "-c", "150000000", "/dev/zero"]
    measured("output", lambda: (lambda done: (done.truncated, done.spilled[0].lost))(box.run(endless)))
    def logged():
        with box.background(endless) as job:
            job.wait(60)
            return len(job.logs(149_000_000).data), len(job.logs(0).data)
    measured("log", logged)
    with box.shell() as shell:
        measured("shell", lambda: shell.run("head -c 150000000 /dev/zero").truncated)
    with box.python(ipython=False) as python:
        def brief(code):
            answer = python.run(code, timeout=60)
            failure = answer.error and (len(answer.error.message), len(answer.error.frames))
            return answer.left_out, failure, len(answer.displays)
        measured("displays", lambda: brief("for one in range(100_000): display(str(one) * 100)"))
        measured("picture", lambda: brief("class A:\\n def _repr_png_(self): return bytes(50 << 20)\\nA()"))
        measured("repr", lambda: brief("class A:\\n def __repr__(self): return 'x' * (50 << 20)\\nA()"))
        deep = "def f(n):\\n if n: f(n - 1)\\n raise ValueError('x' * (50 << 20))\\nf(300)"
        measured("traceback", lambda: brief(deep))
tries = "import socket\\nfor _ in range(20_000):\\n try: socket.create_connection(('192.0.2.1', 1))\\n"
tries += " except OSError: pass\\nraise SystemExit(1)"
measured("denials", lambda: stockade.run(["/usr/bin/python3", "-c", tries]).hint)
""",
    )
    assert said["output"] == [True, 0] and said["log"] == [1_000_000, 1 << 20] and said["shell"] is True
    assert said["displays"][0] and said["picture"][0] and said["repr"][0]
    assert said["traceback"] == [0, [10_000, 100], 0]
    assert len(said["denials"] or "") < 1000


def test_the_word_of_an_exception_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "MOST_ERROR", MIB)
    with pytest.raises(FunctionError, match="an exception is larger than allowed"):
        call(jobs.hostile, ("record", b"E" + bytes(2 * MIB)), grace=0, timeout=30)


def test_a_merge_of_many_changes_that_lie_deep_is_soon_done(workspace: Path) -> None:
    said = looked(
        workspace,
        """
one = ran(NAMES, "one", "", 0, 1, 1, workspace=tree).workspace_id
other = ran(NAMES, "other", "directories", 700, 90, 1, workspace=tree).workspace_id
third = ran(NAMES, "other", "links", 700, 90, 1, workspace=tree).workspace_id
measured("merge", lambda: len(Workspace.open(one).merge(Workspace.open(other))))
measured("conflict", lambda: Workspace.open(one).merge(Workspace.open(third)))
for each in (one, other, third):
    Workspace.open(each).discard()
""",
    )
    assert said["merge"] == 700 + 90 + 1
    assert said["conflict"].startswith("ConflictError")


def test_repositories_without_number_refuse_the_next_run_at_once(workspace: Path) -> None:
    said = looked(
        workspace,
        """
make = '''
import itertools, os
spelled = [{letter, letter.upper()} for letter in ".git"]
for _ in range(13):
    os.mkdir("d" * 250); os.chdir("d" * 250)
for number in range(500):
    for name in itertools.product(*spelled): os.makedirs(f"{number}/{''.join(name)}")
'''
mode = {"workspace": {"path": tree, "mode": "rw"}, "protect": ()}
def before():
    result = ran(make, **mode)
    return len(result.handoffs), " ".join(result.warnings)
measured("run", before)
measured("next run", lambda: ran("", **mode).outcome)
""",
    )
    assert said["run"][0] == 1000 and "3000 more files" in said["run"][1]
    assert "PolicyError" in said["next run"] and "more than 1000" in said["next run"]


#: Asks for a sandbox that asks in turn, and says how often it was answered.
ASKING = """
import sys
deep, done = int(sys.argv[2]), 0
for _ in range(20):
    try:
        if deep:
            words = ["python3", "-c", sys.argv[1], sys.argv[1], str(deep - 1)]
            given = delegate(words, {"delegate": deep > 1})
        else:
            given = delegate(["true"])
        done += 1
    except (PermissionError, ConnectionError, KeyError) as error:
        print(error, file=sys.stderr)
        break
print(done)
"""


def test_children_of_children_are_counted_with_the_program_that_asked(
    monkeypatch: pytest.MonkeyPatch, stockade_home: Path
) -> None:
    monkeypatch.setattr(account, "MOST_REQUESTS", 7)
    code = (ROOT / "src/stockade/inside/delegate_request.py").read_text() + ASKING
    result = stockade.run(["python3", "-c", code, code, "2"], Policy(delegate=True), timeout=60)
    assert result.ok and result.receipt is not None
    receipts = subprocess.run(
        [sys.executable, "-m", "stockade", "receipts", "--json"], capture_output=True, text=True, check=True
    )
    made = json.loads(receipts.stdout)
    assert len(made) == 7 + 1, "each child that was asked for, and the program"


def test_a_register_of_thousands_is_read_and_swept(workspace: Path) -> None:
    said = looked(
        workspace,
        """
enter = '''
import os, time
from stockade.runs.register import register
from stockade.runs.register.sandbox_record import SandboxRecord
home = os.environ["STOCKADE_HOME"]
made = [register.enter(home, SandboxRecord(id=register.new_id(), command=("x" * 200,), gate=os.getpid()))
        for _ in range(2000)]
print(1, flush=True)
time.sleep(60)
'''
other = subprocess.Popen([sys.executable, "-c", enter], stdout=subprocess.PIPE)
other.stdout.readline()
def listed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        stockade.cli.main(list(words))
    return shown.getvalue().count("\\n")
measured("ps", lambda: listed("ps"))
measured("run beside them", lambda: stockade.run(["true"]).outcome)
other.kill()
other.wait()
measured("sweep", lambda: len(register.sweep(os.environ["STOCKADE_HOME"])))
measured("ps afterwards", lambda: listed("ps"))
""",
    )
    assert said["ps"] == 2001 and said["ps afterwards"] == 1
    assert said["run beside them"] == "exited" and said["sweep"] == 2000


def test_a_killed_supervisor_leaves_nothing_that_takes_long(workspace: Path) -> None:
    said = looked(
        workspace,
        """
lives = '''
import sys, stockade
code = sys.argv[1] + "\\\\nprint(1, flush=True)\\\\nimport time; time.sleep(60)"
stockade.run(["/usr/bin/python3", "-c", code, "x", "directories", "1500", "98", "255"],
             stockade.Policy(workspace=sys.argv[2]), on_stdout=lambda _: print(1, flush=True))
'''
other = subprocess.Popen([sys.executable, "-c", lives, NAMES, tree], stdout=subprocess.PIPE)
assert other.stdout.readline()
other.kill()
other.wait()
measured("next run", lambda: stockade.run(["true"], Policy(workspace=tree)).outcome)
measured("what is kept", lambda: [bool(one.changes().cut) for one in Workspace.list()])
measured("discard", lambda: [one.discard() for one in Workspace.list()])
""",
    )
    assert said["next run"] == "exited" and said["what is kept"] == [True]
