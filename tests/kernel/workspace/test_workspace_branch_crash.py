"""Killed in the middle of a snapshot, a restore, a fork or a merge: a workspace is as before or as after."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import stockade
from stockade import Workspace
from support.kills import killed
from support.trees import Tree, changed, snapshot

SCRIPT = "echo x >> file; rm gone; mkdir -p a/b; echo 2 > a/b/c; ln -s b a/link; mkfifo pipe; chmod 500 a/b a"
MORE = "chmod 700 a; rm a/link pipe; echo 3 > file; echo 4 > new"


@pytest.fixture
def ground(workspace: Path) -> Workspace:
    for name in ("file", "gone"):
        (workspace / name).write_text(f"{name}\n")
    one = changed(workspace, SCRIPT)
    one.snapshot("first")
    assert stockade.run(["sh", "-c", MORE], resume=one).ok
    return one


def upper(one: Workspace) -> Tree:
    return snapshot(Path(one.layer, "upper"))


def every_moment(action: Callable[[], object], check: Callable[[], object]) -> int:
    """Kill a process that does it before each of its calls, and look each time; the last lives on."""
    number = 0
    while killed(number, action):
        check()
        number += 1
    return number


def test_a_snapshot_that_is_killed(ground: Workspace) -> None:
    before = upper(ground)
    point = Path(ground.layer, "snapshots", "second")

    def check() -> None:
        assert upper(ground) == before
        if point.exists():
            assert snapshot(point / "upper") == before
            ground.drop("second")
        ground.snapshot("third")
        assert [one.name for one in ground.snapshots()] == ["first", "third"]
        ground.drop("third")
        assert os.listdir(f"{ground.layer}/snapshots") == ["first"]

    assert every_moment(lambda: ground.snapshot("second"), check) > 20
    assert [one.name for one in ground.snapshots()] == ["first", "second"]


def test_a_restore_that_is_killed(ground: Workspace) -> None:
    before, after = upper(ground), snapshot(Path(ground.layer, "snapshots/first/upper"))
    assert before != after
    ground.snapshot("now")
    seen = set()

    def check() -> None:
        found = upper(ground)
        assert found in (before, after)
        seen.add(found == after)
        Workspace.open(ground.id).restore("now")
        assert upper(ground) == before
        left = {"upper", "work", "workspace.json", "seen", "snapshots", "base"}
        assert set(os.listdir(ground.layer)) == left

    assert every_moment(lambda: ground.restore("first"), check) > 20
    assert seen == {True, False}
    assert upper(ground) == after


def test_a_fork_that_is_killed(ground: Workspace, workspace: Path) -> None:
    before = upper(ground)

    def check() -> None:
        assert upper(ground) == before
        for one in Workspace.list():
            if one.id != ground.id:
                assert upper(one) == before
                one.discard()
        # The next that is removed takes along what is left.
        changed(workspace, "touch x").discard()
        assert os.listdir(os.path.dirname(ground.layer)) == [ground.id]

    assert every_moment(lambda: ground.fork(2), check) > 40
    assert len(Workspace.list()) == 3


def test_a_merge_that_is_killed(ground: Workspace) -> None:
    (other,) = ground.fork()
    stockade.run(["sh", "-c", "echo 5 > five; rm file; mkdir d; echo 6 > d/six"], resume=other)
    stockade.run(["sh", "-c", "chmod 700 a; echo x > a/mine"], resume=ground)
    stockade.run(["sh", "-c", "chmod 700 a"], resume=other)
    before = upper(ground)
    ground.snapshot("before")
    stockade.run(["sh", "-c", "echo 3 > file"], resume=other)
    theirs = upper(other)
    ground.merge(other)
    after = upper(ground)
    ground.restore("before")
    seen = set()

    def check() -> None:
        found = upper(ground)
        assert found in (before, after) and upper(other) == theirs
        seen.add(found == after)
        again = Workspace.open(ground.id)
        again.merge(other)
        assert upper(ground) == after
        again.restore("before")

    assert every_moment(lambda: Workspace.open(ground.id).merge(other), check) > 20
    assert seen == {True, False}
    assert upper(ground) == after
