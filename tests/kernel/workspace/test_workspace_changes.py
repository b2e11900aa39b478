"""The list of changes: what differs from the host's tree, whatever a program did to it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import stockade
from stockade import Policy
from stockade.workspace.diff.layer_walk import WalkBudget, same_content


def changes(script: str, workspace: Path) -> dict[str, str]:
    result = stockade.run(["sh", "-c", script], Policy(workspace=str(workspace)), timeout=60)
    assert result.ok, result.stderr
    assert [change.path for change in result.changes] == sorted(change.path for change in result.changes)
    return {change.path: change.kind for change in result.changes}


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("old\n")
    (workspace / "link").symlink_to("file")
    (workspace / "full" / "deep").mkdir(parents=True)
    (workspace / "full" / "one").write_text("1\n")
    (workspace / "full" / "deep" / "two").write_text("2\n")
    (workspace / "empty").mkdir()
    return workspace


@pytest.mark.parametrize(
    ("script", "expected"),
    {
        "nothing": (":", {}),
        "a read": ("cat file >/dev/null", {}),
        "a new file": ("touch new", {"new": "added"}),
        "a changed file": ("echo x >> file", {"file": "modified"}),
        "a removed file": ("rm file", {"file": "deleted"}),
        "a new directory": ("mkdir -p new/er", {"new": "added", "new/er": "added"}),
        "a file in an old directory": ("touch full/new", {"full/new": "added"}),
        "a removed empty directory": ("rmdir empty", {"empty": "deleted"}),
        "a removed full directory": ("rm -r full", {"full": "deleted"}),
        "a new link": ("ln -s /etc new", {"new": "added"}),
        "a link that leads elsewhere": ("ln -sfn /etc link", {"link": "modified"}),
        "a removed link": ("rm link", {"link": "deleted"}),
        "a new pipe": ("mkfifo new", {"new": "added"}),
        "a new hard link": ("ln file new", {"new": "added"}),
        "a file's mode": ("chmod 600 file", {"file": "modified"}),
        "a directory's mode": ("chmod 700 full", {"full": "modified"}),
        "a file in place of a directory": ("rm -r full; touch full", {"full": "modified"}),
        "a directory in place of a file": (
            "rm file; mkdir file; touch file/x",
            {"file": "modified", "file/x": "added"},
        ),
        "a renamed file": ("mv file new", {"file": "deleted", "new": "added"}),
        "a file made and removed": ("touch new; rm new", {}),
        "a directory removed and made again": (
            "rm -r full; mkdir full; echo 3 > full/three",
            {"full/deep": "deleted", "full/one": "deleted", "full/three": "added"},
        ),
        "a directory removed and made again with one file of old": (
            "rm -r full; mkdir full; echo 1 > full/one",
            {"full/deep": "deleted"},
        ),
    }.values(),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_list_says(project: Path, script: str, expected: dict[str, str]) -> None:
    assert changes(script, project) == expected


@pytest.mark.parametrize("script", ["echo old > file", "touch file", "rm file; echo old > file"])
def test_a_file_that_is_the_same_again_is_no_change(project: Path, script: str) -> None:
    assert changes(script, project) == {}


def test_a_file_of_the_same_size_with_other_content_is_a_change(project: Path) -> None:
    assert changes("echo new > file; touch -r link file", project) == {"file": "modified"}


def test_of_a_file_with_holes_only_the_data_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a little data in a large file would hold up everything that looks at the workspace."""
    ends, read = [tmp_path / "one", tmp_path / "other"], list[int]()
    for end in ends:
        end.mkdir()
        with open(end / "holes", "wb") as file:
            for place in range(0, 64 << 20, 4 << 20):
                os.pwrite(file.fileno(), b"1", place)

    def counted(file: int, size: int, place: int) -> bytes:
        read.append(size)
        return pread(file, size, place)

    pread = os.pread
    monkeypatch.setattr(os, "pread", counted)
    info = (ends[0] / "holes").stat()
    above, below = (os.open(end, os.O_RDONLY | os.O_DIRECTORY) for end in ends)
    assert same_content("holes", above, below, info, info, WalkBudget())
    assert sum(read) <= 2 * 16 * (64 << 10)
    for descriptor in (above, below):
        os.close(descriptor)


def test_a_renamed_directory_is_moved_by_its_contents(project: Path) -> None:
    assert changes("mv full moved", project) == {
        "full": "deleted",
        "moved": "added",
        "moved/deep": "added",
        "moved/deep/two": "added",
        "moved/one": "added",
    }


def test_the_mode_of_the_workspace_itself_is_a_change(project: Path) -> None:
    assert changes("chmod 711 .", project) == {".": "modified"}


@pytest.mark.parametrize(
    "name",
    [b"new\nline", b"\x1b[2J\x07", b"\xff\xfe", b"x" * 255, b" ", b"-rf", "ä€😀".encode(), b"a\\b:c,d"],
    ids=["newline", "control", "not UTF-8", "255 bytes", "blank", "dash", "unicode", "overlay's own"],
)
def test_a_path_may_have_any_name(project: Path, name: bytes) -> None:
    script = "import os, sys; os.mkdir(b'd'); open(b'd/' + os.fsencode(sys.argv[1]), 'w').close()"
    result = stockade.run(
        ["/usr/bin/python3", "-c", script, os.fsdecode(name)], Policy(workspace=str(project))
    ).check()
    assert [os.fsencode(change.path) for change in result.changes] == [b"d", b"d/" + name]


class TestWhatAProgramCannotHide:
    def test_in_a_directory_that_it_made_unreadable(self, project: Path) -> None:
        found = changes("mkdir d; touch d/f; chmod 000 d", project)
        assert found == {"d": "added", "d/f": "added"}

    def test_in_unreadable_directories_at_every_depth(self, project: Path) -> None:
        found = changes("mkdir -p d/e/f; touch d/e/f/g; chmod 000 d/e/f d/e; chmod 111 d", project)
        assert found == {"d": "added", "d/e": "added", "d/e/f": "added", "d/e/f/g": "added"}

    def test_in_a_workspace_that_it_made_unreadable(self, project: Path) -> None:
        found = changes("touch f; chmod 000 .", project)
        assert found["f"] == "added"

    def test_in_a_directory_of_the_hosts_that_was_unreadable(self, project: Path) -> None:
        (project / "empty").chmod(0)
        try:
            assert changes("chmod 755 empty; touch empty/x", project) == {
                "empty": "modified",
                "empty/x": "added",
            }
        finally:
            (project / "empty").chmod(0o755)

    def test_in_a_very_deep_tree(self, project: Path, stockade_home: Path) -> None:
        script = "import os\nfor _ in range(1500): os.mkdir('d'); os.chdir('d')\nopen('end', 'w').close()"
        policy = Policy(workspace=str(project))
        try:
            result = stockade.run(["/usr/bin/python3", "-c", script], policy, on_exit="discard", timeout=60)
        finally:
            # Were it left, it would be too deep for Python's own rmtree, and so for pytest's cleaning.
            left = list((stockade_home / "workspaces").iterdir())
            subprocess.run(["rm", "-rf", *left], check=True)
        assert left == []
        assert result.ok
        # Somewhere on the way down a directory may stand for what is in it.
        assert [change.path for change in result.changes][:100] == ["/".join("d" * n) for n in range(1, 101)]

    def test_below_a_very_deep_tree_of_the_hosts(self, project: Path) -> None:
        deep = project / "/".join("d" * 150)
        deep.mkdir(parents=True)
        (deep / "file").write_text("old\n")
        found = changes(f"echo x >> {'/'.join('d' * 150)}/file", project)
        (path,) = found
        assert f"{'/'.join('d' * 150)}/file".startswith(path) and found[path] == "modified"

    def test_among_very_many_files(self, project: Path) -> None:
        found = changes("mkdir m; cd m; seq 1 3000 | xargs touch", project)
        assert len(found) == 3001


class TestWhatAProgramLeaves:
    @pytest.mark.parametrize(
        "script",
        [
            "mkdir -p d/e; touch d/e/f; chmod 000 d/e d",
            "chmod 000 .",
            "mkdir d; touch d/f; chmod 500 d",
            "mkfifo p; ln -s / l; ln -s p q",
            "rm -r full file link empty",
        ],
    )
    def test_can_be_discarded(self, project: Path, stockade_home: Path, script: str) -> None:
        policy = Policy(workspace=str(project))
        stockade.run(["sh", "-c", script], policy, on_exit="discard").check()
        assert list((stockade_home / "workspaces").iterdir()) == []
        assert (project / "file").read_text() == "old\n"

    def test_a_link_out_of_the_workspace_is_not_followed_when_it_is_discarded(
        self, project: Path, tmp_path: Path
    ) -> None:
        (tmp_path / "precious").mkdir()
        (tmp_path / "precious" / "x").touch()
        policy = Policy(workspace=str(project))
        stockade.run(["ln", "-s", str(tmp_path / "precious"), "l"], policy, on_exit="discard").check()
        assert (tmp_path / "precious" / "x").exists()
