"""The endpoints of files against a program that lays traps for them.

Each trap is first walked into the naive way, by the path of the sandbox's tree on the host: the control.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.exceptions import LitestarException

from stockade.linux import openat2
from stockade.workspace.files import identity_files
from support.living_files import LivingFiles, living_files

#: No call may take longer, whatever lies in its way.
SOON = openat2.PATIENCE + 3
SWAP = """
import ctypes
libc = ctypes.CDLL(None)
print("swapping", flush=True)
while True:
    libc.renameat2(-100, b"/workspace/dir", -100, b"/workspace/link", 2)
"""


@pytest.fixture
def files(tmp_path: Path) -> Iterator[LivingFiles]:
    """A sandbox with the endpoints of its files."""
    yield from living_files(tmp_path)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of the host with a secret, which the sandbox does not have."""
    made = tmp_path / "outside"
    made.mkdir()
    (made / "secret").write_text("secret")
    (made / "secret").chmod(0o640)
    return made


def naive(files: LivingFiles, path: str) -> Path:
    """Where a path inside lies on the host."""
    return Path(files.tree.path) / path.lstrip("/")


def everything(files: LivingFiles, path: str) -> dict[str, Callable[[], httpx.Response]]:
    """Every call that takes a path."""
    return {
        "info": lambda: files.http("GET", "/files/info", params={"path": path}),
        "download": lambda: files.http("GET", "/files/download", params={"path": path}),
        "upload": lambda: files.upload(({"path": path, "mode": 777}, b"changed")),
        "upload-below": lambda: files.upload(({"path": f"{path}/a/b", "mode": 777}, b"changed")),
        "permissions": lambda: files.http("POST", "/files/permissions", json={path: {"mode": 777}}),
        "replace": lambda: files.http("POST", "/files/replace", json={path: {"old": "s", "new": "x"}}),
        "move-from": lambda: files.http("POST", "/files/mv", json=[{"src": path, "dest": "/tmp/stolen"}]),
        "move-to": lambda: files.http("POST", "/files/mv", json=[{"src": "/workspace/mine", "dest": path}]),
        "search": lambda: files.http("GET", "/files/search", params={"path": path}),
        "list": lambda: files.http("GET", "/directories/list", params={"path": path}),
        "make": lambda: files.http("POST", "/directories", json={path: {"mode": 777}}),
        "make-below": lambda: files.http("POST", "/directories", json={f"{path}/a": {"mode": 777}}),
        "delete": lambda: files.http("DELETE", "/files", params={"path": path}),
        "delete-directory": lambda: files.http("DELETE", "/directories", params={"path": path}),
    }


def untouched(outside: Path) -> None:
    """The directory of the host is as it was."""
    assert os.listdir(outside) == ["secret"]
    assert (outside / "secret").read_text() == "secret"
    assert (outside / "secret").stat().st_mode & 0o777 == 0o640


def test_no_call_follows_a_link_out_of_the_sandbox(files: LivingFiles, outside: Path) -> None:
    files.sh(
        f"echo mine > mine; ln -s {outside} link; ln -s {outside}/secret file; ln -s /proc/self/root root"
    )
    assert naive(files, "workspace/link/secret").read_text() == "secret"
    for path in ("link/secret", "file", f"root/{outside}/secret", f"../../../../../..{outside}/secret"):
        for name, call in everything(files, path).items():
            answer = call()
            assert answer.text != "secret", (name, path)
            untouched(outside)
            files.sh(f"rm -rf {outside} file /tmp/stolen; ln -s {outside}/secret file; echo mine > mine")


def test_no_call_is_led_out_by_a_swap_in_the_middle(files: LivingFiles, outside: Path) -> None:
    files.sh(f"echo mine > mine; mkdir dir; echo mine > dir/secret; ln -s {outside} link")
    swapping = files.run(files.box.start(["python3", "-c", SWAP]))
    try:
        assert swapping.stdout is not None
        assert files.run(swapping.stdout.readline()) == b"swapping\n"
        deadline, led_out = time.monotonic() + 5, False
        while not led_out and time.monotonic() < deadline:  # the control: a look, then a use
            with contextlib.suppress(OSError):
                if not naive(files, "workspace/dir").is_symlink():
                    led_out = naive(files, "workspace/dir/secret").read_text() == "secret"
        assert led_out
        until, count = time.monotonic() + 1.5, 0
        while time.monotonic() < until:
            for name, call in everything(files, "dir/secret").items():
                answer = call()
                assert answer.text != "secret", name
                assert answer.status_code < 500 or answer.status_code == 507, (name, answer.text)
                count += 1
        assert count > 10
        untouched(outside)
    finally:
        swapping.kill()
        files.run(swapping.wait())
        files.run(swapping.close())


def test_no_call_waits_for_a_pipe(files: LivingFiles) -> None:
    files.sh("mkfifo pipe; echo mine > mine")
    with pytest.raises(OSError, match="No such device"):  # the control: only without waiting does this return
        os.open(naive(files, "workspace/pipe"), os.O_WRONLY | os.O_NONBLOCK)
    for name, call in everything(files, "pipe").items():
        begun = time.monotonic()
        call()
        assert time.monotonic() - begun < SOON, name
        files.sh("rm -rf pipe /tmp/stolen; mkfifo pipe; echo mine > mine")


def test_no_call_reads_the_memory_or_the_root_of_a_process(files: LivingFiles) -> None:
    assert Path("/proc/self/environ").read_bytes()
    for path in ("/proc/self/environ", "/proc/1/environ", "/proc/self/mem", "/proc/1/root/etc/passwd"):
        answer = files.http("GET", "/files/download", params={"path": path})
        assert answer.status_code in (403, 404, 400), (path, answer.text)


def test_a_program_neither_sees_nor_ends_a_worker(files: LivingFiles) -> None:
    worker = files.worker()
    files.run(worker.info(["/"]))
    (process,) = worker._idle
    os.kill(process.pid, 0)  # the control: outside it can be signalled
    script = "cat /proc/[0-9]*/comm; trap '' TERM; kill -TERM -1; kill -KILL -1; true"
    seen: Any = files.run(files.box.run(["sh", "-c", script]))
    assert "stockade-files" not in seen.text
    assert not process.ended
    assert files.run(worker.info(["/"]))
    assert worker._idle == [process]


def test_a_worker_cannot_be_traced_by_another_process_of_its_user(files: LivingFiles) -> None:
    worker = files.worker()
    files.run(worker.info(["/"]))
    (process,) = worker._idle
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        os.close(os.open(f"/proc/{child}/mem", os.O_RDONLY))
        if os.geteuid():
            with pytest.raises(PermissionError):
                os.open(f"/proc/{process.pid}/mem", os.O_RDONLY)
        else:  # root may always look; the program inside is not root here
            result: Any = files.run(files.box.run(["cat", f"/proc/{process.pid}/status"]))
            assert not result.ok
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_more_files_than_a_call_lists_are_a_clear_refusal(
    files: LivingFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity_files, "MOST_FOUND", 100)
    files.sh("mkdir many; cd many; seq 1 101 | xargs touch")
    for call in ("/directories/list?path=many", "/files/search?path=many"):
        answer = files.http("GET", call)
        assert (answer.status_code, answer.json()["code"]) == (413, "TOO_LARGE"), answer.text


def test_a_tree_deeper_than_a_path_is_removed(files: LivingFiles) -> None:
    deep = "import os\nfor _ in range(3000):\n    os.mkdir('deep'); os.chdir('deep')"
    result: Any = files.run(files.box.run(["python3", "-c", deep]))
    assert result.ok, result.stderr
    with pytest.raises(
        OSError, match="File name too long"
    ):  # the control: by its path it cannot even be named
        os.stat(naive(files, "workspace" + "/deep" * 3000))
    assert files.http("DELETE", "/directories?path=deep").status_code == 200
    assert files.sh("ls") == ""


def test_a_file_that_grows_and_shrinks_is_sent_with_the_length_that_was_said(files: LivingFiles) -> None:
    program = """
import os
print("moving", flush=True)
file = os.open("/workspace/f", os.O_RDWR | os.O_CREAT)
while True:
    os.ftruncate(file, 1 << 20)
    os.ftruncate(file, 10)
"""
    moving = files.run(files.box.start(["python3", "-c", program]))
    try:
        assert moving.stdout is not None
        assert files.run(moving.stdout.readline()) == b"moving\n"
        lengths = set()
        for _ in range(30):
            try:
                answer = files.http("GET", "/files/download?path=f")
            except LitestarException:
                continue  # it became shorter: the connection ends
            if answer.status_code == 200:
                assert len(answer.content) == int(answer.headers["content-length"])
                lengths.add(len(answer.content))
        assert lengths
    finally:
        moving.kill()
        files.run(moving.wait())
        files.run(moving.close())


def test_a_replacement_cannot_make_a_file_that_no_call_would_read(files: LivingFiles) -> None:
    files.upload(({"path": "/workspace/many"}, b"a" * 65536))
    much = {"/workspace/many": {"old": "a", "new": "b" * 2048}}  # 128 MiB in the worker's memory, and more
    answer = files.http("POST", "/files/replace", json=much)
    assert (answer.status_code, answer.json()["code"]) == (413, "TOO_LARGE")
    assert naive(files, "/workspace/many").stat().st_size == 65536


def test_no_pattern_keeps_a_worker_busy(files: LivingFiles) -> None:
    (naive(files, "/workspace") / "/".join("d" * 300)).mkdir(parents=True)
    begun = time.monotonic()
    for pattern in ("**/" * 2600 + "x", "*a" * 4000, "**/*/" * 1600 + "x"):
        answer = files.http("GET", "/files/search", params={"path": "/workspace", "pattern": pattern})
        assert answer.status_code == 200, answer.text
    assert time.monotonic() - begun < SOON
