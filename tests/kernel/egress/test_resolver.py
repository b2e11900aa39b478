"""The resolver: the host's own view of names, behind walls, for many egress processes at once."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from stockade.egress import resolver
from stockade.runs.io.eventloop import Events, drive
from stockade.runs.network import resolver_process
from stockade.runs.network.resolver_process import ResolverEvidence
from support.means import need
from support.paths import ROOT

SECONDS = 30


@contextmanager
def connected() -> Iterator[tuple[socket.socket, ResolverEvidence]]:
    with Events() as events:
        home = os.environ["STOCKADE_HOME"]
        descriptor, evidence = drive(resolver_process.connect_resolver(events, home), events)
    with socket.socket(fileno=descriptor) as end:
        end.settimeout(SECONDS)
        yield end, evidence


def answers(end: socket.socket, *names: bytes) -> list[Any]:
    """The answers in the order of the names, which all are under way at once."""
    for number, name in enumerate(names):
        end.send(struct.pack(">I", number) + name)
    found = {}
    for _ in names:
        packet = end.recv(65536)
        found[struct.unpack(">I", packet[:4])[0]] = json.loads(packet[4:])
    return [found[number] for number in range(len(names))]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    resolver_process.shutdown()


def test_it_answers_as_the_host_does() -> None:
    with connected() as (end, _):
        expected = [place[4][0] for place in socket.getaddrinfo("localhost", None, type=socket.SOCK_STREAM)]
        assert answers(end, b"localhost") == [{"addresses": list(dict.fromkeys(expected))}]


@pytest.mark.parametrize(
    "line, found",
    [
        ("11.0.0.1 a.test b.test", True),
        ("11.0.0.1 A.Test", True),
        ("11.0.0.1\tx\ta.test # c", True),
        ("11.0.0.1 x # a.test", False),
        ("# 11.0.0.1 a.test", False),
        ("a.test x", False),
        ("11.0.0.1 aa.test a.test.b", False),
        ("", False),
    ],
)
def test_a_name_is_in_the_hosts_file_only_as_a_whole(
    line: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n{line}\n")
    monkeypatch.setattr(resolver, "HOSTS", str(tmp_path / "hosts"))
    assert resolver.is_in_hosts(b"a.test") is found


@pytest.mark.parametrize("name", [b"", b"a b", b"a\0b", b"a/b", "ä".encode(), b"x" * 254])
def test_what_is_no_name_is_not_looked_up(name: bytes) -> None:
    with connected() as (end, _):
        assert answers(end, name) == [{"error": "failed"}]


def test_its_walls_are_observed() -> None:
    with connected() as (_, evidence):
        status = Path(f"/proc/{next(iter(resolver_process.resolver_pids()))}/status").read_text()
    assert evidence.uid == (65534 if os.geteuid() == 0 else os.geteuid())
    assert f"Uid:\t{evidence.uid}\t{evidence.uid}\t{evidence.uid}\t{evidence.uid}\n" in status
    assert "NoNewPrivs:\t1\nSeccomp:\t2\n" in status
    assert "CapEff:\t0000000000000000\n" in status
    assert "/etc" in evidence.trees and "/" not in evidence.trees


def test_one_process_serves_every_egress_process() -> None:
    with connected() as (one, _), connected() as (other, _):
        assert len(resolver_process.resolver_pids()) == 1
        assert answers(one, b"localhost") == answers(other, b"localhost")


def test_one_that_died_is_started_again() -> None:
    with connected() as (end, _):
        (pid,) = resolver_process.resolver_pids()
        os.kill(pid, signal.SIGKILL)
        assert end.recv(10) == b""
    # Its ends close one by one; until the last has, it may still be given a new one.
    _await_end(pid)
    with connected() as (end, _):
        assert "addresses" in answers(end, b"localhost")[0]


def test_it_ends_with_its_supervisor() -> None:
    code = (
        "import os, time\n"
        "from stockade.runs.network import resolver_process\n"
        "resolver_process.warm_up()\n"
        "print(*resolver_process.resolver_pids(), flush=True)\n"
        "time.sleep(60)\n"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.wait()
    supervisor.stdout.close()
    _await_end(pid)


def _await_end(pid: int) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and _runs(pid):
        time.sleep(0.01)
    assert not _runs(pid)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


#: Executed in namespaces of its own: prints what the resolver answers at each step.
STEPS = """
import os, socket, subprocess, sys, threading, time
sys.path.insert(0, sys.argv[1])
from kernel.egress.test_resolver import answers, connected
from stockade.backends.seccomp import egress_calls
from stockade.runs.network import resolver_process

def replace(path, text):
    with open(path + ".new", "w") as file:
        file.write(text)
    os.rename(path + ".new", path)

# Libraries are looked for with the help of /etc.
egress_calls.program("resolver", os.environ["STOCKADE_HOME"])
subprocess.run(["mount", "-t", "tmpfs", "none", "/etc"], check=True)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
replace("/etc/hosts", "192.0.2.1 one.test\\n")
replace("/etc/nsswitch.conf", "hosts: files dns\\n")
replace("/etc/resolv.conf", "nameserver 127.0.0.9\\noptions timeout:1 attempts:1\\n")

def serve(server):
    # Every name but that of silence has the address 192.0.2.53; of IPv6 it has none.
    while True:
        query, client = server.recvfrom(512)
        if b"silence" in query:
            continue
        kind = query[-4:-2]
        count = b"\\0\\1" if kind == b"\\0\\1" else b"\\0\\0"
        answer = query[:2] + b"\\x81\\x80\\0\\1" + count + bytes(4) + query[12:]
        if kind == b"\\0\\1":
            answer += b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\0\\0\\4" + bytes([192, 0, 2, 53])
        server.sendto(answer, client)

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.9", 53))
threading.Thread(target=serve, args=(server,), daemon=True).start()
with connected() as (end, _):
    print(answers(end, b"one.test"))
    print(answers(end, b"two.test"))
    replace("/etc/hosts", "192.0.2.2 one.test\\n")
    print(answers(end, b"one.test"))
    replace("/etc/nsswitch.conf", "hosts: files\\n")
    print(answers(end, b"two.test"))
    replace("/etc/nsswitch.conf", "hosts: files dns\\n")
    with connected() as (other, _):
        for number in range(60):
            end.send(number.to_bytes(4, "big") + b"silence.test")
        begun = time.monotonic()
        print(answers(other, b"one.test", b"two.test"), time.monotonic() - begun < 1)
resolver_process.shutdown()
"""


def test_files_replaced_by_rename_count_at_once_and_a_dead_server_blocks_nobody_else() -> None:
    flags = ["--mount", "--net"] if os.geteuid() == 0 else ["--map-root-user", "--mount", "--net"]
    possible = subprocess.run(["unshare", *flags, "true"], check=False, capture_output=True)
    need(possible.returncode == 0, "no namespaces for a network of its own")
    command = ["unshare", *flags, sys.executable, "-c", STEPS, str(ROOT / "tests")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "[{'addresses': ['192.0.2.1']}]",
        "[{'addresses': ['192.0.2.53']}]",
        "[{'addresses': ['192.0.2.2']}]",
        "[{'error': 'not found'}]",
        "[{'addresses': ['192.0.2.2']}, {'addresses': ['192.0.2.53']}] True",
    ], done.stderr
