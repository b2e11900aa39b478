"""Kept shells: who reaches the socket of one types into it, so only its user does, and nothing inside."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from stockade import backends
from stockade.bench.backend_costs import usable
from stockade.runs.register import register
from stockade.sandbox.attach_daemon import MOST_WAITING
from stockade.sessions.attach import protocol
from stockade.sessions.attach.protocol import AttachAcceptance, AttachRefusal, TerminalEnd
from support.cli import stockade_command
from support.kept import HELLO, asked, client, closed, connected, heard, until
from support.means import applies, need
from support.screens import stockade

ATTACK = """
import socket, sys
for path in sys.argv[1:]:
    try:
        end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        end.connect(path)
        print("connected")
    except OSError as error:
        print(error.strerror)
"""
#: Goes where the socket is, becomes somebody else, and tells whether anybody hears it out.
STRANGER = """
import os, socket, sys
os.chdir(sys.argv[1])
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
try:
    end.connect(sys.argv[2])
    end.settimeout(60)
    end.send(b"{}")
    print("heard" if end.recv(1000) else "turned away")
except OSError as error:
    print("turned away" if isinstance(error, ConnectionError) else error.strerror)
"""


@pytest.fixture
def place(workspace: Path, stockade_home: Path) -> Iterator[Path]:
    """The socket of a kept shell."""
    short = ("--env", "PS1=# ")
    with stockade(workspace, "shell", "--keep", *short, environment={"SHELL": "/bin/sh"}) as terminal:
        terminal.until("\n#")
        (found,) = (stockade_home / "run").glob("*/*.attach")
        yield found
        terminal.type("exit\n")
        assert terminal.code() == 0


@pytest.mark.parametrize("backend", list(backends.BACKENDS))
def test_nothing_inside_any_sandbox_reaches_it(place: Path, workspace: Path, backend: str) -> None:
    found = usable().get(backend)
    need(found is not None, f"the {backend} backend does not work here")
    assert found is not None
    (workspace / "attack.py").write_text(ATTACK)
    (workspace / "link").symlink_to(place)
    ways = [str(workspace / "link"), f"/proc/self/root{place}"]
    if len(str(place)) < 100:
        ways.append(str(place))
    policy = str(_accepting(workspace, backend, found.accept))
    words = ("/usr/bin/python3", "attack.py", *ways)
    done = stockade_command("run", "-q", "--policy", policy, "--", *words, cwd=workspace)
    assert done.returncode == 0, done.stderr
    assert "connected" not in done.stdout and len(done.stdout.splitlines()) == len(ways)
    # The same without walls.
    directory = os.open(place.parent, os.O_PATH)
    line = protocol.connected(directory, place.name)
    os.close(directory)
    assert line is not None
    line.close()


def _accepting(workspace: Path, backend: str, accept: Iterable[str]) -> Path:
    file = workspace / "policy.toml"
    clauses = {"backend": backend, "accept": list(accept), "protect": []}
    lines = [f"{name} = {json.dumps(value)}\n" for name, value in clauses.items()]
    file.write_text("".join(lines) + 'workspace.mode = "ro"\n')
    return file


def test_another_user_is_turned_away_also_where_the_directory_is_open(place: Path) -> None:
    applies(os.geteuid() == 0, "only root becomes somebody else")
    words = [sys.executable, "-c", STRANGER, str(place.parent), place.name]
    assert _said(words) == "Permission denied"
    # Even if somebody has opened the way, the kernel tells who it is.
    place.parent.chmod(0o711)
    place.chmod(0o777)
    assert _said(words) == "turned away"
    place.parent.chmod(0o700)


def _said(words: list[str]) -> str:
    import subprocess

    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_one_who_says_nothing_or_takes_nothing_keeps_nobody_waiting(place: Path, stockade_home: Path) -> None:
    silent = [connected(stockade_home) for _ in range(MOST_WAITING + 1)]
    stuck = connected(stockade_home)
    assert isinstance(asked(stuck, HELLO), AttachAcceptance)
    # The holder has the same stream, and would wait where the stream says so.
    os.set_blocking(stuck[2], True)
    with socket.socket(fileno=os.dup(stuck[2])) as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    with client(stockade_home) as (_, one):
        os.write(one, b"seq 5000; echo all $((6 * 7))\n")
        heard(one, b"all 42")
    for each in (*silent, stuck):
        closed(each)


def test_a_holder_that_can_open_nothing_more_goes_on(place: Path, stockade_home: Path) -> None:
    (record,) = register.living(str(stockade_home))
    used = _open(record.supervisor)
    for terminal, look, room in (
        (0, True, 1),
        (-1, False, 0),
        (-1, False, 1),
        (-1, False, 2),
        (-1, False, 4),
    ):
        one = connected(stockade_home)
        until(lambda: len(_open(record.supervisor)) > len(used))
        free = sorted(set(range(100)) - _open(record.supervisor))
        limits = resource.prlimit(record.supervisor, resource.RLIMIT_NOFILE)
        resource.prlimit(record.supervisor, resource.RLIMIT_NOFILE, (free[room], limits[1]))
        hello = msgspec.structs.replace(HELLO, terminal=terminal, look=look)
        if isinstance(asked(one, hello), AttachAcceptance):
            over, file = one[0].receive(protocol.FromHolder)
            assert isinstance(over, TerminalEnd) and b"Too many open files" in protocol.content_of(file)
        resource.prlimit(record.supervisor, resource.RLIMIT_NOFILE, limits)
        closed(one)
        until(lambda: _open(record.supervisor) == used)


def _open(process: int) -> set[int]:
    return {int(name) for name in os.listdir(f"/proc/{process}/fd")}


def test_nonsense_is_refused_and_the_shell_goes_on(place: Path, stockade_home: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as end:
        directory = os.open(place.parent, os.O_PATH)
        end.connect(f"/proc/self/fd/{directory}/{place.name}")
        os.close(directory)
        read, write = os.pipe()
        socket.send_fds(end, [b'{"type":"Hello","version":1,"terminal":0,"lines":99999999}'], [read])
        os.close(read)
        assert b"the client's first message is not a request to attach" in end.recv(1000)
        assert end.recv(1000) == b""
        # What was passed was closed.
        with pytest.raises(BrokenPipeError):
            os.write(write, b"x")
        os.close(write)
    deep = connected(stockade_home)
    deep[0]._socket.send(b'{"type":"Hello","x":' + b"[" * 60_000)
    refused = deep[0].receive(protocol.FromHolder)[0]
    assert isinstance(refused, AttachRefusal) and "not a request to attach" in refused.message
    closed(deep)
    assert len(register.living(str(stockade_home))) == 1
