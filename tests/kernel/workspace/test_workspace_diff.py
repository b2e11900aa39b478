"""What changed, file by file; and patches that git applies."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stockade
from stockade import Policy, SetupError
from stockade.workspace.diff import diff as module
from stockade.workspace.diff.diff import Diff, FileDiff
from stockade.workspace.diff.line_diff import unified
from support.means import need, need_program
from support.trees import changed, snapshot


@pytest.fixture
def project(workspace: Path) -> Path:
    (workspace / "file").write_text("".join(f"{number}\n" for number in range(20)))
    (workspace / "other").write_text("other\n")
    (workspace / "no end").write_text("a\nb")
    (workspace / "empty").touch()
    (workspace / "binary").write_bytes(bytes(range(256)) * 40)
    (workspace / "link").symlink_to("file")
    (workspace / "full" / "deep").mkdir(parents=True)
    (workspace / "full" / "one").write_text("1\n")
    (workspace / "full" / "deep" / "two").write_text("2\n")
    return workspace


def diff(project: Path, script: str, **options: bool) -> Diff:
    return changed(project, script).diff(**options)


def only(project: Path, script: str) -> FileDiff:
    (one,) = diff(project, script).files
    return one


class TestOneFile:
    def test_that_is_new(self, project: Path) -> None:
        one = only(project, "printf 'x\\ny\\n' > new; chmod 644 new")
        assert (one.path, one.kind, one.added, one.removed) == ("new", "added", 2, 0)
        assert (one.old_mode, one.new_mode, one.text) == (None, 0o644, b"@@ -0,0 +1,2 @@\n+x\n+y\n")

    def test_that_changed(self, project: Path) -> None:
        one = only(project, "sed -i -e 5d -e 's/^15$/x/' file")
        assert (one.kind, one.added, one.removed, one.what) == ("modified", 1, 2, ("content",))
        assert one.text.startswith(b"@@ -2,7 +2,6 @@\n 1\n 2\n 3\n-4\n 5\n")
        assert b"-15\n+x\n" in one.text

    def test_that_is_gone(self, project: Path) -> None:
        one = only(project, "rm other")
        assert (one.kind, one.removed, one.text) == ("deleted", 1, b"@@ -1 +0,0 @@\n-other\n")

    def test_whose_mode_changed(self, project: Path) -> None:
        one = only(project, "chmod 700 other")
        assert (one.kind, one.what, one.old_mode, one.new_mode, one.text) == (
            "modified",
            ("mode",),
            0o644,
            0o700,
            b"",
        )

    def test_that_was_renamed(self, project: Path) -> None:
        one = only(project, "mv other full/moved; chmod 700 full/moved")
        assert (one.kind, one.was, one.path, one.new_mode) == ("renamed", "other", "full/moved", 0o700)

    def test_that_was_renamed_and_changed_is_two(self, project: Path) -> None:
        found = diff(project, "mv other moved; echo x >> moved").files
        assert [(one.kind, one.path) for one in found] == [("added", "moved"), ("deleted", "other")]

    def test_that_is_binary(self, project: Path) -> None:
        one = only(project, "printf 'x' >> binary")
        assert (one.binary, one.text, one.old_size, one.new_size) == (True, b"", 10240, 10241)

    def test_that_is_too_large_to_show(self, project: Path) -> None:
        one = only(project, "yes | head -c 3000000 > large")
        assert (one.cut, one.text, one.new_size) == (True, b"", 3000000)

    def test_that_the_program_closed_to_its_owner(self, project: Path) -> None:
        found = diff(project, "mkdir d; echo 1 > d/f; chmod 000 d/f d").files
        assert [(one.path, one.text) for one in found] == [("d", b""), ("d/f", b"@@ -0,0 +1 @@\n+1\n")]

    def test_that_is_as_it_was(self, project: Path) -> None:
        one = only(project, "touch file other; cat other > t; mv t other; echo x > new")
        assert one.path == "new"


def test_a_link_says_where_it_leads(project: Path) -> None:
    one = only(project, "ln -sfn /etc/passwd link")
    assert (one.type, one.kind, one.what, one.target) == ("link", "modified", ("target",), "/etc/passwd")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("rm other; ln -s file other", [("deleted", "other", "file"), ("added", "other", "link")]),
        ("rm other; mkdir other", [("deleted", "other", "file"), ("added", "other", "directory")]),
        ("rm -r full; ln -s x full", [
            ("deleted", "full", "directory"), ("added", "full", "link"),
            ("deleted", "full/deep", "directory"), ("deleted", "full/deep/two", "file"),
            ("deleted", "full/one", "file"),
        ]),
        ("mkfifo pipe", [("added", "pipe", "pipe")]),
    ],
)  # fmt: skip
def test_what_changed_its_type_is_deleted_and_added(
    project: Path, script: str, expected: list[tuple[str, str, str]]
) -> None:
    assert [(one.kind, one.path, one.type) for one in diff(project, script).files] == expected


def test_a_removed_directory_is_listed_file_by_file(project: Path) -> None:
    found = diff(project, "rm -r full")
    assert [one.path for one in found.files] == ["full", "full/deep", "full/deep/two", "full/one"]
    assert (found.added, found.removed) == (0, 2)


def test_only_some_paths(project: Path) -> None:
    workspace = changed(project, "echo x > new; echo y > full/new; rm other")
    assert [one.path for one in workspace.diff(["full", "other"]).files] == ["full/new", "other"]


def test_all_together_is_bounded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SHOWN_IN_ALL", 5000)
    found = diff(project, "for i in 1 2 3; do seq 1000 > new$i; done").files
    assert [one.cut for one in found] == [False, True, True]


@given(st.lists(st.sampled_from([b"a\n", b"b\n", b"c\n", b"d\n"]), max_size=30), st.data())
def test_hunks_lead_from_the_one_text_to_the_other(old: list[bytes], data: st.DataObject) -> None:
    new = data.draw(st.lists(st.sampled_from([*old, b"x\n"]), max_size=30))
    ends = data.draw(st.tuples(st.booleans(), st.booleans()))
    before, after = (
        text[:-1] if end else text for text, end in zip((b"".join(old), b"".join(new)), ends, strict=True)
    )
    hunks, added, removed = unified(before, after)
    assert applied(before, hunks) == after
    assert added - removed == len(after.splitlines()) - len(before.splitlines())
    assert (hunks == b"") == (before == after)


def applied(old: bytes, hunks: bytes) -> bytes:
    """A small patch program: exact, and without any tolerance."""
    source, done, at = old.splitlines(keepends=True), [], 0
    text = hunks.replace(b"\n\\ No newline at end of file\n", b"\0")
    for line in text.replace(b"\0", b"\0\n").split(b"\n")[:-1]:
        if line.startswith(b"@@"):
            start, _, count = line.split()[1][1:].partition(b",")
            first = int(start) - (count != b"0")
            done += source[at:first]
            at = first
            continue
        content = line[1:-1] if line.endswith(b"\0") else line[1:] + b"\n"
        if line[:1] in b" -":
            assert source[at] == content
            at += 1
        if line[:1] in b" +":
            done.append(content)
    return b"".join(done + source[at:])


class TestPatches:
    """`git apply` makes of a copy of the tree what a commit makes of the tree."""

    @pytest.mark.parametrize(
        "script",
        [
            "echo x > new; mkdir -p a/b; echo y > a/b/c",
            "sed -i -e 3d -e 's/^15$/x/' file; echo z >> other",
            "rm file 'no end' empty binary",
            "rm -r full",
            "chmod 755 file; chmod 755 other; echo x >> other",
            "ln -s /etc/passwd new; ln -sfn other link; ln -s 'a b' 'c d'",
            "rm link; rm other; ln -s file other",
            "rm link; echo x > link",
            "mv other full/moved; mv file 'a b'; chmod 755 'a b'",
            "touch -- 'a b' 'tab\there' 'quote\"d' 'back\\slash' '-dash' 'ä' \"$(printf '\\377\\001')\"",
            "echo x > 'a b'; echo y > 'tab\there'; echo z > \"$(printf 'new\\nline\\377')\"",
            "mv other 'o \"o'; mv file \"$(printf 'x\\377')\"",
            "printf 'a\\nb\\n' > 'no end'",
            "printf c >> 'no end'; printf x >> other; printf y > new",
            "printf 'x\\n' > empty; : > other",
            "printf 'x' >> binary; head -c 5000 /dev/urandom > new; head -c 1 /dev/zero > one",
            "printf 'text\\n' > binary",
            "head -c 300 /dev/urandom > other; rm binary",
            "rm -r full; echo x > full",
            "rm other; mkdir other; echo x > other/one",
            "yes | head -100000 > long; seq 3000 > file",
            "printf 'a\\r\\nb\\r\\n' > crlf; printf '\\377\\376x\\n' > latin",
            "chmod 755 empty; touch new; chmod 755 new",
        ],
    )
    def test_apply(self, project: Path, tmp_path: Path, script: str) -> None:
        git = need_program("git")
        copy = tmp_path / "copy"
        subprocess.run(["cp", "-a", str(project), str(copy)], check=True)
        workspace = changed(project, script)
        found = workspace.diff(patch=True)
        assert found.left_out == ()
        patch = tmp_path / "patch"
        patch.write_bytes(found.patch)
        for words in (["init", "-q"], ["apply", "--check", str(patch)], ["apply", str(patch)]):
            done = subprocess.run([git, *words], cwd=copy, capture_output=True, check=False)
            assert done.returncode == 0, (done.stderr, found.patch[:2000])
        subprocess.run(["rm", "-r", str(copy / ".git")], check=True)
        workspace.commit()
        wanted = {path: value for path, value in snapshot(project).items() if value[0] != "directory"}
        made = {path: value for path, value in snapshot(copy).items() if value[0] != "directory"}
        assert made == wanted

    def test_backwards(self, project: Path, tmp_path: Path) -> None:
        git = need_program("git")
        before = snapshot(project)
        script = "echo x > new; rm other; printf x >> binary; chmod 755 file; mv 'no end' end; ln -sfn x link"
        workspace = changed(project, script)
        (tmp_path / "patch").write_bytes(workspace.diff(patch=True).patch)
        workspace.commit()
        subprocess.run([git, "apply", "-R", str(tmp_path / "patch")], cwd=project, check=True)
        assert snapshot(project) == before

    @pytest.mark.parametrize("script", ["mkfifo pipe", "mkdir hollow", "chmod 700 full", "chmod 600 other"])
    def test_say_what_they_cannot_hold(self, project: Path, script: str) -> None:
        found = diff(project, script, patch=True)
        assert found.patch == b"" and len(found.left_out) == 1

    def test_are_refused_for_what_is_too_large(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "PATCHED", 2_000_000)
        with pytest.raises(SetupError, match="large is too large for a patch"):
            diff(project, "yes | head -c 3000000 > large", patch=True)

    def test_of_text_that_is_not_shown_are_whole(self, project: Path) -> None:
        found = diff(project, "seq 400000 > large", patch=True)
        assert found.files[0].cut and found.patch.count(b"\n+") > 400000


def test_nothing_is_left_open_by_unreadable_things(project: Path) -> None:
    workspace = changed(project, "mkdir -p a/b; chmod 000 a/b a; mkfifo p; ln -s /dev/zero z")
    before = set(os.listdir("/proc/self/fd"))
    workspace.diff(patch=True)
    assert set(os.listdir("/proc/self/fd")) == before


class TestAttributes:
    """What is kept beside a file's content."""

    @pytest.fixture
    def marked(self, workspace: Path) -> Path:
        (workspace / "file").write_text("same\n")
        (workspace / "dir").mkdir()
        try:
            for path in (workspace, workspace / "file", workspace / "dir"):
                os.setxattr(path, "user.note", b"old")
        except OSError as error:
            need(False, f"the file system keeps no attributes: {error.strerror}")
        return workspace

    def test_one_that_is_new_changed_or_gone_is_a_change(self, marked: Path) -> None:
        script = """
import os
for name in ("gone", "new", "other"): open(name, "w").write("x")
os.setxattr("file", "user.note", b"new")
os.setxattr("dir", "user.more", b"1")
"""
        one = changed(marked, script, python=True)
        found = {file.path: (file.kind, file.what) for file in one.diff().files}
        assert found["file"] == found["dir"] == ("modified", ("attributes",))
        assert "file" in one.diff(patch=True).left_out
        done = one.commit()
        assert os.getxattr(marked / "file", "user.note") == b"new" and done.closed
        assert {note.path for note in done.notes} == {"dir"}, "those of directories are not taken over"
        assert os.listxattr(marked / "dir") == ["user.note"]
        gone = changed(marked, "import os; os.removexattr('file', 'user.note')", python=True)
        assert [(file.path, file.what) for file in gone.diff().files] == [("file", ("attributes",))]
        gone.commit()
        assert os.listxattr(marked / "file") == []

    def test_a_file_that_was_copied_up_and_is_as_it_was_has_none(self, marked: Path) -> None:
        result = stockade.run(
            ["sh", "-c", "touch -r dir file; chmod 700 dir; chmod 755 dir"], Policy(workspace=str(marked))
        )
        assert result.ok and not result.changes
