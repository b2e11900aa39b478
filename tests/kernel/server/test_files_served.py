"""Files through the whole server: the relay, the prefixes, and clients that go away."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from support.living_files import BOUNDARY, part
from support.server import ServedSandbox, ServerUnderTest, module_server

MULTIPART = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
END = f"--{BOUNDARY}--\r\n".encode()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """A server whose uploads may have one megabyte more than 8."""
    yield from module_server(tmp_path_factory, f"max_upload_bytes = {9 << 20}\n")


@pytest.fixture
def box(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    """A sandbox of the server."""
    with server.sandbox() as sandbox:
        yield sandbox


def names(box: ServedSandbox, path: str = "/workspace") -> list[str]:
    found = box.execd.get("/directories/list", params={"path": path}).json()
    return [info["path"].rpartition("/")[2] for info in found]


def test_a_large_file_comes_back_as_it_was_sent(box: ServedSandbox) -> None:
    content = os.urandom(8 << 20)
    body = part("metadata", b'{"path":"big","mode":640}') + part("file", content) + END
    answer = box.execd.post("/files/upload", content=iter([body[:7], body[7:]]), headers=MULTIPART)
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "0")
    assert box.execd.get("/files/download?path=big").content == content
    piece = box.execd.get("/files/download?path=big", headers={"range": "bytes=5000000-5000009"})
    assert (piece.status_code, piece.content) == (206, content[5_000_000:5_000_010])


def test_an_upload_beyond_the_configured_limit_is_413(box: ServedSandbox) -> None:
    body = part("metadata", b'{"path":"big"}') + part("file", b"x" * (10 << 20)) + END
    answer = box.execd.post("/files/upload", content=body, headers=MULTIPART)
    assert (answer.status_code, answer.json()["code"]) == (413, "TOO_LARGE")
    assert names(box) == []


def test_an_upload_whose_client_goes_away_leaves_nothing(box: ServedSandbox) -> None:
    where = urlsplit(str(box.execd.base_url))
    head = (
        f"POST {where.path.rstrip('/')}/files/upload HTTP/1.1\r\nhost: {where.netloc}\r\n"
        f"x-execd-access-token: {box.token}\r\ncontent-type: {MULTIPART['content-type']}\r\n"
        "content-length: 5000000\r\n\r\n"
    )
    assert where.hostname is not None
    with socket.create_connection((where.hostname, where.port or 80)) as client:
        client.sendall(
            head.encode() + part("metadata", b'{"path":"deep/half"}') + part("file", b"x" * 200_000)[:-2]
        )
        time.sleep(0.3)
    time.sleep(0.3)
    assert names(box) == []
    answer = box.execd.post(
        "/files/upload",
        content=part("metadata", b'{"path":"a"}') + part("file", b"1") + END,
        headers=MULTIPART,
    )
    assert answer.status_code == 200
    assert names(box) == ["a"]


def test_the_prefix_of_a_user_acts_as_that_user(box: ServedSandbox) -> None:
    body = part("metadata", b'{"path":"/tmp/mine"}') + part("file", b"x") + END
    answer = box.execd.post("/v1/filesystem/1000/1001/files/upload", content=body, headers=MULTIPART)
    if answer.status_code == 400:  # an ordinary user without subordinate ids
        words = answer.json()["message"]
        assert "newuidmap" in words or "/etc/sub" in words
        return
    assert answer.status_code == 200, answer.text
    info = box.execd.get("/files/info?path=/tmp/mine").json()["/tmp/mine"]
    assert (info["owner"], info["group"]) == ("1000", "1001")
    assert box.execd.get("/v1/filesystem/1000/1001/directories/list?path=/root").status_code == 403


def test_what_a_command_writes_the_endpoints_read(box: ServedSandbox) -> None:
    answer = box.execd.post("/command", json={"command": "echo 1 > script.py; mkdir d; chmod 0 d; touch d/f"})
    assert "execution_complete" in answer.text
    assert box.execd.get("/files/download?path=script.py").text == "1\n"
    assert names(box, "d") == ["f"]


def test_errors_name_no_path_of_the_host(server: ServerUnderTest, box: ServedSandbox) -> None:
    for call in (
        "/files/download?path=none",
        "/directories/list?path=/workspace/none",
        "/files/search?path=x",
    ):
        answer = box.execd.get(call)
        assert answer.status_code == 404
        assert str(server.home) not in answer.text and box.id not in answer.json()["message"]
