"""What a program leaves in its workspace to get at the host through a copy of it, or to stop one."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, Policy, Sandbox, SetupError, StockadeError
from stockade.linux import dirwalk
from stockade.sandbox import freeze
from stockade.workspace import tree_copy
from support.means import applies, need_program
from support.trees import PYTHON, changed

IS_ROOT = os.geteuid() == 0
HOSTILE = """
import os, socket
os.symlink("/etc/passwd", "passwd"); os.symlink("/etc", "etc"); os.symlink("..", "up")
os.symlink("x" * 4000, "long")
os.mkfifo("pipe", 0o600); os.mkfifo("closed-pipe", 0)
with socket.socket(socket.AF_UNIX) as s: s.bind("socket")
os.mkdir("shut"); open("shut/in", "w").write("in"); os.mkdir("shut/er"); open("shut/er/f", "w").write("f")
os.chmod("shut/in", 0); os.chmod("shut/er", 0); os.chmod("shut", 0o300)
open(b"\\xff\\xfe not utf-8 \\n", "w").write("x")
os.mkdir(b"\\xff dir"); open(b"\\xff dir/\\x80", "w").write("y")
open("one", "w").write("linked"); [os.link("one", f"linked-{n}") for n in range(100)]
with open("huge", "w") as f: os.truncate("huge", 1 << 40); f.seek(1 << 39); f.write("middle")
os.mkdir("snapshots"); os.mkdir(".removed-x"); open(".removed-x/f", "w").write("mine")
open("upper", "w").write("u")
open("suid", "w").write("#!/bin/sh"); os.chmod("suid", 0o6755)
os.setxattr("one", "user.note", b"kept"); os.mkdir("sticky"); os.chmod("sticky", 0o1777)
"""
DEEP = """
import os, sys
for _ in range(int(sys.argv[1])):
    os.mkdir("d"); os.chdir("d")
open("end", "w").write("end")
"""
BOTTOM = """
import os
depth = 0
while os.path.isdir("d"):
    os.chdir("d"); depth += 1
print(depth, open("end").read())
"""
SWAP = """
import os, time
os.mkdir("real"); open("real/file", "w").write("harmless")
while True:
    os.rename("real", "aside"); os.symlink(%(outside)r, "real")
    os.unlink("real"); os.rename("aside", "real")
    os.rename("real/file", "real/aside"); os.symlink(%(secret)r, "real/file")
    os.unlink("real/file"); os.rename("real/aside", "real/file")
"""


def seen_inside(one: stockade.Workspace) -> str:
    """What a program sees of the tree: everything, with contents."""
    result = stockade.run(["sh", "-c", "ls -lAR --time-style=full-iso . | grep -v '^total'"], resume=one)
    return result.stdout.decode("utf-8", "surrogateescape")


def test_a_hostile_tree_is_copied_as_it_is_and_touches_nothing(workspace: Path) -> None:
    one = changed(workspace, HOSTILE, python=True)
    passwd = os.stat("/etc/passwd")
    one.snapshot("point")
    (fork,) = one.fork()
    before, inside = _tree(f"{one.layer}/upper"), seen_inside(one)
    assert _tree(f"{one.layer}/snapshots/point/upper") == before == _tree(f"{fork.layer}/upper")
    changed_again = stockade.run(["sh", "-c", "chmod -R u+rwx .; rm -rf * .removed-x"], resume=one)
    assert changed_again.ok
    one.restore("point")
    assert _tree(f"{one.layer}/upper") == before and seen_inside(one) == inside
    assert (os.stat("/etc/passwd").st_ino, os.stat("/etc/passwd").st_ctime) == (
        passwd.st_ino,
        passwd.st_ctime,
    )
    used = int(subprocess.check_output(["du", "-sk", one.layer]).split()[0]) if IS_ROOT else 0
    assert used < 4096, "a hole was filled"
    for workspace_ in (one, fork):
        workspace_.discard()


def test_hard_links_stay_links_of_the_copy_only(workspace: Path) -> None:
    one = changed(workspace, "echo 1 > a; ln a b; ln a c")
    one.snapshot("point")
    stockade.run(["sh", "-c", "echo 2 > a"], resume=one)
    kept = Path(one.layer, "snapshots/point/upper")
    assert (kept / "c").read_text() == "1\n" and os.stat(kept / "a").st_nlink == 3


def test_merging_a_hostile_tree(workspace: Path) -> None:
    one = changed(workspace, "echo mine > mine")
    other = changed(workspace, HOSTILE, python=True)
    theirs = _tree(f"{other.layer}/upper")
    one.merge(other)
    found = _tree(f"{one.layer}/upper")
    assert {path: entry[:2] for path, entry in found.items() if path != "mine"} == {
        path: entry[:2] for path, entry in theirs.items()
    }
    assert not one.merge(*one.fork()), "a terabyte of nothing is the same at once"
    # A link or a closed directory where the other has a directory leads nowhere.
    third = changed(workspace, "mkdir etc; echo evil > etc/passwd; mkdir up; echo evil > up/file")
    with pytest.raises(ConflictError):
        one.merge(third)


@pytest.mark.parametrize("depth", [3000 if os.geteuid() == 0 else 900])
def test_a_deep_tree_is_copied_or_refused(workspace: Path, depth: int) -> None:
    result = stockade.run([PYTHON, "-c", DEEP, str(depth)], Policy(workspace=str(workspace)))
    assert result.ok
    one = stockade.Workspace.open(result.workspace_id)
    if depth < tree_copy.DEEPEST:
        one.snapshot("point")
        one.restore("point")
    else:
        for action in (one.snapshot, one.fork):
            with pytest.raises(SetupError, match="too deep"):
                action()
        assert not one.snapshots() and len(stockade.Workspace.list()) == 1
    assert stockade.run([PYTHON, "-c", BOTTOM], resume=one).text == f"{depth} end\n"
    one.discard()


def test_a_program_that_swaps_things_under_a_copy_leads_it_nowhere(workspace: Path, tmp_path: Path) -> None:
    """Even if nobody had stopped it: the copy is made while it runs."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("secret")
    (outside / "secret").write_text("secret")
    script = SWAP % {"outside": str(outside), "secret": str(outside / "file")}
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        with box.start([PYTHON, "-c", script]) as process:
            time.sleep(0.3)
            upper = Path(box.workspace.layer, "upper")
            place = os.open(tmp_path, dirwalk.DIRECTORY)
            source = os.open(upper, dirwalk.DIRECTORY)
            made, followed = 0, 0
            try:
                until = time.monotonic() + 4
                while time.monotonic() < until:
                    with contextlib.suppress(OSError, StockadeError):
                        tree_copy.tree(source, place, "copy")
                        made += 1
                    assert not _holds(tmp_path / "copy", b"secret")
                    dirwalk.remove(place, "copy")
                    # The control: a copy by hand follows a link in time.
                    with contextlib.suppress(OSError):
                        followed += (upper / "real" / "file").read_text() == "secret"
            finally:
                os.close(place)
                os.close(source)
            names = [box.workspace.snapshot().name for _ in range(3)]
            process.kill()
        assert followed, "the attack was not tried"
        for name in names:
            assert not _holds(Path(box.workspace.layer, "snapshots", name), b"secret")


def test_programs_that_wake_one_another_are_held_still(workspace: Path) -> None:
    script = """
import os, signal
open("a", "w").write("0"); child = os.fork(); other = child or os.getppid(); n = 0
while True:
    os.kill(other, signal.SIGCONT); n += 1
    fd = os.open("a" if child else "b", os.O_RDWR | os.O_CREAT); os.pwrite(fd, b"%08d" % n, 0); os.close(fd)
"""
    with (
        Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box,
        box.start([PYTHON, "-c", script]) as process,
    ):
        time.sleep(0.3)
        files = [Path(box.workspace.layer, "upper", name) for name in "ab"]
        for _ in range(3):
            with box.workspace._alone():
                before = [file.read_text() for file in files]
                time.sleep(0.1)
                assert [file.read_text() for file in files] == before
        process.kill()


VFORK = """
#include <unistd.h>
int main(void) { if (vfork() == 0) { sleep(60); _exit(0); } return 0; }
"""


def test_a_program_that_cannot_be_stopped_refuses_the_copy_and_nothing_else(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(freeze, "ATTEMPTS", 3)  # all of them take six seconds, twice
    compiler = need_program("gcc")
    (tmp_path / "hold.c").write_text(VFORK)
    subprocess.run([compiler, "-o", workspace / "hold", tmp_path / "hold.c"], check=True)
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        box.run(["touch", "file"])
        with box.start(["./hold"]) as process:
            time.sleep(0.2)
            for action in (box.workspace.snapshot, box.workspace.commit):
                with pytest.raises(SetupError, match="does not stop"):
                    action()
            assert box.run(["ls"]).text == "file\nhold\n"
            process.kill(0)
        assert box.workspace.snapshot().name == "1"
    assert os.listdir(workspace) == ["hold"]


def test_a_device_in_a_layer_is_refused(workspace: Path) -> None:
    applies(IS_ROOT, "only root makes devices")
    one = changed(workspace, "touch file")
    os.mknod(f"{one.layer}/upper/null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with pytest.raises(SetupError, match="null is a device"):
        one.snapshot()
    assert not one.snapshots()


def test_what_a_copy_unlocks_is_locked_again(workspace: Path) -> None:
    one = changed(workspace, "mkdir -p a/b; echo 1 > a/b/c; chmod 0 a/b/c a/b a; chmod 500 .")
    before = _tree(f"{one.layer}/upper")
    one.snapshot()
    assert _tree(f"{one.layer}/upper") == before


def _tree(top: str) -> dict[str, tuple[object, ...]]:
    """Names, kinds, modes, sizes, and which names are the same file."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        here = os.open(top, dirwalk.DIRECTORY if IS_ROOT else dirwalk.NODE)
        try:
            with dirwalk.listed(here, path, own=True) as directory:
                for name in sorted(os.listdir(directory)):
                    info = os.stat(name, dir_fd=directory, follow_symlinks=False)
                    full = f"{path}/{name}" if path else name
                    is_dir = stat.S_ISDIR(info.st_mode)
                    same = "" if is_dir else first.setdefault(info.st_ino, full)
                    found[full] = (info.st_mode, 0 if is_dir else info.st_size, info.st_mtime_ns, same)
                    pending += [full] if is_dir else []
        finally:
            os.close(here)
    return found


def _holds(top: Path, what: bytes) -> bool:
    return any(
        what in Path(path, name).read_bytes()
        for path, _, names in os.walk(top)
        for name in names
        if not Path(path, name).is_symlink()
    )
