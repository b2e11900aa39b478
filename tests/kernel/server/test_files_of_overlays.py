"""File calls on a copy-on-write workspace go through the mount: the kernel copies up and whites out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stockade.workspace.files import atomic_write
from support.living_files import BOUNDARY, LivingFiles, living_files, part

LOWER = """
echo lower > file; chmod 640 file; echo old text > text; chmod 751 text
mkdir -p dir/sub; echo deep > dir/sub/deep; ln -s file link
"""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[LivingFiles]:
    """A sandbox whose workspace is copy-on-write, with files that only the lower layer has."""
    yield from living_files(tmp_path, overlay=True, before=LOWER)


@pytest.fixture
def unchanged(files: LivingFiles) -> Iterator[None]:
    """The lower layer is the same after the test."""
    before = _content(files.workspace)
    yield
    assert _content(files.workspace) == before


def _content(top: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(top)): (path.lstat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in sorted(top.rglob("*"))
    }


def changes(files: LivingFiles) -> dict[str, str]:
    """What the overlay has recorded."""
    (workspace,) = files.box._overlays().values()
    return {change.path: change.kind for change in workspace.changes()}


@pytest.mark.usefixtures("unchanged")
def test_a_deleted_file_of_the_lower_layer_stays_deleted(files: LivingFiles) -> None:
    assert files.http("DELETE", "/files?path=file").status_code == 200
    assert files.sh("ls file link 2>&1 || true").count("No such file") >= 1
    assert files.http("GET", "/files/info?path=file").status_code == 404
    listed = [info["path"] for info in files.http("GET", "/directories/list?path=.").json()]
    assert listed == ["/workspace/dir", "/workspace/link", "/workspace/text"]
    assert "/workspace/file" not in files.http("GET", "/files/search?path=.").text
    assert changes(files) == {"file": "deleted"}


@pytest.mark.usefixtures("unchanged")
def test_a_file_that_is_deleted_and_made_again_has_only_the_new_content(files: LivingFiles) -> None:
    files.sh("rm -r dir; mkdir dir")
    assert files.http("GET", "/directories/list?path=dir&depth=3").json() == []
    assert files.upload(({"path": "dir/new"}, b"new")).status_code == 200
    assert files.sh("find dir") == "dir\ndir/new\n"


@pytest.mark.usefixtures("unchanged")
def test_permissions_of_a_lower_file_are_changed_in_the_upper(files: LivingFiles) -> None:
    body = {"file": {"mode": 600}, "dir": {"mode": 700}}
    assert files.http("POST", "/files/permissions", json=body).status_code == 200
    assert files.sh("stat -c %a file dir; cat file") == "600\n700\nlower\n"


@pytest.mark.usefixtures("unchanged")
def test_a_lower_file_and_a_lower_directory_can_be_moved(files: LivingFiles) -> None:
    body = [{"src": "file", "dest": "moved/file"}, {"src": "dir", "dest": "moved/dir"}]
    assert files.http("POST", "/files/mv", json=body).status_code == 200
    assert files.sh("cat moved/file moved/dir/sub/deep; ls") == "lower\ndeep\nlink\nmoved\ntext\n"
    assert files.sh("stat -c %a moved/file") == "640\n"


@pytest.mark.usefixtures("unchanged")
def test_a_lower_directory_is_removed_with_everything_in_it(files: LivingFiles) -> None:
    assert files.http("DELETE", "/directories?path=dir").status_code == 200
    assert files.sh("ls") == "file\nlink\ntext\n"
    assert files.http("GET", "/files/download?path=dir/sub/deep").status_code == 404


@pytest.mark.usefixtures("unchanged")
def test_replace_in_a_lower_file_keeps_its_mode(files: LivingFiles) -> None:
    answer = files.http("POST", "/files/replace", json={"text": {"old": "old", "new": "new"}})
    assert answer.json() == {"text": {"replacedCount": 1}}
    assert files.sh("cat text; stat -c %a text") == "new text\n751\n"


@pytest.mark.usefixtures("unchanged")
def test_an_upload_over_a_lower_file_is_seen_at_once(files: LivingFiles) -> None:
    assert files.upload(({"path": "file", "mode": 644}, b"upper")).status_code == 200
    assert files.sh("cat file link; stat -c %a file") == "upperupper644\n"
    files.sh("printf program > file")
    assert files.http("GET", "/files/download?path=file").text == "program"


@pytest.mark.usefixtures("unchanged")
def test_uploads_work_on_file_systems_without_unnamed_files(
    files: LivingFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic_write, "_NAMELESS", os.O_TMPFILE | os.O_RDONLY)  # which no file system takes
    assert files.upload(({"path": "file"}, b"1"), ({"path": "a/b/new"}, b"2")).status_code == 200
    assert files.sh("cat file a/b/new") == "12"
    half = part("metadata", b'{"path":"half"}') + part("file", b"x" * 1000)
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
    assert files.http("POST", "/files/upload", content=half, headers=headers).status_code == 400
    assert files.sh("find . -name 'half*' -o -name '.stockade*'") == ""
