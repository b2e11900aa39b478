"""Deaths of the processes around a sandbox with rules: nothing falls open, and nothing stays behind."""

from __future__ import annotations

import inspect
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import stockade
from attacks.egress.reach import Reach
from stockade import Policy
from stockade.runs.network import egress_template
from support import leaks

#: Downloads without end, then tries to connect again: says why each ended.
DOWNLOAD = """
import errno, socket, sys, time
def dial(host, port, text):
    try:
        with socket.create_connection((host, port), 5) as end:
            end.sendall(text)
            print("begun", flush=True)
            while end.recv(65536):
                pass
            return "end"
    except socket.gaierror:
        return "no such name"
    except OSError as error:
        return errno.errorcode[error.errno]
get = b"GET /big?mb=4000 HTTP/1.1\\r\\nHost: api.good.example\\r\\n\\r\\n"
address = socket.getaddrinfo("api.good.example", 80, socket.AF_INET)[0][4][0]
print(dial("api.good.example", 80, get))
print(dial("api.good.example", 80, get), dial(address, 80, get), dial("11.0.0.66", 80, get))
time.sleep(0.5)  # a killed process closes its sockets before the supervisor can see its end
"""
MIDDLE = """
import signal, threading, time
with stockade.Sandbox(stockade.Policy(net=["api.good.example"])) as box:
    egress = box._box.egress.process.pidfd
    killer = threading.Timer(1.0, lambda: signal.pidfd_send_signal(egress, signal.SIGKILL))
    killer.start()
    found = box.run(["python3", "-c", CODE], timeout=20)
    killer.join()
    later = box.run(["python3", "-c", CODE], timeout=20)
    answer = [summary(found), summary(later)]
"""


def test_an_egress_process_killed_in_the_middle_ends_every_connection(reach: Reach) -> None:
    control = reach.internet.popen(["python3", "-c", DOWNLOAD], stdout=subprocess.PIPE, text=True)
    assert control.stdout is not None and control.stdout.readline() == "begun\n"
    # It can say so before the server has taken the connection.
    until = time.monotonic() + 20
    while not reach.internet.events("connection") and time.monotonic() < until:
        time.sleep(0.02)
    os.killpg(control.pid, signal.SIGKILL)
    control.communicate()
    reach.internet.clear()
    first, later = reach.supervisor.do(f"CODE = {DOWNLOAD!r}\n{MIDDLE}")
    lines = first["stdout"].splitlines()
    assert lines[0] == "begun" and lines[1] in ("ECONNRESET", "end"), lines
    assert lines[2] == "no such name ECONNREFUSED ECONNREFUSED", lines
    assert any("the egress process ended at" in warning for warning in first["warnings"]), first["warnings"]
    # Later runs of the same sandbox have no network either.
    assert "begun" not in later["stdout"] and later["warnings"], later
    assert len(reach.internet.events("connection")) == 1


RESOLVER = """
import os, signal
from stockade.runs.network import resolver_process
policy = stockade.Policy(net=["api.good.example", "11.0.0.66:80"])
def said(box):
    return [box.run(["python3", "-c", CODE, host]).text.strip() for host in ("api.good.example", "11.0.0.66")]
with stockade.Sandbox(policy) as box:
    before = said(box)
    for pid in resolver_process.resolver_pids():
        os.kill(pid, signal.SIGKILL)
    after = said(box)
with stockade.Sandbox(policy) as box:
    answer = [before, after, said(box)]
"""
GET = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], 80), 5) as end:
        end.sendall(f"GET / HTTP/1.1\\r\\nHost: {sys.argv[1]}\\r\\n\\r\\n".encode())
        print(end.recv(15).decode())
except OSError as error:
    print(type(error).__name__)
"""


def test_without_its_resolver_names_fail_and_the_next_sandbox_has_a_new_one(reach: Reach) -> None:
    before, after, later = reach.supervisor.do(f"CODE = {GET!r}\n{RESOLVER}")
    assert before == later == ["HTTP/1.1 200 OK"] * 2
    assert after == ["ConnectionResetError", "HTTP/1.1 200 OK"]


SUPERVISOR = """
import stockade, sys, time
policy = stockade.Policy(net=["api.good.example"])
with stockade.Sandbox(policy) as box, stockade.Sandbox(policy) as other:
    print("living", flush=True)
    other.run(["sleep", "60"])
"""


def test_nothing_stays_of_a_supervisor_that_is_killed(swept: None) -> None:
    """Egress processes, resolver, template and namespaces all end with it."""
    before = {member.pid for member in leaks.family()}

    def fresh() -> list[str]:
        return [str(member) for member in leaks.family() if member.pid not in before]

    with subprocess.Popen([sys.executable, "-c", SUPERVISOR], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "living\n"
        time.sleep(0.3)
        assert len(fresh()) > 6, fresh()
        process.kill()
    assert leaks.settled(fresh, 5) == []


def listening() -> set[str]:
    """What listens in this network namespace, and every unix socket that listens."""
    found = set()
    for name in ("tcp", "tcp6"):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            if line.split()[3] == "0A":
                found.add(f"{name} {line.split()[1]}")
    for name in ("udp", "udp6", "udplite"):
        with open(f"/proc/net/{name}") as lines:
            found |= {f"{name} {line.split()[1]}" for line in lines.readlines()[1:]}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        if int(line.split()[3], 16) & 0x10000:
            found.add(f"unix {line.split()[7:] or line.split()[6]}")
    return found


LISTENING = """
import json, socket, stockade
from pathlib import Path
{source}
before = listening()
with stockade.Sandbox(stockade.Policy(net=["api.good.example", "tcp://echo.good.example:7007"])) as box:
    box.run(["true"])
    living = listening()
with socket.create_server(("127.0.0.1", 0)):
    control = listening()
print(json.dumps([sorted(living - before), sorted(control - before)]))
"""


def test_another_process_of_the_host_finds_nothing_to_connect_to(reach: Reach) -> None:
    """The egress has no port, no token and no socket file that another process, of any user, could use."""
    done = reach.internet.python(LISTENING.format(source=inspect.getsource(listening)))
    new, control = json.loads(done.stdout)
    assert new == [] and len(control) == 1


def test_a_template_whose_files_have_changed_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise an egress process would run code that an update has replaced."""
    package = Path(stockade.__file__).parent
    copy = tmp_path / "packages" / "stockade"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "src"))
    monkeypatch.setattr(egress_template, "_PACKAGE", str(copy))
    ask = ["python3", "-c", "import socket; print(socket.gethostbyname('api.good.example'))"]
    policy = Policy(net=["api.good.example"])
    assert stockade.run(ask, policy).text == "198.18.0.3\n"
    names = copy / "egress" / "names.py"
    changed = names.read_text().replace('"198.18.0.0"', '"198.18.7.0"')
    names.with_suffix(".new").write_text(changed)
    os.replace(names.with_suffix(".new"), names)
    assert stockade.run(ask, policy).text == "198.18.7.3\n"
    monkeypatch.undo()
    assert stockade.run(ask, policy).text == "198.18.0.3\n"


def test_descriptors_that_a_program_sends_go_nowhere(reach: Reach) -> None:
    """The sockets of the egress are of the network: they carry bytes, and no descriptor."""
    program = """
import array, errno, os, socket
end = socket.create_connection(("echo.good.example", 7007), 5)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0]))]
try:
    end.sendmsg([b"x"], rights)
    print("sent")
except OSError as error:
    print(errno.errorcode[error.errno])
"""
    result = reach.supervisor.run(["python3", "-c", program], ["echo.good.example:7007"])
    # The kernel ignores or refuses them on a socket of TCP; on one of the machine's own they would pass.
    assert result["stdout"] in ("EINVAL\n", "sent\n"), result
    one, other = socket.socketpair()
    with one, other:
        socket.send_fds(one, [b"x"], [0])
        _, received, _, _ = socket.recv_fds(other, 1, 1)
        os.close(received[0])
