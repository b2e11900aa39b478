"""A commit that merges: the host and the program changed the same file, and other lines of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import stockade
from stockade import ConflictError, Sandbox, SetupError, Workspace
from stockade.cli import main
from stockade.workspace import journal
from stockade.workspace.merge import bases
from support.trees import changed, snapshot

LINES = [f"line {number}\n" for number in range(1, 10)]
TOP = "sed -i '1s/.*/by the program/' text"


@pytest.fixture
def text(workspace: Path) -> Path:
    path = workspace / "text"
    path.write_text("".join(LINES))
    path.chmod(0o640)
    return path


def edit(path: Path, number: int, line: str = "by the host\n") -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[number - 1] = line
    path.write_text("".join(lines))


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def test_changes_to_different_lines_are_put_together(workspace: Path, text: Path) -> None:
    kept = changed(workspace, f"{TOP}; echo new > new")
    edit(text, 9)
    with pytest.raises(ConflictError, match="text: it changed at") as caught:
        kept.commit()
    assert "--merge" in caught.value.hint
    done = kept.commit(merge=True)
    assert lines(text) == ["by the program", *(line.strip() for line in LINES[1:8]), "by the host"]
    assert done.closed and [change.path for change in done.changes] == ["new", "text"]
    assert [note.path for note in done.notes] == ["text"] and "merged" in done.notes[0].what
    assert text.stat().st_mode & 0o777 == 0o640 and text.stat().st_uid == os.getuid()
    assert (workspace / "new").exists() and not Workspace.list()


def test_a_file_that_an_editor_replaced_is_merged(workspace: Path, text: Path) -> None:
    kept = changed(workspace, TOP)
    part = workspace / "part"
    part.write_text(text.read_text().replace("line 9", "by the host"))
    part.chmod(0o640)
    part.rename(text)
    kept.commit(merge=True)
    assert (lines(text)[0], lines(text)[8]) == ("by the program", "by the host")


def test_changes_to_the_same_lines_are_a_conflict_and_nothing_is_written(workspace: Path, text: Path) -> None:
    (workspace / "other").write_text("".join(LINES))
    kept = changed(workspace, f"{TOP}; sed -i 1d other; echo new > new")
    edit(text, 1)
    edit(workspace / "other", 9)
    before, layer = snapshot(workspace), snapshot(Path(kept.layer))
    with pytest.raises(
        ConflictError, match=r"text: .* both sides changed the same lines: 1 of the host's"
    ) as caught:
        kept.commit(merge=True)
    assert caught.value.paths == ("text",)
    assert snapshot(workspace) == before and snapshot(Path(kept.layer)) == layer
    kept.commit(merge=True, force=["text"])
    assert lines(text)[0] == "by the program"
    assert lines(workspace / "other")[0] == "line 2" and lines(workspace / "other")[7] == "by the host"


def test_a_workspace_that_stays_goes_on_from_what_was_merged(workspace: Path, text: Path) -> None:
    kept = changed(workspace, f"{TOP}; echo new > new")
    edit(text, 9)
    assert not kept.commit(["text"], merge=True).closed
    assert [change.path for change in kept.changes()] == ["new"]
    stockade.run(["sh", "-c", "cat text; sed -i '5s/.*/again/' text"], resume=kept).check()
    edit(text, 2)
    kept.commit(merge=True)
    found = lines(text)
    assert (found[0], found[1], found[4], found[8]) == (
        "by the program",
        "by the host",
        "again",
        "by the host",
    )


def test_the_mode_is_merged_too(workspace: Path, text: Path) -> None:
    kept = changed(workspace, f"{TOP}; chmod 750 text")
    edit(text, 9)
    kept.commit(merge=True)
    assert text.stat().st_mode & 0o777 == 0o750 and lines(text)[8] == "by the host"
    kept = changed(workspace, "sed -i '5s/.*/again/' text")
    text.chmod(0o600)
    kept.commit(merge=True)
    assert text.stat().st_mode & 0o777 == 0o600 and lines(text)[4] == "again"
    kept = changed(workspace, "chmod 640 text")
    text.chmod(0o644)
    with pytest.raises(ConflictError, match="both sides changed its mode, to 640 and 644"):
        kept.commit(merge=True)


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"a\0b\n" * 9, "it is not a text file"), (b"x\n" * (1 << 20), "Stockade has no copy of")],
)
def test_what_cannot_be_merged_is_a_conflict_with_the_reason(
    workspace: Path, text: Path, content: bytes, why: str
) -> None:
    text.write_bytes(content)
    kept = changed(workspace, "echo more >> text")
    text.write_bytes(b"first\n" + content)
    with pytest.raises(ConflictError, match=f"text: it changed at .*; it cannot be merged, because {why}"):
        kept.commit(merge=True)


def test_a_file_that_changed_before_the_end_has_no_base(workspace: Path, text: Path) -> None:
    with Sandbox(stockade.Policy(workspace=str(workspace))) as box:
        box.run(["sh", "-c", TOP]).check()
        id = box.workspace.id
        edit(text, 9)
    with pytest.raises(ConflictError, match="Stockade has no copy of"):
        Workspace.open(id).commit(merge=True)


def test_a_file_that_is_gone_or_deleted_is_no_merge(workspace: Path, text: Path) -> None:
    (workspace / "deleted").write_text("text\n")
    kept = changed(workspace, f"{TOP}; rm deleted")
    text.unlink()
    (workspace / "deleted").write_text("changed\n")
    with pytest.raises(ConflictError) as caught:
        kept.commit(merge=True)
    assert sorted(caught.value.paths) == ["deleted", "text"]


def test_forks_and_files_without_a_sandbox_can_be_merged(workspace: Path, text: Path) -> None:
    (workspace / "other").write_text("".join(LINES))
    kept = changed(workspace, TOP)
    with kept.files as files:
        files.replace("other", "line 1\n", "by the program\n")
    (fork,) = kept.fork()
    kept.discard()
    edit(text, 9)
    edit(workspace / "other", 9)
    fork.commit(merge=True)
    for path in (text, workspace / "other"):
        assert (lines(path)[0], lines(path)[8]) == ("by the program", "by the host")


def test_only_what_fits_is_kept(workspace: Path, text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (workspace / f"{number}").write_text("".join(LINES))
    monkeypatch.setattr(bases, "IN_ALL", 2 * text.stat().st_size)
    kept = changed(workspace, "for name in 0 1 2 3; do echo >> $name; done")
    assert len(os.listdir(f"{kept.layer}/base")) == 2


def test_a_living_sandbox_is_not_merged(workspace: Path, text: Path) -> None:
    with Sandbox(stockade.Policy(workspace=str(workspace)), on_exit="discard") as box:
        box.run(["sh", "-c", TOP]).check()
        with pytest.raises(SetupError, match="while a sandbox lives in it"):
            box.workspace.commit(merge=True)
        box.workspace.commit()


def test_the_command_merges(workspace: Path, text: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept = changed(workspace, TOP)
    edit(text, 9)
    assert main(["commit", kept.id, "--merge", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["notes"] == [
        {"path": "text", "what": "merged with the host's changes to it"}
    ]
    assert (lines(text)[0], lines(text)[8]) == ("by the program", "by the host")


def test_a_merge_that_was_cut_short_is_found_again(
    workspace: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = changed(workspace, TOP)
    edit(text, 9)
    before = snapshot(workspace)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal, "write", full)
        with pytest.raises(SetupError, match="No space left"):
            kept.commit(merge=True)
    assert snapshot(workspace) == before
    edit(text, 5)
    Workspace.open(kept.id).commit(merge=True)
    found = lines(text)
    assert (found[0], found[4], found[8]) == ("by the program", "by the host", "by the host")
