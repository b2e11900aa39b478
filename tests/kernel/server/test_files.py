"""The endpoints of files: what the wire contract says, against a living sandbox."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from stockade.server.execd import uploads
from support.living_files import BOUNDARY, LivingFiles, living_files, part

MULTIPART = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
END = f"--{BOUNDARY}--\r\n".encode()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[LivingFiles]:
    """A sandbox with the endpoints of its files."""
    yield from living_files(tmp_path)


def refused(answer: httpx.Response, status: int, code: str) -> str:
    """The message of an error with this status and code."""
    body = answer.json()
    assert (answer.status_code, body["code"]) == (status, code), answer.text
    assert set(body) == {"code", "message"}
    return str(body["message"])


def empty(answer: httpx.Response) -> None:
    """An answer with nothing to say has a length of 0."""
    assert (answer.status_code, answer.content) == (200, b""), answer.text
    assert answer.headers["content-length"] == "0"


def download(
    files: LivingFiles, path: str, headers: dict[str, str] | None = None, **query: Any
) -> httpx.Response:
    return files.http("GET", "/files/download", params={"path": path, **query}, headers=headers)


# What a file is


def test_info_has_every_field_and_the_paths_as_they_were_sent(files: LivingFiles) -> None:
    files.sh("printf 12345 > f; chmod 640 f; ln -s f l; mkdir -m 751 d; mkfifo p; mkdir ~/h")
    sent = ["f", "/workspace/l", "./d", "p", "~/h"]
    answer = files.http("GET", "/files/info", params=[("path", path) for path in sent])
    assert answer.status_code == 200
    found = answer.json()
    assert list(found) == sent
    assert [found[path]["type"] for path in sent] == ["file", "symlink", "directory", "other", "directory"]
    info = found["f"]
    assert set(info) == {"path", "type", "size", "modified_at", "created_at", "owner", "group", "mode"}
    assert (info["path"], info["size"], info["mode"]) == ("/workspace/f", 5, 640)
    assert (info["owner"], info["group"]) == ("root", "root")
    assert found["./d"]["mode"] == 751
    for moment in (info["modified_at"], info["created_at"]):
        since = datetime.now(UTC) - datetime.fromisoformat(moment)
        assert 0 <= since.total_seconds() < 60
    assert found["~/h"]["path"] == "/root/h"


def test_info_of_a_missing_file_is_404_even_if_others_exist(files: LivingFiles) -> None:
    answer = files.http("GET", "/files/info", params=[("path", "/tmp"), ("path", "/tmp/none")])
    assert "/tmp/none" in refused(answer, 404, "FILE_NOT_FOUND")


def test_a_call_without_its_path_is_400(files: LivingFiles) -> None:
    for call in ("GET /files/info", "DELETE /files", "DELETE /directories", "GET /files/download"):
        assert "path" in refused(files.http(*call.split(maxsplit=1)), 400, "MISSING_QUERY")


def test_times_that_no_date_can_show_are_shown_as_the_nearest(files: LivingFiles) -> None:
    files.sh("touch -d @253402300900 f || touch f")
    assert files.http("GET", "/files/info", params={"path": "f"}).status_code == 200


def test_a_name_that_is_not_utf_8_is_shown_and_can_be_named_by_its_bytes(files: LivingFiles) -> None:
    files.sh(r"printf x > $(printf 'a\377b')")
    (found,) = files.http("GET", "/directories/list?path=.").json()
    assert found["path"] == "/workspace/a\\xffb"
    answer = files.http("GET", "/files/info?path=a%FFb")
    assert answer.json()["a\\xffb"]["size"] == 1
    assert files.http("GET", "/files/download?path=a%FFb").content == b"x"
    empty(files.http("DELETE", "/files?path=a%FFb"))
    assert files.sh("ls") == ""


# Reading


def test_download_sends_the_bytes_of_a_file(files: LivingFiles) -> None:
    content = os.urandom(1000)
    files.upload(({"path": "b"}, content))
    answer = download(files, "b")
    assert (answer.status_code, answer.content) == (200, content)
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.headers["content-length"] == "1000"


def test_download_streams_a_large_file(files: LivingFiles) -> None:
    content = os.urandom(3 << 20)
    files.upload(({"path": "big"}, content))
    answer = download(files, "big")
    assert answer.content == content
    assert answer.headers["content-length"] == str(len(content))
    assert download(files, "big", {"range": "bytes=100-2000099"}).content == content[100:2000100]


def test_a_range_is_206(files: LivingFiles) -> None:
    cases: list[Any] = [
        ("bytes=2-4", b"234", "bytes 2-4/10"),
        ("bytes=7-", b"789", "bytes 7-9/10"),
        ("bytes=-2", b"89", "bytes 8-9/10"),
        ("bytes=8-100", b"89", "bytes 8-9/10"),
    ]
    for ranges, piece, said in cases:
        files.sh("printf 0123456789 > f")
        answer = download(files, "f", {"range": ranges})
        assert (answer.status_code, answer.content) == (206, piece)
        assert answer.headers["content-range"] == said


def test_a_range_that_the_file_does_not_have_is_416(files: LivingFiles) -> None:
    for ranges in ("bytes=10-", "bytes=5-4", "bytes=x-y", "lines=1-2", "bytes=-0", "bytes="):
        files.sh("printf 0123456789 > f")
        answer = download(files, "f", {"range": ranges})
        assert refused(answer, 416, "UNKNOWN")
        assert answer.headers["content-range"] == "bytes */10"


def test_lines_count_from_one_and_have_no_final_newline(files: LivingFiles) -> None:
    cases: list[Any] = [
        ({"offset": 2, "limit": 2}, "line2\nline3"),
        ({"offset": 4, "limit": 9}, "line4\nline5"),
        ({"limit": 1}, "line1"),
        ({"offset": 4}, "line4\nline5"),
        ({"offset": 9, "limit": 1}, ""),
    ]
    for query, lines in cases:
        files.sh("printf 'line1\\nline2\\nline3\\nline4\\nline5\\n' > f")
        answer = download(files, "f", **query)
        assert (answer.status_code, answer.text) == (200, lines)


def test_lines_of_a_large_file_are_found(files: LivingFiles) -> None:
    files.sh("seq 1 200000 > f")
    assert download(files, "f", offset=150_000, limit=2).text == "150000\n150001"


def test_lines_and_a_range_together_are_400(files: LivingFiles) -> None:
    files.sh("echo 1 > f")
    answer = files.http("GET", "/files/download?path=f&offset=1&limit=1", headers={"range": "bytes=0-1"})
    assert "Range" in refused(answer, 400, "INVALID_REQUEST_BODY")


def test_lines_must_be_positive_numbers(files: LivingFiles) -> None:
    for query in ("offset=0", "limit=0", "offset=-1", "limit=x", "offset=1.5"):
        files.sh("echo 1 > f")
        words = refused(files.http("GET", f"/files/download?path=f&{query}"), 400, "INVALID_REQUEST_BODY")
        assert words.startswith(query.partition("=")[0])


def test_what_is_no_regular_file_is_not_sent(files: LivingFiles) -> None:
    files.sh("mkdir d; mkfifo p")
    refused(download(files, "d"), 400, "INVALID_FILE")
    refused(download(files, "p"), 403, "DENIED")
    refused(download(files, "none"), 404, "FILE_NOT_FOUND")


# Writing


def test_upload_writes_many_files_with_their_modes_and_parents(files: LivingFiles) -> None:
    many = [({"path": f"deep/{n}/f", "mode": 640 + n % 2}, str(n).encode()) for n in range(50)]
    empty(files.upload(*many, ({"path": "/tmp/other", "owner": None, "group": None, "mode": 755}, b"x")))
    assert files.sh("cat deep/7/f; stat -c ' %a' deep/7/f deep/8/f /tmp/other") == "7 641\n 640\n 755\n"
    assert files.sh("find deep -type f | wc -l") == "50\n"


def test_upload_without_a_mode_keeps_that_of_an_existing_file(files: LivingFiles) -> None:
    files.sh("touch old; chmod 600 old")
    files.upload(({"path": "old"}, b"1"), ({"path": "new"}, b"2"))
    assert files.sh("stat -c %a old new") == "600\n644\n"


def test_upload_with_a_length_works_too(files: LivingFiles) -> None:
    parts = [
        ("metadata", ("metadata", json.dumps({"path": "a", "mode": 644}), "application/json")),
        ("file", ("/some/where/else", b"content", "application/octet-stream")),
    ]
    empty(files.http("POST", "/files/upload", files=parts))
    assert files.sh("cat a; ls") == "contenta\n"


def test_upload_accepts_all_metadata_before_all_files(files: LivingFiles) -> None:
    body = b"".join(
        (
            part("metadata", b'{"path":"a"}'),
            part("metadata", b'{"path":"b"}'),
            part("file", b"1"),
            part("file", b"2"),
            END,
        )
    )
    empty(files.http("POST", "/files/upload", content=body, headers=MULTIPART))
    assert files.sh("cat a b") == "12"


def test_upload_gives_files_to_their_owner(files: LivingFiles) -> None:
    files.several_ids()
    empty(files.upload(({"path": "f", "owner": "nobody", "group": "nogroup", "mode": 600}, b"x")))
    assert files.sh("stat -c '%U:%G %a' f") == "nobody:nogroup 600\n"


def test_uploads_of_a_user_belong_to_that_user(files: LivingFiles) -> None:
    files.several_ids()
    empty(files.upload(({"path": "/tmp/f", "mode": 755}, b"x"), prefix="/as/1234/1235"))
    assert files.sh("stat -c %u:%g /tmp/f") == "1234:1235\n"
    refused(files.upload(({"path": "/workspace/f"}, b"x"), prefix="/as/1234/1235"), 403, "DENIED")


def test_a_wrong_upload_is_400_and_leaves_nothing(files: LivingFiles) -> None:
    cases: list[Any] = [
        ([("metadata", b'{"path":"a"}')], "INVALID_FILE_CONTENT"),
        ([("file", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", b'{"path":"a"}'), ("file", b"x"), ("file", b"y")], "INVALID_FILE"),
        ([("metadata", b'{"path":"a"}'), ("metadata", b'{"path":"b"}'), ("file", b"y")], "INVALID_FILE"),
        ([("metadata", b'{"path":""}'), ("file", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", b'{"mode":755}'), ("file", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", b"not json"), ("file", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", b'{"path":"a","mode":"x"}'), ("file", b"x")], "INVALID_FILE_METADATA"),
        ([("metadata", b'{"path":"a","mode":899}'), ("file", b"x")], "INVALID_REQUEST_BODY"),
        ([("metadata", b'{"path":"a","mode":4755}'), ("file", b"x")], "INVALID_REQUEST_BODY"),
        ([("metadata", b'{"path":"a","owner":"nemo"}'), ("file", b"x")], "INVALID_REQUEST_BODY"),
        ([("metadata", b'{"path":"a\\u0000b"}'), ("file", b"x")], "INVALID_REQUEST_BODY"),
        ([], "INVALID_FILE_METADATA"),
    ]
    for parts, code in cases:
        body = b"".join(part(name, content) for name, content in parts) + END
        refused(files.http("POST", "/files/upload", content=body, headers=MULTIPART), 400, code)
        assert files.sh("ls -A") == ""


def test_half_an_upload_leaves_nothing(files: LivingFiles) -> None:
    whole = part("metadata", b'{"path":"deep/a"}') + part("file", b"x" * 100_000) + part("metadata", b"{}")
    answer = files.http("POST", "/files/upload", content=whole[:-50_000], headers=MULTIPART)
    refused(answer, 400, "INVALID_FILE")
    assert files.sh("ls -A") == ""


def test_an_upload_beyond_its_limit_is_413_and_leaves_nothing(files: LivingFiles) -> None:
    async def steps() -> None:
        async def body() -> AsyncIterator[bytes]:
            yield part("metadata", b'{"path":"a"}')
            yield part("file", b"x" * 200_000)
            yield END

        await uploads.receive_upload(await files.workers.of(), MULTIPART["content-type"], body(), 100_000)

    with pytest.raises(uploads.ApiError) as caught:
        files.run(steps())
    assert (caught.value.status, caught.value.code) == (413, "TOO_LARGE")
    assert files.sh("ls -A") == ""


def test_an_upload_that_is_not_multipart_is_400(files: LivingFiles) -> None:
    for kind in ("", "text/plain", "multipart/form-data", "multipart/form-data; boundary="):
        answer = files.http("POST", "/files/upload", content=b"x", headers={"content-type": kind})
        refused(answer, 400, "INVALID_FILE")


# Changing


def test_delete_ignores_missing_files_and_refuses_directories(files: LivingFiles) -> None:
    files.sh("touch a b; mkdir d; ln -s d l")
    empty(
        files.http(
            "DELETE", "/files", params=[("path", "a"), ("path", "none"), ("path", "no/where"), ("path", "l")]
        )
    )
    assert files.sh("ls") == "b\nd\n"
    refused(files.http("DELETE", "/files?path=d"), 400, "INVALID_FILE")


def test_move_makes_parents_and_never_overwrites(files: LivingFiles) -> None:
    files.sh("echo 1 > a; echo 2 > b; mkdir d")
    empty(
        files.http("POST", "/files/mv", json=[{"src": "a", "dest": "new/dir/a"}, {"src": "d", "dest": "e"}])
    )
    assert files.sh("cat new/dir/a; ls") == "1\nb\ne\nnew\n"
    refused(files.http("POST", "/files/mv", json=[{"src": "b", "dest": "new/dir/a"}]), 409, "INVALID_FILE")
    refused(files.http("POST", "/files/mv", json=[{"src": "none", "dest": "x"}]), 404, "FILE_NOT_FOUND")
    assert files.sh("cat b") == "2\n"


def test_permissions_take_modes_as_octal_digits(files: LivingFiles) -> None:
    files.sh("touch a; mkdir d")
    empty(files.http("POST", "/files/permissions", json={"a": {"mode": 751}, "d": {"mode": 1777}}))
    assert files.sh("stat -c %a a d") == "751\n1777\n"
    words = refused(
        files.http("POST", "/files/permissions", json={"a": {"mode": 789}}), 400, "INVALID_REQUEST_BODY"
    )
    assert "mode" in words
    refused(files.http("POST", "/files/permissions", json={"none": {"mode": 600}}), 404, "FILE_NOT_FOUND")


def test_permissions_change_the_owner_and_keep_the_mode(files: LivingFiles) -> None:
    files.several_ids()
    files.sh("touch a; chmod 640 a")
    empty(files.http("POST", "/files/permissions", json={"a": {"owner": "nobody", "group": "12"}}))
    assert files.sh("stat -c '%u:%g %a' a") == "65534:12 640\n"


def test_replace_counts_and_keeps_the_mode(files: LivingFiles) -> None:
    files.sh("printf 'a.a.a' > f; chmod 700 f; printf x > g")
    body = {"f": {"old": "a", "new": "bb"}, "g": {"old": "none", "new": ""}}
    for query in ("", "?verbose=true"):
        files.sh("printf 'a.a.a' > f")
        answer = files.http("POST", f"/files/replace{query}", json=body)
        assert answer.json() == {"f": {"replacedCount": 3}, "g": {"replacedCount": 0}}
    assert files.sh("cat f; stat -c ' %a' f") == "bb.bb.bb 700\n"


def test_replace_of_an_empty_text_is_400(files: LivingFiles) -> None:
    files.sh("printf a > f")
    answer = files.http("POST", "/files/replace", json={"f": {"old": "", "new": "x"}})
    assert "old" in refused(answer, 400, "INVALID_REQUEST_BODY")
    assert files.sh("cat f") == "a"


def test_a_body_of_another_shape_is_400_and_names_the_field(files: LivingFiles) -> None:
    cases: list[Any] = [
        ("/files/mv", {"src": "a"}),
        ("/files/mv", [{"src": "a"}]),
        ("/files/permissions", {"a": {"mode": "rw"}}),
        ("/files/permissions", []),
        ("/files/replace", {"a": {"new": "x"}}),
        ("/directories", {"a": 1}),
    ]
    for call, body in cases:
        refused(files.http("POST", call, json=body), 400, "INVALID_REQUEST_BODY")


# Finding


def test_search_matches_base_names_at_any_depth_and_lists_no_directories(files: LivingFiles) -> None:
    files.sh("mkdir -p a/b; touch one.py a/two.py a/b/three.py a/b/four.txt; mkdir a/five.py")

    def found(pattern: str = "") -> list[str]:
        query = {"path": "/workspace", **({"pattern": pattern} if pattern else {})}
        answer = files.http("GET", "/files/search", params=query)
        assert answer.status_code == 200, answer.text
        return [info["path"].removeprefix("/workspace/") for info in answer.json()]

    assert found("*.py") == ["a/b/three.py", "a/two.py", "one.py"]
    assert found() == found("**") == found("*") == ["a/b/four.txt", "a/b/three.py", "a/two.py", "one.py"]
    assert found("a/*.py") == ["a/two.py"]
    assert found("a/**/*.py") == ["a/b/three.py", "a/two.py"]
    assert found("nothing") == []


def test_search_of_a_missing_directory_is_404(files: LivingFiles) -> None:
    refused(files.http("GET", "/files/search?path=/workspace/none&pattern=*"), 404, "FILE_NOT_FOUND")
    refused(files.http("GET", "/files/search?pattern=*"), 400, "MISSING_QUERY")


# Directories


def test_list_is_in_order_and_does_not_enter_links(files: LivingFiles) -> None:
    files.sh("mkdir -p a/b c; touch a/x a/b/y z 'a!'; ln -s a link")

    def listed(**query: Any) -> list[str]:
        answer = files.http("GET", "/directories/list", params={"path": "/workspace", **query})
        return [info["path"].removeprefix("/workspace/") for info in answer.json()]

    assert listed() == listed(depth=1) == ["a", "a!", "c", "link", "z"]
    assert listed(depth=0) == []
    assert listed(depth=2) == ["a", "a/b", "a/x", "a!", "c", "link", "z"]
    assert listed(depth=3) == ["a", "a/b", "a/b/y", "a/x", "a!", "c", "link", "z"]


def test_list_of_what_is_no_directory_is_an_error(files: LivingFiles) -> None:
    files.sh("mkdir a; ln -s a link; touch f")
    for name in ("link", "link/", "f"):
        refused(files.http("GET", f"/directories/list?path={name}"), 400, "INVALID_FILE")
    refused(files.http("GET", "/directories/list?path=none"), 404, "FILE_NOT_FOUND")
    for depth in ("-1", "x", "101"):
        refused(files.http("GET", f"/directories/list?path=a&depth={depth}"), 400, "INVALID_REQUEST_BODY")


def test_directories_are_made_with_their_modes_and_existing_ones_stay(files: LivingFiles) -> None:
    files.sh("mkdir -m 700 old")
    empty(
        files.http(
            "POST", "/directories", json={"new/deep": {"mode": 711}, "old": {"mode": 777}, "plain": {}}
        )
    )
    assert files.sh("stat -c %a new new/deep old plain") == "755\n711\n700\n755\n"
    files.sh("touch f")
    refused(files.http("POST", "/directories", json={"f": {}}), 400, "INVALID_FILE")


def test_directories_are_removed_with_everything_in_them(files: LivingFiles) -> None:
    files.sh("mkdir -p a/b/c; touch a/b/c/f keep; chmod 0 a/b; ln -s /workspace/keep a/link")
    empty(files.http("DELETE", "/directories?path=a&path=none"))
    assert files.sh("ls") == "keep\n"
    refused(files.http("DELETE", "/directories?path=keep"), 400, "INVALID_FILE")
    refused(files.http("DELETE", "/directories?path=/tmp"), 403, "DENIED")


def test_what_the_system_has_cannot_be_changed(files: LivingFiles) -> None:
    refused(files.upload(({"path": "/usr/bin/evil"}, b"x")), 403, "DENIED")
    refused(files.http("POST", "/files/permissions", json={"/usr/bin/env": {"mode": 777}}), 403, "DENIED")
    refused(files.http("DELETE", "/files?path=/usr/bin/env"), 403, "DENIED")


def test_the_program_and_the_endpoints_see_each_other_at_once(files: LivingFiles) -> None:
    files.upload(({"path": "script.py", "mode": 755}, b"print('here')"))
    assert files.sh("python3 script.py") == "here\n"
    files.sh("rm script.py")
    refused(files.http("GET", "/files/info?path=script.py"), 404, "FILE_NOT_FOUND")
