"""Whatever a program does to whatever tree: after a commit it is as if it had been done to the host's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import hypothesis
from hypothesis import strategies

import stockade
from stockade import Policy, Workspace
from support.trees import PYTHON, snapshot

NAMES = ("a", "b", "c")
PATHS = strategies.lists(strategies.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
TEXTS = strategies.sampled_from(["", "1\n", "2\n", "1\n2\n", "no end"])
MODES = strategies.sampled_from([0o644, 0o600, 0o755, 0o400])
MADE = strategies.one_of(
    strategies.tuples(strategies.just("write"), PATHS, TEXTS),
    strategies.tuples(strategies.just("mkdir"), PATHS, strategies.just("")),
    strategies.tuples(strategies.just("link"), PATHS, PATHS),
)
DONE = strategies.one_of(
    MADE,
    strategies.tuples(strategies.just("append"), PATHS, TEXTS),
    strategies.tuples(strategies.just("remove"), PATHS, strategies.just("")),
    strategies.tuples(strategies.just("clear"), PATHS, strategies.just("")),
    strategies.tuples(strategies.just("mode"), PATHS, MODES),
    strategies.tuples(strategies.just("move"), PATHS, PATHS),
)
#: Runs inside and outside: what cannot be done is left out by both, for the same reasons.
PROGRAM = """
import json, os, shutil, sys
for what, path, given in json.loads(sys.argv[1]):
    try:
        if what == "write":
            if not os.path.islink(path):
                open(path, "w").write(given)
        elif what == "append":
            if not os.path.islink(path):
                open(path, "a").write(given)
        elif what == "mkdir":
            os.mkdir(path)
        elif what == "link":
            os.symlink(given, path)
        elif what == "remove":
            os.rmdir(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        elif what == "clear":
            shutil.rmtree(path)
        elif what == "mode" and not os.path.islink(path):
            os.chmod(path, given | (0o700 if os.path.isdir(path) else 0))
        elif what == "move":
            # As mv does: a directory of the host's cannot be renamed in an overlay.
            if os.path.isdir(path) and not os.path.islink(path):
                if not (given + "/").startswith(path + "/") and not os.path.lexists(given):
                    shutil.copytree(path, given, symlinks=True)
                    shutil.rmtree(path)
            else:
                os.rename(path, given)
    except OSError:
        pass
"""


#: Inside nobody has capabilities, and so outside root may not have them either: they write what is read-only.
PLAINLY = ["setpriv", "--bounding-set=-all"] if os.geteuid() == 0 else []


def perform(actions: list[tuple[str, str, object]], place: Path) -> None:
    subprocess.run([*PLAINLY, PYTHON, "-I", "-c", PROGRAM, json.dumps(actions)], cwd=place, check=True)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(strategies.lists(MADE, max_size=12), strategies.lists(DONE, min_size=1, max_size=12))
@hypothesis.example(made=[], done=[("write", "a", ""), ("mode", "a", 0o400), ("write", "a", "1\n")])
def test_the_tree_is_as_if_it_had_been_done_there(
    made: list[tuple[str, str, object]], done: list[tuple[str, str, object]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        inside, outside = Path(directory, "inside"), Path(directory, "outside")
        inside.mkdir()
        perform(made, inside)
        shutil.copytree(inside, outside, symlinks=True)
        perform(done, outside)
        result = stockade.run(
            [PYTHON, "-I", "-c", PROGRAM, json.dumps(done)], Policy(workspace=str(inside)), timeout=60
        )
        assert result.ok, result.stderr
        if result.workspace_id:
            workspace = Workspace.open(result.workspace_id)
            listed = {change.path for change in workspace.changes()}
            assert listed <= {path or "." for path in {**snapshot(outside), **snapshot(inside)}}
            committed = workspace.commit()
            assert committed.closed and {change.path for change in committed.changes} == listed
        assert snapshot(inside) == snapshot(outside)
        assert not os.path.exists(f"{os.environ['STOCKADE_HOME']}/workspaces/{result.workspace_id or 'none'}")


Actions = list[tuple[str, str, object]]


def performed(actions: Actions, workspace: Workspace) -> Workspace:
    """The workspace, after a sandbox that went on in it."""
    result = stockade.run([PYTHON, "-I", "-c", PROGRAM, json.dumps(actions)], resume=workspace, timeout=60)
    assert result.ok, result.stderr
    return workspace


def begun(place: Path, made: Actions, done: Actions) -> Workspace:
    """A workspace in which something was done to a tree in which something was made."""
    place.mkdir()
    perform(made, place)
    with stockade.Sandbox(Policy(workspace=str(place))) as box:
        (first,) = box.workspace.fork()
    return performed(done, first)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(
    strategies.lists(MADE, max_size=10),
    strategies.lists(DONE, max_size=10),
    strategies.lists(DONE, max_size=10),
)
def test_a_restored_workspace_is_as_at_its_snapshot(made: Actions, first: Actions, second: Actions) -> None:
    with tempfile.TemporaryDirectory() as directory:
        inside, outside = Path(directory, "inside"), Path(directory, "outside")
        workspace = begun(inside, made, first)
        shutil.copytree(inside, outside, symlinks=True)
        perform(first, outside)
        changes, upper = workspace.changes(), snapshot(Path(workspace.layer, "upper"))
        workspace.snapshot("point")
        performed(second, workspace)
        workspace.restore("point")
        assert workspace.changes() == changes and snapshot(Path(workspace.layer, "upper")) == upper
        workspace.drop("point")
        workspace.commit()
        assert snapshot(inside) == snapshot(outside)
        assert not Workspace.list()


@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    strategies.lists(MADE, max_size=10),
    strategies.lists(DONE, max_size=6),
    strategies.lists(DONE, max_size=6),
)
def test_a_merged_workspace_has_what_each_of_them_has(made: Actions, one: Actions, other: Actions) -> None:
    with tempfile.TemporaryDirectory() as directory:
        base = Path(directory, "base")
        mine = begun(base, made, [])
        (theirs,) = mine.fork()
        performed(one, mine)
        performed(other, theirs)
        trees = []
        for number, actions in enumerate((one, other)):
            trees.append(Path(directory, str(number)))
            shutil.copytree(base, trees[-1], symlinks=True)
            perform(actions, trees[-1])
        before, (left, right) = snapshot(base), map(snapshot, trees)
        changed = [
            {path for path in before | tree if before.get(path) != tree.get(path)} for tree in (left, right)
        ]
        try:
            mine.merge(theirs)
        except stockade.ConflictError as conflict:
            assert set(conflict.paths) <= changed[0] | changed[1]
            disagree = {path for path in changed[0] & changed[1] if left.get(path) != right.get(path)}
            assert (
                disagree
                or any(f"{a}/".startswith(f"{b}/") for a in changed[0] for b in changed[1])
                or any(f"{b}/".startswith(f"{a}/") for a in changed[0] for b in changed[1])
            )
        else:
            mine.commit()
            after = snapshot(base)
            for tree, paths in zip((left, right), changed, strict=True):
                assert {path: after.get(path) for path in paths} == {path: tree.get(path) for path in paths}
            assert {path for path in before | after if before.get(path) != after.get(path)} == changed[
                0
            ] | changed[1]
        for workspace in Workspace.list():
            workspace.discard()
