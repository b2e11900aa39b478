"""Several overlays in one sandbox, each with changes of its own to compare, commit and discard."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade import Policy, Sandbox
from stockade.errors import ConflictError, SetupError
from stockade.resolve.environment import MOST_OVERLAYS, EnvironmentMount
from stockade.runs.register import register
from stockade.sandbox.private_tree import PrivateTree, remove_layers
from stockade.sandbox.workspace import Workspace
from support.environments import (
    POLICY,
    environment,
    names_below,
    need_several_ids,
    open_beneath,
    private_tree,
    sh,
)
from support.means import applies

BOTH = ("/workspace", "/data")


@pytest.fixture
def tree(stockade_home: Path) -> Iterator[PrivateTree]:
    with private_tree(stockade_home) as made:
        yield made


def layers(home: Path) -> set[str]:
    """The layers that the state directory has."""
    return names_below(f"{home}/workspaces")


@pytest.fixture(params=["on the disk", "in memory"])
def policy(request: pytest.FixtureRequest) -> Policy:
    return POLICY if request.param == "on the disk" else Policy(toolchain=False, limits={"disk": "20M"})


def test_each_overlay_has_changes_of_its_own(tree: PrivateTree, policy: Policy, stockade_home: Path) -> None:
    with Sandbox(policy, _environment=environment(tree, BOTH), on_exit="discard") as box:
        sh(box, "echo one > /workspace/a; echo two > /data/b; mkdir /data/c")
        found = {path: [one.path for one in kept.changes()] for path, kept in box._overlays().items()}
        assert found == {"/workspace": ["a"], "/data": ["b", "c"]}
        assert names_below(f"{tree.path}/workspace") == names_below(f"{tree.path}/data") == set()
        assert len(layers(stockade_home)) == 2
    assert layers(stockade_home) == set()


def test_a_commit_of_one_leaves_the_other(tree: PrivateTree, policy: Policy) -> None:
    with Sandbox(policy, _environment=environment(tree, BOTH), on_exit="discard") as box:
        sh(box, "echo one > /workspace/a; echo two > /data/b")
        box._overlays()["/workspace"].commit()
        assert Path(f"{tree.path}/workspace/a").read_text() == "one\n"
        assert names_below(f"{tree.path}/data") == set()
        assert not box._overlays()["/workspace"].changes()
        # The sandbox goes on, and commits again.
        sh(box, "echo more >> /workspace/a; rm /workspace/none || :")
        box._overlays()["/workspace"].commit()
        assert Path(f"{tree.path}/workspace/a").read_text() == "one\nmore\n"


def test_a_path_that_the_tree_got_meanwhile_is_a_conflict(tree: PrivateTree) -> None:
    kept = Path(tree.path) / "workspace"
    (kept / "both").write_text("before\n")
    with Sandbox(POLICY, _environment=environment(tree, BOTH), on_exit="discard") as box:
        sh(box, "echo inside > /workspace/both")
        box._overlays()["/workspace"].changes()
        (kept / "both").write_text("another sandbox wrote this\n")
        with pytest.raises(ConflictError):
            box._overlays()["/workspace"].commit()
        assert (kept / "both").read_text() == "another sandbox wrote this\n"


def test_nothing_is_held_back_in_a_tree_of_the_sandbox(tree: PrivateTree) -> None:
    with Sandbox(POLICY, _environment=environment(tree, BOTH), on_exit="discard") as box:
        sh(box, "mkdir -p /workspace/.git/hooks && echo x > /workspace/.git/hooks/pre-commit")
        sh(box, "echo x > /workspace/.envrc; echo x > /workspace/stockade.toml")
        done = box._overlays()["/workspace"].commit()
        assert not done.held
    assert os.path.exists(f"{tree.path}/workspace/.git/hooks/pre-commit")
    assert os.path.exists(f"{tree.path}/workspace/stockade.toml")


def test_sixteen_overlays(tree: PrivateTree, policy: Policy) -> None:
    opened = [open_beneath(tree, f"/mnt/{n}", create=True) for n in range(MOST_OVERLAYS)]
    more = tuple(EnvironmentMount(f"/o/{n}", fd, "overlay", "test") for n, fd in enumerate(opened))
    try:
        with Sandbox(policy, _environment=environment(tree, more=more), on_exit="discard") as box:
            sh(box, "for n in /o/*; do echo $n > $n/file; done")
            for path, kept in box._overlays().items():
                assert [one.path for one in kept.changes()] == ["file"]
                kept.commit()
                name = path.rpartition("/")[2]
                assert Path(f"{tree.path}/mnt/{name}/file").read_text() == f"{path}\n"
        many = (*more, EnvironmentMount("/o/x", opened[0], "overlay", "test"))
        with pytest.raises(SetupError, match="17 overlays"):
            Sandbox(policy, _environment=environment(tree, more=many)).open()
    finally:
        for descriptor in opened:
            os.close(descriptor)


def test_one_limit_holds_for_all_overlays_together(tree: PrivateTree) -> None:
    policy = Policy(toolchain=False, limits={"disk": "8M"})
    with Sandbox(policy, _environment=environment(tree, BOTH), on_exit="discard") as box:
        sh(box, "head -c 5000000 /dev/zero > /workspace/a")
        assert not box.run(["sh", "-c", "head -c 5000000 /dev/zero > /data/b"]).ok


def test_changes_that_are_not_discarded_are_kept(
    tree: PrivateTree, policy: Policy, stockade_home: Path
) -> None:
    with Sandbox(policy, _environment=environment(tree, BOTH)) as box:
        sh(box, "echo kept > /data/b")
    (left,) = layers(stockade_home)
    workspace = Workspace.open(left)
    assert workspace.path == f"{tree.path}/data" and [one.path for one in workspace.changes()] == ["b"]
    remove_layers(str(stockade_home), tree.path)
    assert layers(stockade_home) == set()


def test_owners_survive_a_commit(tree: PrivateTree, policy: Policy) -> None:
    maps = need_several_ids()
    applies(os.geteuid() == 0, "a worker in the sandbox's user namespace commits for an ordinary user")
    with Sandbox(policy, _environment=environment(tree, BOTH), on_exit="discard") as box:
        sh(box, "echo x > /workspace/a; chown 1000:2000 /workspace/a; chmod 600 /workspace/a")
        box._overlays()["/workspace"].commit()
    found = os.stat(f"{tree.path}/workspace/a")
    assert (found.st_uid, found.st_gid) == (maps.uid_outside(1000), maps.gid_outside(2000))


def test_files_of_other_users_are_discarded_too(
    tree: PrivateTree, policy: Policy, stockade_home: Path
) -> None:
    need_several_ids()
    with Sandbox(policy, _environment=environment(tree, BOTH), on_exit="discard") as box:
        sh(box, "mkdir -p a/b; echo x > a/b/c; chown -R 1000 a; chmod 0 a")
    assert layers(stockade_home) == set()


def test_the_merged_root_has_the_owner_of_the_tree(tree: PrivateTree, policy: Policy) -> None:
    need_several_ids()
    with Sandbox(POLICY, _environment=environment(tree)) as box:
        sh(box, "mkdir theirs && chown 1000:1000 theirs && chmod 750 theirs")
    descriptor = open_beneath(tree, "/workspace/theirs")
    try:
        more = (EnvironmentMount("/theirs", descriptor, "overlay", "test"),)
        with Sandbox(policy, _environment=environment(tree, more=more), on_exit="discard") as box:
            assert sh(box, "stat -c '%u:%g %a' /theirs") == "1000:1000 750\n"
    finally:
        os.close(descriptor)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
from stockade import Sandbox
from stockade.sandbox.private_tree import PrivateTree
from support.environments import POLICY, environment
tree = PrivateTree(sys.argv[1])
box = Sandbox(POLICY, _environment=environment(tree, ("/workspace", "/data")))
box.open()
box.run(["sh", "-c", "echo x > /workspace/kept"]).check()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_killed_supervisor_a_sweep_keeps_changes_and_removes_the_rest(
    tree: PrivateTree, stockade_home: Path
) -> None:
    tests = str(Path(__file__).parents[2])
    subprocess.run([sys.executable, "-c", KILLED, tree.path, tests], check=False)
    assert len(layers(stockade_home)) == 2
    register.sweep(str(stockade_home))
    (left,) = layers(stockade_home)
    assert Workspace.open(left).path == f"{tree.path}/workspace"
    remove_layers(str(stockade_home), tree.path)
