"""Programs inside that want to keep the supervisor busy, break its answers, or leave traps on the host."""

from __future__ import annotations

import json
import os
import resource
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.event_streams import command
from support.server import KEY, KEY_HEADER, ServedSandbox, ServerUnderTest, module_server

#: A file that costs a minute if every line is expanded.
ENV_FILE = "\"B='\" + 'é' * 65000 + \"'\\n\" + 'A=$B$B\\n' * 110000"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    yield from module_server(tmp_path_factory)


@pytest.fixture
def box(server: ServerUnderTest) -> Iterator[ServedSandbox]:
    with server.sandbox() as made:
        yield made


def test_the_file_of_variables_cannot_keep_the_supervisor_busy(box: ServedSandbox) -> None:
    written = f"open('/tmp/.execd_envs', 'w').write({ENV_FILE})"
    assert command(box.execd, f"python3 - <<'END'\n{written}\nEND").exit_code == 0
    begun = time.monotonic()
    assert command(box.execd, "echo ${#B}").texts() == ["65000\n"]
    assert time.monotonic() - begun < 5


def test_clients_that_leave_a_flood_unread_do_not_stop_the_supervisor(
    server: ServerUnderTest, box: ServedSandbox
) -> None:
    body = json.dumps({"command": "yes"})
    request = (
        f"POST /sandboxes/{box.id}/proxy/44772/command HTTP/1.1\r\nHost: localhost\r\n"
        f"X-EXECD-ACCESS-TOKEN: {box.token}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    )
    ends = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(8)]
    for end in ends:
        end.sendall(request.encode())
    time.sleep(1.5)
    for end in ends:
        end.close()
    time.sleep(0.05)
    begun = time.monotonic()
    assert box.execd.get("/ping").status_code == 200
    assert time.monotonic() - begun < 3  # one megabyte of events each would take 8 seconds


def test_names_that_are_no_text_break_neither_diff_nor_commit(box: ServedSandbox) -> None:
    asked = {"workspace": {"path": "/workspace", "mode": "overlay"}}
    made = box.execd.post("/v1/isolated/session", json=asked).json()
    session = f"/v1/isolated/session/{made['session_id']}"
    write = {"code": "touch $'\\xff\\xfe'"}
    assert box.execd.post(f"{session}/run", json=write).status_code == 200
    listed = box.execd.get(f"{session}/diff", params={"format": "json"})
    assert [one["path"] for one in listed.json()["overlays"][0]["changes"]] == ["\\xff\\xfe"]
    committed = box.execd.post(f"{session}/commit", json={})
    assert committed.status_code == 200, committed.text
    command(box.execd, "echo other > $'/workspace/\\xff\\xfe'")
    box.execd.post(f"{session}/run", json={"code": "echo mine > $'\\xff\\xfe'"})
    refused = box.execd.post(f"{session}/commit", json={})
    assert (refused.status_code, refused.json()["conflicts"]) == (409, ["/workspace/\\xff\\xfe"])


def test_a_setuid_file_of_root_lies_where_no_other_user_of_the_host_comes(
    server: ServerUnderTest, box: ServedSandbox
) -> None:
    made = command(box.execd, "cp /bin/sh /workspace/sh && chmod 6755 /workspace/sh")
    assert made.exit_code == 0
    place = server.home / "sandboxes" / box.id / "tree" / "workspace" / "sh"
    found = place.stat()
    assert found.st_mode & stat.S_ISUID and found.st_uid == os.geteuid()  # the control: it is really there
    for directory in (server.home, *list(place.parents)[1:4]):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700, directory


def test_what_is_remembered_does_not_use_up_the_open_files(
    server: ServerUnderTest, box: ServedSandbox
) -> None:
    record = json.loads((server.home / "sandboxes" / box.id / "record.json").read_text())
    assert server.process is not None
    for process in (record["supervisor"], server.process.pid):
        soft, hard = resource.prlimit(process, resource.RLIMIT_NOFILE)
        assert soft == hard  # a thousand logs of commands in the background are a thousand files
    assert command(box.execd, "ulimit -Sn").texts() == ["1024\n"]  # the control: not so for programs


def test_a_program_that_takes_its_supervisor_over_finds_no_key_of_the_server(tmp_path: Path) -> None:
    server = ServerUnderTest(tmp_path, environ={"STOCKADE_API_KEY": KEY})
    server.key = ""  # so that the variable is the only way by which the server knows it
    server.start()
    server.http.headers[KEY_HEADER] = KEY
    try:
        assert server.process is not None
        assert KEY in Path(f"/proc/{server.process.pid}/environ").read_text()  # the control
        with server.sandbox() as box:
            record = json.loads((server.home / "sandboxes" / box.id / "record.json").read_text())
            assert KEY not in Path(f"/proc/{record['supervisor']}/environ").read_text()
    finally:
        server.stop()
