"""Merging: what other workspaces changed is taken over where nobody disagrees, or nothing is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, Policy, PolicyError, Sandbox, SetupError, Workspace
from stockade.workspace.merge import merge
from support.trees import changed, snapshot

SETUP = "echo base > base"


def tree(place: Path) -> None:
    for name in ("a", "b", "d/one", "d/two", "d/sub/three", "e/four"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"{name}\n")


def branches(place: Path, *scripts: str) -> list[Workspace]:
    """Workspaces from the same point, in each of which something else was done."""
    tree(place)
    first = changed(place, SETUP)
    found = [first, *first.fork(len(scripts) - 1)]
    for one, script in zip(found, scripts, strict=True):
        result = stockade.run(["sh", "-c", script], resume=one)
        assert result.ok, result.stderr
    return found


def test_what_nobody_disagrees_about_is_taken_over(workspace: Path) -> None:
    one, two, three = branches(
        workspace,
        "echo 1 >> a; echo 1 > new1; mkdir -p n; echo 1 > n/one; rm d/one",
        "echo 2 >> b; ln -s a link; mkdir n; echo 2 > n/two; rm -r d/sub; echo same > same; chmod 600 e/four",
        "echo 3 > d/new; mkdir -p x/y/z; echo 3 > x/y/z/f; echo same > same; rm d/two",
    )
    taken = one.merge(two, three)
    assert {change.path for change in taken} == {
        "b", "link", "n/two", "d/sub", "same", "e/four", "d/new", "x", "x/y", "x/y/z", "x/y/z/f", "d/two",
    }  # fmt: skip
    shown = stockade.run(["sh", "-c", "cat a b new1 n/one n/two; ls d; cat d/new x/y/z/f base"], resume=one)
    assert shown.ok and shown.text == "a\n1\nb\n2\n1\n1\n2\nnew\n3\n3\nbase\n"
    assert len(two.changes()) and len(three.changes())
    one.commit()
    found = snapshot(workspace)
    assert {path for path in found if path.startswith("d")} == {"d", "d/new"}
    assert found["e/four"][1] == 0o600 and found["n/two"][2] == b"2\n" and found["link"][2] == b"a"


@pytest.mark.parametrize(
    ("mine", "theirs", "paths"),
    [
        ("echo 1 > a", "echo 2 > a", {"a"}),
        ("rm a", "echo 2 > a", {"a"}),
        ("echo 1 > a", "rm a", {"a"}),
        ("chmod 600 a", "chmod 755 a", {"a"}),
        ("echo 1 > d/one", "rm -r d", {"d/one"}),
        ("rm -r d", "echo 1 > d/one", {"d/one"}),
        ("rm -r d", "echo 1 > d/sub/new", {"d/sub/new"}),
        ("rm -r d; echo 1 > d", "echo 1 > d/sub/new", {"d/sub/new"}),
        ("echo 1 > d/sub/new", "rm -r d; echo 1 > d", {"d/sub/new"}),
        ("echo 1 > new", "mkdir new; echo 1 > new/x", {"new", "new/x"}),
        ("mkdir new; echo 1 > new/x", "echo 1 > new", {"new"}),
        ("ln -s a link", "ln -s b link", {"link"}),
        ("chmod 700 .", "chmod 711 .", {"."}),
        ("rm -r d; mkdir d; echo 1 > d/x", "echo 2 > d/one", {"d/one"}),
        ("echo 2 > d/two", "rm -r d; mkdir d; echo 1 > d/x", {"d/two"}),
    ],
)
def test_a_disagreement_is_named_and_nothing_is_done(
    workspace: Path, mine: str, theirs: str, paths: set[str]
) -> None:
    one, two = branches(workspace, mine, theirs + "; echo beside > beside")
    before = snapshot(Path(one.layer, "upper"))
    with pytest.raises(ConflictError) as refused:
        one.merge(two)
    assert set(refused.value.paths) == paths
    assert snapshot(Path(one.layer, "upper")) == before
    assert "beside" not in os.listdir(f"{one.layer}/upper")


def test_two_others_that_disagree_are_a_conflict(workspace: Path) -> None:
    one, two, three = branches(workspace, "true", "echo 2 > a", "echo 3 > a")
    with pytest.raises(ConflictError, match=r"(?m): a$"):
        one.merge(two, three)
    assert [change.path for change in one.changes()] == ["base"]


def test_a_directory_made_anew_takes_away_what_it_took_away(workspace: Path) -> None:
    one, two = branches(workspace, "echo 1 > d/mine", "rm -r d; mkdir d; echo 2 > d/theirs")
    one.merge(two)
    assert stockade.run(["ls", "d"], resume=one).text == "mine\ntheirs\n"


def test_closed_directories_are_merged_as_they_are(workspace: Path) -> None:
    one, two = branches(
        workspace,
        "echo 1 > d/mine; chmod 500 d",
        "mkdir shut; echo 2 > shut/two; echo 2 > d/sub/theirs; chmod 0 shut/two; chmod 500 shut d",
    )
    one.merge(two)
    found = snapshot(Path(one.layer, "upper"))
    assert found["shut"][1] == 0o500 and found["shut/two"] == ("file", 0, b"2\n")
    assert found["d"][1] == 0o500 and "d/mine" in found and "d/sub/theirs" in found


def test_a_merge_is_based_on_what_the_earlier_one_saw(workspace: Path) -> None:
    tree(workspace)
    older = changed(workspace, "echo old >> a")
    (workspace / "a").write_text("the host's\n")
    newer = changed(workspace, "echo new > b")
    newer.merge(older)
    with pytest.raises(ConflictError, match="a: it changed"):
        Workspace.open(newer.id).commit()


def test_what_one_of_them_was_to_hold_back_is_held_back(workspace: Path) -> None:
    tree(workspace)
    one = changed(workspace, "touch mine")
    policy = Policy(workspace=str(workspace), protect=["theirs"])
    other = Workspace.open(stockade.run(["touch", "theirs"], policy).workspace_id)
    one.merge(other)
    assert [held.path for held in Workspace.open(one.id).commit().held] == ["theirs"]


def test_only_workspaces_of_the_same_tree_are_merged(workspace: Path, tmp_path: Path) -> None:
    one = changed(workspace, "touch file")
    with pytest.raises(PolicyError, match="with itself"):
        one.merge(Workspace.open(one.id))
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(PolicyError, match="belongs to "):
        one.merge(changed(other, "touch file"))


def test_a_workspace_in_use_is_not_merged(workspace: Path) -> None:
    one, two = branches(workspace, "true", "touch file")
    with Sandbox(resume=two) as box:
        with pytest.raises(SetupError, match="in use by"):
            one.merge(two)
        with pytest.raises(SetupError, match="lives in it"):
            box.workspace.merge(one)
        # A living one can be merged from.
        assert [change.path for change in one.merge(box.workspace)] == ["file"]


def test_more_changes_than_fit_into_memory_are_refused(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "MOST", 3)
    one, other = (changed(workspace, f"touch {name}1 {name}2") for name in "ab")
    with pytest.raises(SetupError, match="more than 3 changes together"):
        one.merge(other)
    assert [change.path for change in one.changes()] == ["a1", "a2"]
