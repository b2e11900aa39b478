"""The other means that doctor tells about: each is really tried, within its time."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stockade.host import Probe, engines
from support import bubblewraps
from support.means import applies


def program(directory: Path, name: str, script: str) -> None:
    (directory / name).write_text("#!/bin/sh\n" + script)
    (directory / name).chmod(0o755)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is searched for programs before all others."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")
    return directory


def test_runsc_is_believed_only_after_a_run(path: Path) -> None:
    program(path, "runsc", '[ "$1" = --version ] && echo "runsc version 1" || exit 0\n')
    assert engines.runsc().ok
    program(path, "runsc", "echo 'cannot set up sandbox' >&2; exit 128\n")
    found = engines.runsc()
    assert not found.ok and "cannot set up sandbox" in found.reason and found.fix


@pytest.mark.parametrize("version", [bubblewraps.OLD, bubblewraps.NEW])
def test_whether_bubblewrap_follows_links_is_tried(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewraps.use(bubblewraps.program(version), monkeypatch)
    found = engines.bwrap_links()
    applies(not found.ok or version == bubblewraps.NEW, "this bubblewrap of the distribution is repaired")
    assert not found.ok and "CVE-2026-87766" in found.reason


def test_a_bubblewrap_that_follows_no_links_is_told_from_one_that_does_not_work(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bubblewraps.use(path / "bwrap", monkeypatch)
    program(path, "bwrap", 'case "$*" in */link/*) echo "refused" >&2; exit 1;; esac\n')
    assert engines.bwrap_links().ok
    program(path, "bwrap", "echo 'no user namespaces' >&2; exit 1\n")
    found = engines.bwrap_links()
    assert not found.ok and "no user namespaces" in found.reason


def test_a_helper_that_hangs_is_ended_with_its_children(path: Path) -> None:
    program(path, "hang", "sleep 60 & echo started; wait\n")
    start = time.monotonic()
    assert engines.run([str(path / "hang")], seconds=0.3) == (124, "started")
    assert time.monotonic() - start < 5


@contextmanager
def engine(socket_path: Path, answer: bytes) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(socket_path))
        listener.listen()

        def serve() -> None:
            client, _ = listener.accept()
            with client:
                assert client.recv(100).startswith(b"GET /_ping ")
                if answer:
                    client.sendall(answer)
                client.recv(100)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        thread.join()


def test_a_container_engine_is_asked_over_its_socket(tmp_path: Path) -> None:
    there = tmp_path / "e.sock"
    with engine(there, b"HTTP/1.0 200 OK\r\n\r\nOK"):
        found = engines.container({"DOCKER_HOST": f"unix://{there}"})
    assert found == Probe(ok=True, detail=str(there))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.0 500 Internal Server Error\r\n\r\n"])
def test_a_socket_without_a_working_engine_is_no_engine(tmp_path: Path, answer: bytes) -> None:
    there = tmp_path / "e.sock"
    start = time.monotonic()
    with engine(there, answer):
        found = engines.container({"DOCKER_HOST": f"unix://{there}", "XDG_RUNTIME_DIR": str(tmp_path)})
    assert time.monotonic() - start < 10
    assert found.detail != str(there)
    assert found.ok or (str(there) in found.reason and found.fix)


@pytest.mark.parametrize(
    ("console", "works", "said"),
    [
        ("Linux version 6.1\nVFS: Unable to mount root fs on unknown-block(0,0)\n", True, "booted"),
        ("Linux version 6.1\nPANIC: early exception\n", False, "died while booting"),
        ("", False, "printed nothing"),
    ],
)
def test_kvm_is_believed_only_after_a_boot(
    path: Path, tmp_path: Path, console: str, works: bool, said: str
) -> None:
    (tmp_path / "vmlinuz-6.1").touch()
    (tmp_path / "console").write_text(console)
    program(path, f"qemu-system-{os.uname().machine}", f"cat {tmp_path}/console; exec sleep 60\n")
    found = engines.kvm(device="/dev/null", kernels=f"{tmp_path}/vmlinuz-*", seconds=0.5)
    assert found.ok is works
    assert said in (found.detail if works else found.reason)


def test_what_is_missing_for_a_boot_is_named(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "does not open" in engines.kvm(device=str(tmp_path / "kvm")).reason
    program(path, f"qemu-system-{os.uname().machine}", "exit 1\n")
    assert "no readable kernel" in engines.kvm(device="/dev/null", kernels=f"{tmp_path}/none-*").reason
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "without QEMU" in engines.kvm(device="/dev/null").reason


def test_everything_is_looked_for() -> None:
    found = engines.find()
    assert list(found) == ["bwrap.links", "runsc", "container", "kvm"]
    for name, mean in found.items():
        assert mean.ok or (mean.reason and mean.fix), name
