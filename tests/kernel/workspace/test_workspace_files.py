"""`Workspace.files`: the files of a kept workspace, without a sandbox that lives in it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stockade
from stockade import PolicyError, Sandbox, SetupError, Workspace
from stockade.runs.register import register
from support.trees import changed, snapshot


@pytest.fixture
def kept(workspace: Path) -> Workspace:
    """A workspace in which one file was changed, one deleted and one made."""
    for name in ("same", "other", "gone"):
        (workspace / name).write_text(f"{name} of the host\n")
    (workspace / "sub").mkdir()
    (workspace / "sub/below").write_text("below\n")
    return changed(workspace, "echo changed > other; rm gone; echo new > new")


def paths(workspace: Workspace) -> list[tuple[str, str]]:
    return [(change.kind, change.path) for change in workspace.changes()]


def test_they_are_what_a_sandbox_sees(kept: Workspace) -> None:
    with kept.files as files:
        assert files.read("same") == b"same of the host\n"
        assert files.read(f"{kept.path}/other") == b"changed\n"
        assert [os.path.basename(one.path) for one in files.list()] == ["new", "other", "same", "sub"]
        assert [one.path for one in files.search("**/b*")] == [f"{kept.path}/sub/below"]
        assert files.info("new").size == 4
        with pytest.raises(stockade.NotFoundError):
            files.read("gone")


def test_what_is_written_is_in_the_layer_and_not_in_the_tree(kept: Workspace, workspace: Path) -> None:
    before = snapshot(workspace)
    with kept.files as files:
        files.write("same", "written")
        files.write("a/b", "deep", parents=True)
        files.remove("new")
        files.remove("sub", recursive=True)
        files.move("other", "moved")
        assert ("added", "a/b") in paths(kept)
    assert snapshot(workspace) == before
    assert paths(Workspace.open(kept.id)) == [
        ("added", "a"),
        ("added", "a/b"),
        ("deleted", "gone"),
        ("added", "moved"),
        ("deleted", "other"),
        ("modified", "same"),
        ("deleted", "sub"),
    ]
    assert stockade.run(["sh", "-c", "cat same a/b; ls"], resume=kept).text == "writtendeepa\nmoved\nsame\n"
    kept.commit()
    assert (workspace / "moved").read_text() == "changed\n" and not (workspace / "sub").exists()


def test_nobody_else_has_the_workspace_meanwhile(kept: Workspace) -> None:
    files = kept.files
    assert kept.files is files and kept.in_use()
    assert not register.living(os.environ["STOCKADE_HOME"])
    for use in (
        lambda: stockade.run(["true"], resume=kept),
        Workspace.open(kept.id).commit,
        kept.discard,
        lambda: Workspace.open(kept.id).files,
    ):
        with pytest.raises(SetupError, match=f"workspace {kept.id} is in use by process {os.getpid()}"):
            use()
    files.close()
    files.close()
    assert not kept.in_use()
    with pytest.raises(SetupError, match="closed"):
        files.read("same")
    assert kept.files.read("same") == b"same of the host\n"
    assert kept.commit().closed


def test_a_living_sandbox_has_its_own(kept: Workspace) -> None:
    with Sandbox(resume=kept) as box:
        with pytest.raises(SetupError, match="in use"):
            _ = kept.files
        box.files.write("new", "from the sandbox")
    with kept.files as files:
        assert files.read("new") == b"from the sandbox"


def test_paths_beside_the_workspace_are_an_error(kept: Workspace) -> None:
    with kept.files as files:
        for path in ("/etc/passwd", "/tmp", f"{kept.path}-beside"):
            with pytest.raises(PolicyError, match="there is no sandbox"):
                files.read(path)
        with pytest.raises(stockade.StockadeError):
            files.read("../state")


def test_a_link_does_not_lead_out(kept: Workspace, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    stockade.run(["ln", "-s", "../secret", "link"], resume=kept)
    with kept.files as files, pytest.raises(stockade.StockadeError):
        files.read("link")


def test_a_change_of_the_host_after_it_is_a_conflict(kept: Workspace, workspace: Path) -> None:
    with kept.files as files:
        files.write("same", "written")
    (workspace / "same").unlink()
    with pytest.raises(stockade.ConflictError, match="same: it existed"):
        kept.commit()


def test_one_whose_tree_is_gone_cannot_be_opened(kept: Workspace, workspace: Path) -> None:
    workspace.rename(workspace.with_name("elsewhere"))
    with pytest.raises(PolicyError, match="does not exist"):
        _ = kept.files
    assert not kept.in_use()
