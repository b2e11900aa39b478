"""A program that makes names, changes and lines without end, to take the supervisor's memory and time.

What looks runs in a process of its own, so that its peak of memory is its own. Each attack is large enough
that keeping all of it would take more than what is allowed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import stockade
from stockade import ConflictError, Policy, SetupError
from stockade.cli import main
from stockade.host import host
from stockade.inside import encoder
from stockade.receipt.verify import check_result
from stockade.runs.decoder import Decoder
from stockade.workspace.diff import diff, layer_walk, line_diff
from stockade.workspace.merge import conflicts
from support import bubblewraps
from support.means import applies

MIB = 1 << 20
ALLOWED = 64 * MIB
PYTHON = "/usr/bin/python3"
#: Below so many nested names of 255 bytes every path takes 25 kB.
NESTED, MANY = 98, 5000

LONG_NAMES = """
import os, sys
count, kind = int(sys.argv[1]), sys.argv[2]
for _ in range(98):
    os.mkdir("d" * 255)
    os.chdir("d" * 255)
open("f", "w").close()
for number in range(count):
    name = f"{number:0255}"
    if kind == "links":
        os.symlink("nowhere", name)
    elif kind == "names":
        os.link("f", name)
    else:
        os.mkdir(name)
"""

#: Does what is asked for in turn, and says how much more memory each took at its peak, and how long.
LOOK = """
import contextlib, io, json, os, sys, time
import stockade, stockade.cli, msgspec, subprocess, hashlib
from stockade.cli import commit, diff, discard, fork, merge, restore, run, snapshot, workspaces
from stockade.receipt import builder
from stockade.runs import finish
from stockade.sandbox import sandbox, workspace
from stockade.workspace import commit, disk_image, tree_copy
from stockade.workspace.diff import diff
from stockade.workspace.merge import merge

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

tree, script, count, kind = sys.argv[1:]
base = peak()
policy = stockade.Policy(workspace=tree, **json.loads(os.environ["CLAUSES"]))
told = {}

def note(name, begin, code):
    told[name] = {"memory": peak() - base, "seconds": time.monotonic() - begin, "code": code}

begin = time.monotonic()
result = stockade.run(["/usr/bin/python3", "-c", script, count, kind], policy, timeout=60)
assert result.ok, result
note("run", begin, 0)
told["result"] = {
    "changes": len(result.changes), "cut": result.changes_cut, "receipt": result.receipt is not None,
    "says": result.receipt.predicate.ending.changes_cut is True, "written": result.usage.bytes_written,
    "lost": len(result.lost),
}
id = result.workspace_id
for words in (
    ["workspaces"], ["workspaces", "--json"], ["diff", id], ["diff", "--name-only", id],
    ["diff", "--stat", id], ["diff", "--json", id], ["diff", "--patch", id], ["snapshot", id, "point"],
    ["restore", id, "point"], ["fork", id], ["commit", id], ["commit", "--json", id], ["ps"], ["logs"],
    ["discard", id],
):
    begin = time.monotonic()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            code = stockade.cli.main(words)
    note(" ".join(word for word in words if word != id), begin, code)
    if words[0] == "commit":
        told.setdefault("said", said.getvalue())
forks = [one.id for one in stockade.Workspace.list()]
for one in forks:
    stockade.Workspace.open(one).discard()
told["forks"] = len(forks)
print(json.dumps(told))
"""


def looked(tree: Path, kind: str, count: int, **clauses: Any) -> dict[str, Any]:
    return watched(tree, LOOK, LONG_NAMES, str(count), kind, **clauses)


def watched(tree: Path, *words: str, **clauses: Any) -> dict[str, Any]:
    """What a process says that looks at the tree."""
    done = subprocess.run(
        [sys.executable, "-c", words[0], str(tree), *words[1:]],
        capture_output=True,
        text=True,
        cwd=tree,
        env={**os.environ, "CLAUSES": json.dumps(clauses)},
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "count", "disk"),
    [("links", MANY, "64M"), ("links", 60_000, "256M"), ("names", MANY, "64M"), ("directories", MANY, "64M")],
)
def test_no_command_on_a_hostile_layer_takes_much_memory_or_time(
    workspace: Path, kind: str, count: int, disk: str
) -> None:
    first = (kind, count) == ("links", MANY)
    applies(first or os.geteuid() != 0, "the same code walks every layer: the ordinary user tries all kinds")
    assert NESTED * 255 * MANY > ALLOWED, "a path for each of them would be too much"
    # As many files as pages fit: more links than those need a larger disk, and have no more memory.
    # Without cgroups the layer is as hostile.
    memory = {"memory": "256M"} if host().has("cgroup.memory") else {}
    told = looked(workspace, kind, count, limits={"disk": disk, **memory})
    _judge(told, workspace)


def test_nor_on_one_that_bubblewrap_made(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewraps.use(bubblewraps.program(bubblewraps.NEW), monkeypatch)
    _judge(looked(workspace, "links", MANY, backend="bwrap"), workspace)


def _judge(told: dict[str, Any], workspace: Path) -> None:
    commands = {name: one for name, one in told.items() if isinstance(one, dict) and "memory" in one}
    assert len(commands) == 16
    for name, one in commands.items():
        assert one["memory"] < ALLOWED, (name, one)
        assert one["seconds"] < 40, (name, one)
    result = told["result"]
    assert 0 < result["changes"] < MANY and "MiB" in result["cut"]
    assert result["receipt"] and result["says"] and result["written"] is None and not result["lost"]
    assert commands["commit"]["code"] == 125 and "more changes than can be committed at once" in told["said"]
    assert commands["discard"]["code"] == 0 and told["forks"] == 1
    assert not list(workspace.iterdir()), "nothing of it has landed"


#: Directories and names of one file, each with a mode of which a commit takes four bits away.
MANY_NOTES = """
import os, sys
files, directories = int(sys.argv[1]), int(sys.argv[2])
os.umask(0)
source = ""
for number in range(directories):
    name = f"{number:x}".rjust(30, "-")
    os.mkdir(name)
    os.chmod(name, 0o6777)
for number in range(files):
    name = f"{number % directories:x}".rjust(30, "-") + f"/{number:028}"
    if number % 30_000:
        os.link(source, name)
    else:
        source = name
        os.close(os.open(source, os.O_WRONLY | os.O_CREAT, 0o666))
        os.chmod(source, 0o6777)
"""

COMMIT = """
import json, os, sys, tempfile
import stockade, stockade.cli, msgspec, subprocess, hashlib
from stockade.cli import commit, run
from stockade.receipt import builder
from stockade.runs import finish
from stockade.sandbox import sandbox, workspace
from stockade.workspace import commit
from stockade.workspace.diff import diff
from stockade.workspace.merge import merge

def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

tree, script, files, directories = sys.argv[1:]
os.umask(0o22)
base = peak()
words = ["run", "-w", tree, "--commit", "--json", "--", "/usr/bin/python3", "-c", script, files, directories]
told = os.dup(1)
file = tempfile.TemporaryFile()
os.dup2(file.fileno(), 1)
code = stockade.cli.main(words)
used = peak() - base
os.dup2(told, 1)
file.seek(0)
said = json.load(file)
print(json.dumps({
    "memory": used, "code": code, "changes": len(said["changes"]), "cut": said["changes_cut"],
    "committed": len(said["committed"]["changes"]), "notes": len(said["committed"]["notes"]),
    "error": said["commit_error"], "receipt": bool(said["receipt"]["id"]),
}))
"""


@pytest.mark.timeout(300)
def test_a_run_and_its_commit_take_little_memory_for_each_change(workspace: Path) -> None:
    """With as many changes as there may be a commit takes minutes, so that a tenth of them is tried."""
    directories, files = (
        layer_walk.MOST_DIRECTORIES // 10,
        (layer_walk.MOST_ENTRIES - layer_walk.MOST_DIRECTORIES) // 10,
    )
    told = watched(workspace, COMMIT, MANY_NOTES, str(files), str(directories))
    count = files + directories
    assert told["code"] == 0 and told["receipt"] and told["error"] == told["cut"] == ""
    assert told["changes"] == told["committed"] == count and told["notes"] == 4 * count
    assert told["memory"] < ALLOWED // 4, told


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real bound takes seconds to reach."""
    monkeypatch.setattr(layer_walk, "MOST_ENTRIES", 50)


MORE = "mkdir many some; for i in $(seq 80); do echo > many/$i; done; echo 1 > some/one; echo 2 > some/two"


@pytest.mark.usefixtures("few")
class TestAListThatIsCut:
    def test_says_so_and_has_a_receipt_that_does(self, workspace: Path) -> None:
        result = stockade.run(["sh", "-c", MORE], Policy(workspace=str(workspace)))
        assert result.ok and len(result.changes) <= 50 and "more than 50 entries" in result.changes_cut
        assert result.receipt is not None and result.receipt.predicate.ending.changes_cut is True
        check_result(result.receipt, result)
        changes = stockade.Workspace.open(result.workspace_id).changes()
        assert changes.cut == result.changes_cut and len(changes) == len(result.changes)

    def test_one_that_is_not_cut_says_nothing(self, workspace: Path) -> None:
        result = stockade.run(["sh", "-c", "echo > new"], Policy(workspace=str(workspace)))
        assert result.changes_cut == "" and result.receipt is not None
        assert b"changes_cut" not in result.receipt.payload

    def test_is_never_committed(self, workspace: Path) -> None:
        policy = Policy(workspace=str(workspace))
        result = stockade.run(["sh", "-c", MORE], policy, on_exit="commit")
        assert result.committed is None and "more changes than can be committed" in result.commit_error
        with pytest.raises(SetupError, match="more than 50 entries"):
            stockade.Workspace.open(result.workspace_id).commit()
        assert not list(workspace.iterdir())

    def test_is_committed_in_parts_that_were_named(self, workspace: Path) -> None:
        result = stockade.run(["sh", "-c", MORE], Policy(workspace=str(workspace)))
        one = stockade.Workspace.open(result.workspace_id)
        assert [file.path for file in one.diff(["some"]).files] == ["some", "some/one", "some/two"]
        done = one.commit(["some", "many/7"])
        assert sorted(change.path for change in done.changes) == [
            "many", "many/7", "some", "some/one", "some/two",
        ]  # fmt: skip
        assert not done.closed, "there is more, which nobody has looked at"
        assert (workspace / "some" / "two").read_text() == "2\n"
        assert os.listdir(workspace / "many") == ["7"]
        with pytest.raises(SetupError, match="at once"):
            one.commit(["many"])

    def test_is_not_merged(self, workspace: Path) -> None:
        policy = Policy(workspace=str(workspace))
        one, other = (
            stockade.Workspace.open(stockade.run(["sh", "-c", script], policy).workspace_id)
            for script in ("echo > mine", MORE)
        )
        with pytest.raises(SetupError, match="more changes than can be merged"):
            one.merge(other)
        assert [change.path for change in one.changes()] == ["mine"]

    def test_is_said_on_the_command_line(
        self, workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(workspace)
        id = stockade.run(["sh", "-c", MORE], Policy(workspace=str(workspace))).workspace_id
        assert main(["run", "--discard", "--", "sh", "-c", MORE]) == 0
        said = capsys.readouterr().err
        assert "stockade: more than " in said and "the list of changes is cut" in said
        assert main(["diff", "--name-only", id]) == 0
        assert "the list of changes is cut" in capsys.readouterr().err
        assert main(["workspaces"]) == 0
        assert "> " in capsys.readouterr().out
        assert main(["commit", id]) == 125
        assert f"stockade commit {id} PATH" in capsys.readouterr().err
        assert main(["commit", id, "some"]) == 0


def test_everything_is_discarded_however_deep_and_closed(workspace: Path) -> None:
    script = """
import os
for number in range(300):
    os.mkdir("d"); open("f", "w").close(); os.chdir("d")
for _ in range(400): os.mkdir(f"{_}")
for _ in range(300):
    os.chdir(".."); os.chmod("d", 0)
"""
    result = stockade.run([PYTHON, "-c", script], Policy(workspace=str(workspace)))
    assert result.ok
    one = stockade.Workspace.open(result.workspace_id)
    one.discard()
    assert not os.path.lexists(one.layer) and not os.listdir(os.path.dirname(one.layer))


class TestComparingThatTakesForEver:
    def test_ends_and_what_is_left_counts_as_changed(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (workspace / "large").write_bytes(b"same" * 1000)
        (workspace / "other").write_text("1")
        policy, script = Policy(workspace=str(workspace)), "touch large; echo 22 > other"
        assert [one.path for one in stockade.run(["sh", "-c", script], policy).changes] == ["other"]
        monkeypatch.setattr(layer_walk, "MOST_SECONDS", 0.0)
        result = stockade.run(["sh", "-c", script], policy)
        assert [one.path for one in result.changes] == ["large", "other"]
        assert any("1 file listed as changed without being compared" in one for one in result.warnings)
        one = stockade.Workspace.open(result.workspace_id)
        assert one.diff().unsure == 1
        assert main(["diff", "--stat", one.id]) == 0
        assert "1 file shown as changed without a comparison" in capsys.readouterr().err
        done = one.commit()
        assert [note.path for note in done.notes if "without being compared" in note.what] == ["large"]
        assert (workspace / "large").read_bytes() == b"same" * 1000

    def test_whether_a_removed_directory_changed_is_refused(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (workspace / "full").mkdir()
        (workspace / "full" / "file").touch()
        result = stockade.run(["rm", "-r", "full"], Policy(workspace=str(workspace)))
        one = stockade.Workspace.open(result.workspace_id)
        monkeypatch.setattr(conflicts, "MOST_SECONDS", 0.0)
        with pytest.raises(ConflictError, match="takes more than 0 seconds"):
            one.commit()
        assert (workspace / "full" / "file").exists()
        assert one.commit(force=["full"]).closed and not (workspace / "full").exists()

    def test_contents_that_are_not_shown_are_not_read_for_ever(
        self, workspace: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(diff, "READ_IN_ALL", 1000)
        script = "for i in 1 2 3; do head -c 900 /dev/zero > $i; done"
        one = stockade.Workspace.open(
            stockade.run(["sh", "-c", script], Policy(workspace=str(workspace))).workspace_id
        )
        assert [(file.binary, file.cut) for file in one.diff().files] == [
            (True, False),
            (False, True),
            (False, True),
        ]


class TestLinesThatTakeForEver:
    def test_to_compare(self) -> None:
        # Everything is equal and in the wrong place: each diagonal is long.
        old = b"a\n" * 50_000 + b"b\n" * 1000
        new = b"b\n" * 1000 + b"a\n" * 50_000
        begin = time.process_time()
        effort = line_diff.Effort()
        for _ in range(20):
            assert line_diff.unified(old, new, effort)[0]
        assert time.process_time() - begin < 30, "one pair has its share, and all together theirs"

    def test_in_many_files_share_what_may_be_done(self) -> None:
        effort = line_diff.Effort(1000)
        old, new = b"".join(b"%d\n" % i for i in range(500)), b"".join(b"x%d\n" % i for i in range(500))
        near = old.replace(b"250\n", b"more\n")
        assert line_diff.unified(old, near, effort)[1:] == (1, 1)
        line_diff.unified(old, new, effort)
        assert effort.share() <= 0
        text, added, removed = line_diff.unified(b"0\n" + old + b"9\n", b"1\n" + near + b"8\n", effort)
        assert (added, removed) == (502, 502), "replaced as a whole, and still right"
        assert text.count(b"\n+") == 502


@pytest.mark.parametrize(
    "value",
    [
        [set() for _ in range(20_000)], [frozenset() for _ in range(20_000)], [{None} for _ in range(20_000)],
        set(range(50_000)), [{} for _ in range(20_000)], list(range(10**6, 10**6 + 50_000)),
    ],
    ids=["sets", "frozensets", "sets-of-one", "a-set", "dicts", "numbers"],
)  # fmt: skip
def test_a_result_of_a_function_takes_no_more_memory_than_its_room(value: object) -> None:
    data = encoder.encode(value, 1 << 30)
    decoder = Decoder(data, 1 << 40)
    tracemalloc.start()
    made = decoder.whole()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert made == value
    assert peak <= 1.2 * ((1 << 40) - decoder.room)
