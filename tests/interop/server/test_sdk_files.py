"""The published Python SDK, unmodified: files and directories."""

from __future__ import annotations

import io
from datetime import UTC, datetime

import pytest
from opensandbox import SandboxSync
from opensandbox.exceptions import SandboxApiException, SandboxException
from opensandbox.models.filesystem import (
    ContentReplaceEntry,
    DirectoryListEntry,
    MoveEntry,
    SearchEntry,
    SetPermissionEntry,
    WriteEntry,
)
from opensandbox.sync.services import FilesystemSync

NOBODY = 65534
LINES = "line1\nline2\nline3\nline4\nline5\n"


@pytest.fixture(scope="module")
def files(sandbox: SandboxSync) -> FilesystemSync:
    return sandbox.files


def shell(sandbox: SandboxSync, command: str) -> str:
    return sandbox.commands.run(command).text


def test_what_is_written_is_read_by_both_sides(sandbox: SandboxSync, files: FilesystemSync) -> None:
    files.write_file("/tmp/deep/er/text", "grüße\n", mode=640)
    assert shell(sandbox, "cat /tmp/deep/er/text; stat -c '%a %U:%G' /tmp/deep/er/text") == (
        "grüße\n640 root:root"
    )
    assert files.read_file("/tmp/deep/er/text") == "grüße\n"


def test_many_files_and_kinds_of_content_in_one_call(files: FilesystemSync) -> None:
    data = bytes(range(256)) * 40_000
    files.write_files(
        [
            WriteEntry(path="/tmp/many/a", data="a"),
            WriteEntry(path="/tmp/many/b", data=data),
            WriteEntry(path="/tmp/many/c", data=io.BytesIO(data)),
            WriteEntry(path="/tmp/many/d", data=""),
        ]
    )
    assert files.read_bytes("/tmp/many/b") == data == b"".join(files.read_bytes_stream("/tmp/many/c"))
    assert files.read_bytes("/tmp/many/d") == b""


def test_a_file_is_described_with_all_its_fields(sandbox: SandboxSync, files: FilesystemSync) -> None:
    files.write_file("/tmp/described", "12345", mode=604)
    info = files.get_file_info(["/tmp/described", "/tmp"])
    assert set(info) == {"/tmp/described", "/tmp"}
    one = info["/tmp/described"]
    assert (one.mode, one.size, one.owner, one.group, one.entry_type) == (604, 5, "root", "root", "file")
    for moment in (one.modified_at, one.created_at):
        assert abs((datetime.now(UTC) - moment).total_seconds()) < 60
    assert info["/tmp"].entry_type == "directory"


def test_a_missing_file_is_a_404_with_its_code(files: FilesystemSync) -> None:
    for call in (lambda: files.get_file_info(["/tmp", "/tmp/none"]), lambda: files.read_bytes("/tmp/none")):
        with pytest.raises(SandboxApiException) as caught:
            call()
        assert caught.value.status_code == 404 and "FILE_NOT_FOUND" in f"{caught.value} {caught.value.error}"


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ({"range_header": "bytes=0-4"}, "line1"),
        ({"range_header": "bytes=-6"}, "line5\n"),
        ({"range_header": "bytes=24-"}, "line5\n"),
        ({"offset": 2, "limit": 2}, "line2\nline3"),
        ({"offset": 5}, "line5"),
        ({"limit": 1}, "line1"),
    ],
    ids=str,
)
def test_parts_of_a_file(files: FilesystemSync, wanted: dict[str, str | int], text: str) -> None:
    files.write_file("/tmp/lines", LINES)
    assert files.read_file("/tmp/lines", **wanted).rstrip("\n") == text.rstrip("\n")


def test_lines_and_bytes_together_are_refused(files: FilesystemSync) -> None:
    files.write_file("/tmp/lines", LINES)
    with pytest.raises(SandboxException):
        files.read_file("/tmp/lines", range_header="bytes=0-1", offset=1)


def test_a_range_behind_the_end_is_a_416(files: FilesystemSync) -> None:
    files.write_file("/tmp/lines", LINES)
    with pytest.raises(SandboxApiException) as caught:
        files.read_bytes("/tmp/lines", range_header="bytes=1000-")
    assert caught.value.status_code == 416


def test_owners_and_modes_are_those_of_the_sandbox(
    sandbox: SandboxSync, files: FilesystemSync, other_ids: None
) -> None:
    files.write_file("/tmp/owned", "x", mode=755, owner="nobody", group="nogroup")
    assert shell(sandbox, "stat -c '%U:%G %a' /tmp/owned") == "nobody:nogroup 755"
    files.set_permissions([SetPermissionEntry(path="/tmp/owned", mode=600, owner="root", group="root")])
    info = files.get_file_info(["/tmp/owned"])["/tmp/owned"]
    assert (info.owner, info.group, info.mode) == ("root", "root", 600)


def test_a_directory_with_mode_644_can_still_be_used(sandbox: SandboxSync, files: FilesystemSync) -> None:
    files.create_directories([WriteEntry(path="/tmp/odd/inner", mode=644)])
    files.write_file("/tmp/moved", "x")
    files.move_files([MoveEntry(src="/tmp/moved", dest="/tmp/odd/inner/moved")])
    assert files.read_file("/tmp/odd/inner/moved") == "x"
    assert shell(sandbox, "stat -c %a /tmp/odd/inner") == "644"


def test_a_move_of_a_missing_file_is_a_404(files: FilesystemSync) -> None:
    with pytest.raises(SandboxApiException) as caught:
        files.move_files([MoveEntry(src="/tmp/none", dest="/tmp/other")])
    assert caught.value.status_code == 404


def test_contents_are_replaced_and_counted(files: FilesystemSync) -> None:
    files.write_file("/tmp/replaced", "a b a", mode=751)
    files.replace_contents([ContentReplaceEntry(path="/tmp/replaced", old_content="b", new_content="c")])
    counts = files.replace_contents_detailed(
        [ContentReplaceEntry(path="/tmp/replaced", old_content="a", new_content="d")]
    )
    assert [(one.path, one.replaced_count) for one in counts] == [("/tmp/replaced", 2)]
    assert files.read_file("/tmp/replaced") == "d c d"
    assert files.get_file_info(["/tmp/replaced"])["/tmp/replaced"].mode == 751
    with pytest.raises(SandboxException):
        files.replace_contents([ContentReplaceEntry(path="/tmp/replaced", old_content="", new_content="x")])


def test_search_finds_files_by_base_name_at_any_depth(files: FilesystemSync) -> None:
    files.write_files(
        [WriteEntry(path=f"/tmp/search/{name}", data="x") for name in ("a.py", "b.txt", "sub/c.py")]
    )
    found = files.search(SearchEntry(path="/tmp/search", pattern="*.py"))
    assert sorted(one.path for one in found) == ["/tmp/search/a.py", "/tmp/search/sub/c.py"]
    assert len(files.search(SearchEntry(path="/tmp/search", pattern="*"))) == 3
    by_path = files.search(SearchEntry(path="/tmp/search", pattern="sub/*.py"))
    assert [one.path for one in by_path] == ["/tmp/search/sub/c.py"]


def test_a_directory_is_listed_as_deep_as_asked(sandbox: SandboxSync, files: FilesystemSync) -> None:
    shell(sandbox, "mkdir -p /tmp/listed/b/deep; touch /tmp/listed/a /tmp/listed/b/c; ln -s b /tmp/listed/l")

    def names(depth: int | None) -> list[str]:
        return [one.path for one in files.list_directory(DirectoryListEntry(path="/tmp/listed", depth=depth))]

    assert names(None) == names(1) == ["/tmp/listed/a", "/tmp/listed/b", "/tmp/listed/l"]
    assert names(0) == []
    assert set(names(2)) == {*names(1), "/tmp/listed/b/c", "/tmp/listed/b/deep"}
    with pytest.raises(SandboxApiException) as caught:
        files.list_directory(DirectoryListEntry(path="/tmp/listed/l"))
    assert caught.value.status_code == 400


def test_deleting(files: FilesystemSync) -> None:
    files.write_file("/tmp/gone/file", "x")
    files.delete_files(["/tmp/gone/file", "/tmp/gone/never-was"])
    with pytest.raises(SandboxException):
        files.delete_files(["/tmp/gone"])
    files.delete_directories(["/tmp/gone"])
    with pytest.raises(SandboxApiException):
        files.get_file_info(["/tmp/gone"])


def test_the_system_cannot_be_changed(files: FilesystemSync) -> None:
    with pytest.raises(SandboxException):
        files.write_file("/usr/bin/changed", "x")


def test_a_link_does_not_lead_out(sandbox: SandboxSync, files: FilesystemSync) -> None:
    shell(sandbox, "ln -sfn /proc/1/root/etc/shadow /tmp/out; ln -sfn ../../../../etc/passwd /tmp/up")
    inside = shell(sandbox, "cat /etc/passwd")
    assert files.read_file("/tmp/up").rstrip("\n") == inside
    with pytest.raises(SandboxException):
        files.read_file("/tmp/out")


def test_file_calls_act_as_the_identity_that_is_given(
    sandbox: SandboxSync, files: FilesystemSync, other_ids: None
) -> None:
    shell(
        sandbox,
        "mkdir -p /tmp/shared; chmod 1777 /tmp/shared; echo secret > /tmp/private; chmod 600 /tmp/private",
    )
    nobody = sandbox.files_with_identity(NOBODY, NOBODY)
    nobody.write_file("/tmp/shared/theirs", "x", mode=644)
    assert shell(sandbox, "stat -c %u:%g /tmp/shared/theirs") == f"{NOBODY}:{NOBODY}"
    with pytest.raises(SandboxException):
        nobody.read_file("/tmp/private")
    with pytest.raises(SandboxException):
        nobody.write_file("/root/theirs", "x")
    assert files.read_file("/tmp/private") == "secret\n"
