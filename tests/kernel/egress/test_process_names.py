"""Records of connections name the program inside that made them, as far as the supervisor saw it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stockade.host import bubblewrap
from stockade.linux.socket_holders import StepBudget, find_holders
from support import bubblewraps
from support.network import Internet

NET = ["echo.good.example:7007"]
#: Connects, and stays connected for a moment; prints its number inside.
STAY = """
import os, socket, sys, time
def connect(host, family=socket.AF_UNSPEC):
    (family, kind, _, _, address) = socket.getaddrinfo(host, 7007, family, socket.SOCK_STREAM)[0]
    one = socket.socket(family, kind)
    one.connect(address)
    one.sendall(b"x"); one.recv(1)
    return one
def rename(name):
    import ctypes
    assert ctypes.CDLL(None).prctl(15, name, 0, 0, 0) == 0  # PR_SET_NAME
"""
CONNECT = STAY + "one = connect(sys.argv[1]); print(os.getpid(), flush=True); time.sleep(0.4)\n"


def program(code: str = CONNECT, host: str = "echo.good.example") -> list[str]:
    return ["python3", "-c", code, host]


def connections(result: dict[str, Any]) -> list[dict[str, Any]]:
    assert result["ok"], result
    return [one for one in result["network"] if one["kind"] == "connect"]


def test_a_connection_names_its_program_and_its_number_inside(internet: Internet) -> None:
    result = internet.run(program(), NET)
    (one,) = connections(result)
    assert one["process"] == f"python3 ({result['stdout'].strip()})"


def test_curl_in_a_pipeline_is_named_and_not_its_shell(internet: Internet) -> None:
    # curl goes on for as long as the server does, and an echo server says nothing.
    command = "sleep 1 | curl -sS --max-time 0.7 telnet://echo.good.example:7007 || true"
    (one,) = connections(internet.run(["sh", "-c", command], NET))
    assert one["process"] is not None and one["process"].startswith("curl ("), one


def test_an_ipv6_connection_is_named(internet: Internet) -> None:
    result = internet.run(program(host="2a10:600d::30"), ["[2a10:600d::30]:7007"])
    (one,) = connections(result)
    assert one["process"] == f"python3 ({result['stdout'].strip()})"


def test_an_ipv4_connection_of_an_ipv6_socket_is_named(internet: Internet) -> None:
    """As Java makes them."""
    code = STAY + (
        "one = socket.socket(socket.AF_INET6); one.connect(('::ffff:11.0.0.30', 7007))\n"
        "print(os.getpid(), flush=True); time.sleep(0.4)\n"
    )
    result = internet.run(program(code), ["11.0.0.30:7007"])
    (one,) = connections(result)
    assert one["process"] == f"python3 ({result['stdout'].strip()})"


def test_two_processes_are_told_apart(internet: Internet) -> None:
    code = STAY + (
        "names = [b'first', b'second']\n"
        "pids = []\n"
        "for host, name in zip(['echo.good.example', 'greeter.good.example'], names):\n"
        "    if (pid := os.fork()) == 0:\n"
        "        rename(name)\n"
        "        one = connect(host); time.sleep(0.5); os._exit(0)\n"
        "    pids.append(pid)\n"
        "for pid in pids: os.waitpid(pid, 0)\n"
        "print(*pids)\n"
    )
    result = internet.run(program(code), [*NET, "greeter.good.example:7007"])
    first, second = result["stdout"].split()
    found = {one["name"]: one["process"] for one in connections(result)}
    assert found == {
        "echo.good.example": f"first ({first})",
        "greeter.good.example": f"second ({second})",
    }


def test_a_name_with_escape_sequences_is_shown_without_them(internet: Internet, tmp_path: Path) -> None:
    code = STAY + "rename(b'\\x1b[2J\\n\\xe2\\x80\\xae) (1')\n" + CONNECT
    result = internet.run(program(code), NET)
    (one,) = connections(result)
    assert one["process"] == f"?[2J????) (1 ({result['stdout'].strip()})"
    done = internet.stockade("run", "-v", "--discard", f"--net={NET[0]}", "--", *program(code), cwd=tmp_path)
    assert done.returncode == 0 and "\x1b[2J" not in done.stderr and " by ?[2J????) (1 (" in done.stderr


def test_a_connection_that_was_closed_at_once_is_recorded_with_or_without_a_process(
    internet: Internet,
) -> None:
    code = STAY + "for _ in range(20): connect(sys.argv[1]).close()\n"
    found = connections(internet.run(program(code), NET))
    assert len(found) == 20
    assert all(one["process"] is None or one["process"].startswith("python3 (") for one in found)


def test_lines_and_logs_name_the_program(internet: Internet, tmp_path: Path) -> None:
    words = ("run", "-v", "--discard", "--name", "named", f"--net={NET[0]}", "--")
    done = internet.stockade(*words, *program(), cwd=tmp_path)
    said = f"allowed: echo.good.example:7007 at 11.0.0.30 by python3 ({done.stdout.strip()})"
    assert said in done.stderr, done.stderr
    logs = internet.stockade("logs", "--json", "--all", cwd=tmp_path)
    (line,) = [one for one in json.loads(logs.stdout) if one["name"] == "named"]
    assert any(f" by python3 ({done.stdout.strip()})" in words for words in line["network_first"]), line


def test_a_second_run_of_a_sandbox_names_its_own(internet: Internet) -> None:
    done = internet.python(f"""
import json, stockade
command = {program()!r}
with stockade.Sandbox(stockade.Policy(net={NET!r})) as box:
    for _ in range(2):
        result = box.run(command)
        # The end of the first run's connection can be seen as late as in the second.
        *_, one = [one for one in result.network if one.kind == "connect"]
        print(json.dumps([result.text.strip(), one.process]))
""")
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        pid, process = json.loads(line)
        assert process == f"python3 ({pid})"


def test_a_connection_through_a_second_egress_process_is_named(internet: Internet) -> None:
    done = internet.python(f"""
import json, stockade
command = {program()!r}
with stockade.Sandbox(stockade.Policy(net=["api.good.example:443"])) as box:
    box.run(["true"])
    box.net.allow("echo.good.example:7007")
    result = box.run(command)
    (one,) = [one for one in result.network if one.kind == "connect"]
    print(json.dumps([result.text.strip(), one.process]))
""")
    assert done.returncode == 0, done.stderr
    pid, process = json.loads(done.stdout)
    assert process == f"python3 ({pid})"


def test_a_command_in_a_shell_names_its_program(internet: Internet) -> None:
    done = internet.python(f"""
import json, shlex, stockade
command = shlex.join({program()!r})
with stockade.Sandbox(stockade.Policy(net={NET!r})) as box, box.shell() as shell:
    for _ in range(2):
        result = shell.run(command)
        *_, one = [one for one in result.network if one.kind == "connect"]
        print(json.dumps([result.text.strip(), one.process]))
""")
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        pid, process = json.loads(line)
        assert process == f"python3 ({pid})"


def test_many_connections_at_once_stay_within_bounds(internet: Internet) -> None:
    code = STAY + (
        "held = [connect(sys.argv[1]) for _ in range(300)]\n"
        "spare = [os.dup(0) for _ in range(400)]\n"
        "time.sleep(0.5)\n"
    )
    found = connections(internet.run(program(code), NET))
    assert len(found) == 300
    assert sum(one["process"] is not None for one in found) >= 50


def test_a_closed_sandbox_leaves_no_socket_for_questions(internet: Internet) -> None:
    done = internet.python(f"""
import os, stockade
def held():
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink("/proc/self/fd/" + name))
        except OSError:
            pass
    return sum(link.startswith(("socket:", "net:")) for link in links)
policy = stockade.Policy(net={NET!r})
stockade.run(["true"], policy)
before = held()
for _ in range(3):
    with stockade.Sandbox(policy) as box:
        box.run(["true"])
        inside = held()
print(before, inside > before, held())
""")
    assert done.returncode == 0, done.stderr
    before, more, after = done.stdout.split()
    assert more == "True" and after == before


@pytest.mark.parametrize("version", [bubblewraps.OLD, bubblewraps.NEW])
def test_bubblewrap_names_the_program_too(internet: Internet, version: str) -> None:
    done = internet.python(
        f"""
import json, stockade
policy = stockade.Policy(net={NET!r}, backend="bwrap", accept=["ipc", "deny"], toolchain=False)
result = stockade.run({program()!r}, policy)
print(json.dumps([result.text.strip(), *(one.process for one in result.network if one.kind == "connect")]))
""",
        env={bubblewrap.NAMED: bubblewraps.program(version)},
    )
    assert done.returncode == 0, done.stderr
    pid, process = json.loads(done.stdout)
    assert process == f"python3 ({pid})"


@pytest.fixture
def holder() -> Iterator[tuple[int, int]]:
    """A process that holds a socket of ours besides a thousand other descriptors, and the socket's inode."""
    code = "import os, sys; held = [os.dup(0) for _ in range(1000)]; print(flush=True); sys.stdin.read()"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        inode, passed = os.fstat(theirs.fileno()).st_ino, (theirs.fileno(),)
        command = [sys.executable, "-c", code]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=passed
        ) as process:
            assert process.stdout is not None and process.stdin is not None
            process.stdout.readline()
            yield process.pid, inode
            process.stdin.close()


def test_the_holder_of_a_socket_is_found_among_descendants_only(holder: tuple[int, int]) -> None:
    pid, inode = holder
    found = find_holders(os.getpid(), [inode], StepBudget(100_000))
    assert found[inode].endswith(f" ({pid})")
    # It is no descendant of itself.
    assert find_holders(pid, [inode], StepBudget(100_000)) == {}


def test_a_search_ends_when_its_steps_are_spent(holder: tuple[int, int]) -> None:
    steps = StepBudget(3)
    assert find_holders(os.getpid(), [holder[1]], steps) == {}
    assert steps.left == 0


def test_a_search_below_a_process_that_has_gone_finds_nothing() -> None:
    assert find_holders(2**22 + 1, [1], StepBudget(100)) == {}
