"""Points of a workspace to come back to, and workspaces that begin where another is."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import time
from pathlib import Path

import pytest

import stockade
from stockade import AsyncSandbox, NotFoundError, Policy, PolicyError, Sandbox, SetupError, Workspace
from stockade.workspace import tree_copy
from support.trees import PYTHON, changed, snapshot

EVERYTHING = """
echo more >> file; rm gone; rm -r full; mkdir full; echo 1 > full/one; ln -s nowhere link; mkfifo pipe
mkdir -p deep/er; echo 2 > deep/er/two; ln deep/er/two second; chmod 4711 deep/er/two; chmod 1750 deep
truncate -s 64M sparse; printf x | dd of=sparse bs=1 seek=33554432 conv=notrunc 2>/dev/null
mkdir shut; echo 3 > shut/three; chmod 0 shut/three shut; touch -d 2001-02-03 deep/er/two
"""


def tree(place: Path) -> None:
    for name in ("file", "gone", "full/old"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("the host's\n")


def layer_of(one: Workspace) -> dict[str, tuple[object, ...]]:
    """Everything about every entry of a layer that a copy must have too."""
    upper = Path(one.layer, "upper")
    found: dict[str, tuple[object, ...]] = {}
    contents = snapshot(upper)
    for path, (kind, mode, content) in contents.items():
        info = os.lstat(upper / path) if _reachable(upper / path) else None
        rest: tuple[object, ...] = ()
        if info is not None:
            times = None if kind == "directory" and not info.st_mode & 0o100 else info.st_mtime_ns
            whiteout = stat.S_ISCHR(info.st_mode) and info.st_rdev == 0
            names = len({p for p in contents if _same(upper / p, info)}) if info.st_nlink > 1 else 1
            rest = (info.st_uid, info.st_gid, times, whiteout, info.st_blocks if kind == "file" else 0)
            rest += (names if kind == "file" else 1,)
            if kind in ("directory", "file") and os.access(upper / path, os.R_OK):
                rest += tuple((name, os.getxattr(upper / path, name)) for name in os.listxattr(upper / path))
        found[path] = (kind, mode, content, *rest)
    return found


def _reachable(path: Path) -> bool:
    try:
        os.lstat(path)
    except PermissionError:
        return False
    return True


def _same(path: Path, info: os.stat_result) -> bool:
    return _reachable(path) and os.lstat(path).st_ino == info.st_ino


def test_a_restored_workspace_is_as_it_was(workspace: Path) -> None:
    tree(workspace)
    one = changed(workspace, EVERYTHING)
    before, changes = layer_of(one), one.changes()
    taken = one.snapshot("first")
    assert taken.name == "first" and abs(taken.taken - time.time()) < 60
    assert layer_of(one) == before
    again = stockade.run(
        ["sh", "-c", "rm -rf deep full link; echo 9 > file; rm pipe; touch gone"], resume=one
    )
    assert again.ok and one.changes() != changes
    one.restore("first")
    assert layer_of(one) == before
    assert one.changes() == changes
    assert stockade.run(["cat", "deep/er/two", "file"], resume=one).text == "2\nthe host's\nmore\n"
    assert [point.name for point in one.snapshots()] == ["first"]
    one.discard()


def test_a_restored_workspace_commits_what_it_was(workspace: Path) -> None:
    tree(workspace)
    one = changed(workspace, "echo 1 > file; rm gone; rm -r full; mkdir full; touch full/new")
    one.snapshot("first")
    stockade.run(["sh", "-c", "echo 2 > file; echo back > gone; rm -r full"], resume=one)
    one.restore("first")
    done = one.commit()
    assert not done.closed, "it has a snapshot"
    assert (workspace / "file").read_text() == "1\n"
    assert sorted(os.listdir(workspace)) == ["file", "full"] and os.listdir(workspace / "full") == ["new"]
    one.drop("first")
    assert one.commit().closed


def test_snapshots_are_named_or_numbered(workspace: Path) -> None:
    one = changed(workspace, "touch file")
    assert [one.snapshot().name, one.snapshot("b").name, one.snapshot().name] == ["1", "b", "2"]
    assert [point.name for point in one.snapshots()] == ["1", "b", "2"]
    one.drop("1")
    assert [point.name for point in one.snapshots()] == ["b", "2"]
    with pytest.raises(PolicyError, match="already"):
        one.snapshot("b")
    for name in ("", ".", "..", "a/b", ".hidden", "-x", "a" * 65, "new\nline", "ä"):
        with pytest.raises(PolicyError, match="not a valid name"):
            one.snapshot(name)
        with pytest.raises(NotFoundError, match="no snapshot"):
            one.restore(name)
    with pytest.raises(NotFoundError, match="no snapshot") as refused:
        one.restore("c")
    assert "b, 2" in refused.value.hint


def test_a_snapshot_of_a_living_sandbox_is_taken_while_it_is_held_still(workspace: Path) -> None:
    script = """
import itertools, os
files = [os.open(name, os.O_RDWR | os.O_CREAT) for name in "abc"]
for number in itertools.count():
    for file in files:
        os.pwrite(file, b"%08d" % number, 0)
"""
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        with box.start([PYTHON, "-c", script]) as process:
            time.sleep(0.3)
            for _ in range(20):
                box.workspace.snapshot()
            names = []
            for _ in range(5):
                time.sleep(0.05)
                names.append(box.workspace.snapshot().name)
            process.kill()
        with pytest.raises(SetupError, match="lives in it"):
            box.workspace.restore(names[0])
        seen = [
            [(Path(box.workspace.layer) / "snapshots" / name / "upper" / file).read_text() for file in "abc"]
            for name in names
        ]
    for a, b, c in seen:
        assert int(a) - 1 <= int(c) <= int(b) <= int(a), "torn"
    assert len({a for a, *_ in seen}) == 5, "it did not go on"


def test_a_snapshot_before_each_run(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace)), snapshot=True) as box:
        box.run(["sh", "-c", "echo 1 > file"])
        box.run(["sh", "-c", "echo 2 > file"])
        one = box.workspace
    assert [point.name for point in one.snapshots()] == ["run-1", "run-2"]
    stockade.run(["sh", "-c", "echo 3 > file"], resume=one, snapshot=True)
    one.restore("run-3")
    assert stockade.run(["cat", "file"], resume=one).text == "2\n"

    async def more() -> None:
        async with AsyncSandbox(resume=one, snapshot=True) as box:
            await box.run(["rm", "file"])

    asyncio.run(more())
    assert [point.name for point in one.snapshots()][-1] == "run-4"
    one.restore("run-1")
    assert not one.changes()


def test_an_unchanged_workspace_leaves_nothing_unless_a_snapshot_has_something(workspace: Path) -> None:
    stockade.run(["true"], Policy(workspace=str(workspace)), snapshot=True)
    assert not Workspace.list()
    with Sandbox(Policy(workspace=str(workspace)), snapshot=True) as box:
        box.run(["touch", "file"])
        box.run(["rm", "file"])
    assert len(Workspace.list()) == 1


def test_a_workspace_in_use_cannot_be_restored(workspace: Path) -> None:
    one = changed(workspace, "touch file")
    one.snapshot("first")
    with Sandbox(resume=one):
        for action in (lambda: one.restore("first"), one.snapshot, lambda: one.fork(2)):
            with pytest.raises(SetupError, match="in use by"):
                action()


def test_large_files_are_copied_by_hand_where_the_kernel_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    data = os.urandom(3 << 20)
    (tmp_path / "old").write_bytes(data)
    with open(tmp_path / "old", "rb") as old, open(tmp_path / "new", "wb") as new:
        tree_copy.content(old.fileno(), new.fileno(), len(data))
    assert (tmp_path / "new").read_bytes() == data


def test_forks_of_which_one_fails_are_none(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = changed(workspace, "echo 1 > file")
    real, done = os.rename, 0

    def rename(*words: str, **options: int) -> None:
        nonlocal done
        done += 1
        if done == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(*words, **options)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(SetupError, match="Input/output error"):
        one.fork(4)
    monkeypatch.undo()
    assert os.listdir(os.path.dirname(one.layer)) == [one.id]


def test_forks_go_their_own_ways(workspace: Path) -> None:
    tree(workspace)
    one = changed(workspace, EVERYTHING)
    before = layer_of(one)
    one.snapshot("mine")
    forks = one.fork(3)
    assert len({one.id, *(fork.id for fork in forks)}) == 4
    assert all(layer_of(fork) == before and not fork.snapshots() for fork in forks)
    for number, fork in enumerate(forks):
        assert stockade.run(["sh", "-c", f"echo {number} > file"], resume=fork).workspace_id == fork.id
    assert layer_of(one) == before
    texts = [stockade.run(["cat", "file"], resume=fork).text for fork in forks]
    assert texts == ["0\n", "1\n", "2\n"]
    # The best of them.
    forks[1].commit(["file"])
    assert (workspace / "file").read_text() == "1\n"
    for fork in (one, *forks):
        fork.discard()
    assert not Workspace.list()


def test_a_fork_knows_what_its_changes_are_based_on(workspace: Path) -> None:
    tree(workspace)
    one = changed(workspace, "echo 1 > file")
    (workspace / "file").write_text("the host's again\n")
    (fork,) = one.fork()
    with pytest.raises(stockade.ConflictError, match="file"):
        fork.commit()


def test_a_living_sandbox_can_be_forked(workspace: Path) -> None:
    with Sandbox(Policy(workspace=str(workspace)), on_exit="discard") as box:
        box.run(["sh", "-c", "echo 1 > file"])
        forks = box.workspace.fork(2)
        box.run(["sh", "-c", "echo 2 > file"])
    assert [stockade.run(["cat", "file"], resume=fork).text for fork in forks] == ["1\n", "1\n"]


@pytest.mark.parametrize("count", [0, -1, 1001])
def test_a_senseless_number_of_forks_is_refused(workspace: Path, count: int) -> None:
    one = changed(workspace, "touch file")
    with pytest.raises(PolicyError, match="cannot make"):
        one.fork(count)


def test_a_snapshot_costs_what_changed(workspace: Path) -> None:
    (workspace / "big").write_bytes(b"x" * (32 << 20))
    one = changed(workspace, "echo 1 > small; truncate -s 1G hole")
    one.snapshot("first")
    used = sum(
        os.lstat(os.path.join(top, name)).st_blocks for top, _, names in os.walk(one.layer) for name in names
    )
    assert used * 512 < 1 << 20
    result = stockade.run([PYTHON, "-c", "open('big', 'ab').write(b'y')"], resume=one)
    assert result.ok
