"""Unix sockets of the host: none can be reached, by abstract name or by path, and so nothing passed out."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stockade
from attacks.arena import inside, outside
from support.means import need

KINDS = {"stream": socket.SOCK_STREAM, "dgram": socket.SOCK_DGRAM}


@contextlib.contextmanager
def listener(kind: str, address: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, KINDS[kind]) as end:
        end.bind(address)
        if kind == "stream":
            end.listen(8)
        end.setblocking(False)
        yield end


def heard(end: socket.socket) -> bool:
    """Whether anybody reached the listener. What was passed through it is closed."""
    try:
        if end.type == socket.SOCK_STREAM:
            connection, _ = end.accept()
        else:
            connection = end.dup()
    except BlockingIOError:
        return False
    with connection:
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 16, 4)
        except BlockingIOError:
            return end.type == socket.SOCK_STREAM
        for descriptor in descriptors:
            os.close(descriptor)
        return True


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", [[], "open"], ids=["none", "open"])
def test_an_abstract_socket_of_the_host_cannot_be_reached(kind: str, net: Any) -> None:
    """X11 and D-Bus listen on such names. In the host's network only Landlock keeps them apart."""
    from stockade.host import host

    need(net == [] or host().landlock >= 6, "this kernel's Landlock cannot tell abstract sockets apart")
    name = f"stockade-test-{os.getpid()}"
    with listener(kind, f"\0{name}") as end:
        verdict = inside("unix_sockets", kind, f"@{name}", net=net)
        assert set(verdict.values()) <= {"ECONNREFUSED", "EPERM", "ENOTCONN"}, verdict
        assert not heard(end)
        assert set(outside("unix_sockets", kind, f"@{name}").values()) == {"ok"}
        assert heard(end)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["read", "overlay", "ro"])
def test_a_socket_in_a_granted_directory_cannot_be_reached(tmp_path: Path, kind: str, how: str) -> None:
    """docker.sock, systemd's, an ssh-agent's: who reaches one acts outside. A read-only mount stops none."""
    directory = tmp_path / "g"
    directory.mkdir()
    path = str(directory / "s")
    workspace = {"workspace": {"path": str(directory), "mode": how}}
    policy: dict[str, Any] = {"read": [str(directory)]} if how == "read" else workspace
    with listener(kind, path) as end:
        verdict = inside("unix_sockets", kind, path, **policy)
        assert "ok" not in verdict.values(), verdict
        assert not heard(end)
        assert set(outside("unix_sockets", kind, path).values()) == {"ok"}
        assert heard(end)


def test_a_socket_in_a_directory_that_is_writable_for_real_is_shared_and_the_result_says_so(
    tmp_path: Path,
) -> None:
    """No wall of the kernel's tells it from the files that are shared there: NP-20 says so too."""
    directory = tmp_path / "g"
    directory.mkdir()
    path = str(directory / "s")
    with listener("stream", path) as end:
        assert inside("unix_sockets", "stream", path, write=[str(directory)])["connect"] == "ok"
        assert heard(end)
    result = stockade.run(["true"], stockade.Policy(write=[str(directory)]))
    assert "sockets in writable grants are shared with the host" in result.controls["ipc"].mechanism


def test_a_socket_cannot_be_granted_by_itself(tmp_path: Path) -> None:
    with (
        listener("stream", str(tmp_path / "s")) as end,
        pytest.raises(stockade.PolicyError, match="a socket"),
    ):
        inside("unix_sockets", "stream", tmp_path / "s", read=[str(tmp_path / "s")])
    assert end.fileno() == -1


@pytest.mark.parametrize("kind", KINDS)
def test_a_socket_in_a_hidden_directory_cannot_be_reached(hidden: Path, workspace: Path, kind: str) -> None:
    path = str(hidden / "s")
    (workspace / "link").symlink_to(path)
    with listener(kind, path) as end:
        for way in (path, str(workspace / "link"), f"/proc/self/root{path}"):
            verdict = inside("unix_sockets", kind, way, workspace=str(workspace))
            assert verdict["connect"] == "ENOENT", verdict
        assert not heard(end)
        assert outside("unix_sockets", kind, path)["connect"] == "ok"


def test_sockets_inside_still_serve_each_other() -> None:
    """The walls are around the sandbox, not within it."""
    code = (
        "import socket; a = socket.socket(1); a.bind('/tmp/s'); a.listen(1);"
        "b = socket.socket(1); b.connect('/tmp/s'); print('ok')"
    )
    assert stockade.run(["/usr/bin/python3", "-c", code], timeout=10).text == "ok\n"
