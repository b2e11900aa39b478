"""Floods from inside: the egress process and the supervisor stay small, and others are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from attacks import arena
from attacks.egress.reach import Reach
from support.egress_rig import SERVER, EgressRig

MEGABYTE = 1 << 20
#: In the supervisor: a sandbox that lives through several runs, and the memory of its egress process.
BEGIN = """
import os
def egress_of(box):
    handle = box._box.egress.process
    lines = open(f"/proc/self/fdinfo/{handle.pidfd}").read().splitlines()
    (pid,) = [line.split()[1] for line in lines if line.startswith("Pid:")]
    return open(f"/proc/{pid}/task/{pid}/children").read().split()[0]
def memory(pid, field):
    (found,) = [line.split()[1] for line in open(f"/proc/{pid}/status") if line.startswith(field)]
    return int(found) * 1024
box = stockade.Sandbox(stockade.Policy(net=NET, limits={"files": 8192})).__enter__()
pid = egress_of(box)
before = memory(pid, "VmRSS"), memory("self", "VmRSS")
"""


@pytest.fixture
def flooded(reach: Reach) -> Any:
    """Run floods in one sandbox; return the verdicts, and how much the two processes have grown."""

    def flood(net: list[str], *floods: tuple[str, str, int]) -> dict[str, Any]:
        commands = [arena.command_of("floods", *words)[0] for words in floods]
        found: dict[str, Any] = reach.supervisor.do(
            f"NET, COMMANDS = {json.dumps(net)}, {json.dumps(commands)}\n{BEGIN}"
            "try:\n"
            "    results = [summary(box.run(command, timeout=60)) for command in COMMANDS]\n"
            "    grown = memory(pid, 'VmHWM') - before[0], memory('self', 'VmHWM') - before[1]\n"
            "    left = memory(pid, 'VmRSS') - before[0]\n"
            "finally:\n"
            "    box.close()\n"
            "answer = {'results': results, 'egress': grown[0], 'supervisor': grown[1], 'left': left}\n"
        )
        for result in found["results"]:
            assert result["ended"][:2] == ["exited", 0], (result["ended"], result["stderr"])
        found["verdicts"] = [arena.verdict_of(result["stdout"].encode()) for result in found["results"]]
        print({name: found[name] for name in ("egress", "supervisor", "left", "verdicts")})
        return found

    return flood


def test_thousands_of_connections_that_say_nothing(flooded: Any) -> None:
    found = flooded(["api.good.example"], ("half-open", "api.good.example", 5000))
    (verdict,) = found["verdicts"]
    assert verdict["works"] is True and verdict["begun"] == 5000
    assert found["egress"] < 32 * MEGABYTE and found["supervisor"] < 16 * MEGABYTE
    (result,) = found["results"]
    assert sum(one["count"] for one in result["network"] if one["reason"] == "limit") > 100


@pytest.mark.parametrize("kind", ["hellos", "later hellos", "heads", "later heads"])
def test_first_and_later_messages_that_never_end_fill_bounded_memory(flooded: Any, kind: str) -> None:
    name = "api.good.example"
    found = flooded([f"{name}:80,443,8443"], (kind, name, 1000))
    assert found["verdicts"][0]["works"] is True
    assert found["egress"] < 32 * MEGABYTE and found["supervisor"] < 16 * MEGABYTE


def test_questions_for_fresh_names_fill_bounded_memory(flooded: Any) -> None:
    found = flooded(
        ["*.wild.good.example"], ("names", "wild.good.example", 10000), ("names", "evil.example", 5000)
    )
    assert [verdict["answered"] for verdict in found["verdicts"]] == [10000, 5000]
    assert found["egress"] < 24 * MEGABYTE and found["supervisor"] < 16 * MEGABYTE


#: In the supervisor: one sandbox floods in a thread, and another wants one good answer meanwhile.
TWO = """
import threading, time
policy = stockade.Policy(net=NET, limits={"files": 8192})
with stockade.Sandbox(policy) as hostile, stockade.Sandbox(policy) as other:
    flood = threading.Thread(target=lambda: hostile.run(FLOOD, timeout=20))
    flood.start()
    time.sleep(0.5)
    began = time.monotonic()
    found = other.run(["python3", "-c", GOOD], timeout=20)
    answer = [found.text.strip(), time.monotonic() - began, flood.is_alive()]
    if not flood.is_alive():
        answer.append("the flood was over")
    hostile.close()
    flood.join()
"""
GOOD = "import urllib.request as u; print(u.urlopen('http://api.good.example/', timeout=10).status)"
FLOODS = {
    "lookups that never end": """
import socket, threading
def dial(n):
    try: socket.create_connection((f"n{n}.never.good.example", 80), 15).sendall(
        f"GET / HTTP/1.1\\r\\nHost: n{n}.never.good.example\\r\\n\\r\\n".encode())
    except OSError: pass
for n in range(60):
    threading.Thread(target=dial, args=(n,), daemon=True).start()
import time; time.sleep(6)
""",
    "connections": """
import socket, time
until = time.monotonic() + 6
while time.monotonic() < until:
    ends = [socket.socket() for _ in range(1500)]
    for end in ends:
        end.setblocking(False); end.connect_ex(("203.0.113.9", 443))
    for end in ends: end.close()
""",
    "questions": """
import socket, time
until = time.monotonic() + 6
end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
question = bytes.fromhex("123401000001000000000000" + "046576696c076578616d706c6500" + "00010001")
while time.monotonic() < until:
    end.sendto(question, ("8.8.8.8", 53))
""",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_another_sandbox_is_served_while_one_floods(reach: Reach, flood: str) -> None:
    reach.internet.zone(**{"*.never.good.example": {"delay": 600}})
    net = ["api.good.example", "*.never.good.example"]
    command = ["python3", "-c", FLOODS[flood]]
    status, seconds, flooding, *_ = reach.supervisor.do(
        f"NET, FLOOD, GOOD = {json.dumps(net)}, {json.dumps(command)}, {GOOD!r}\n{TWO}"
    )
    assert status == "200" and flooding, (status, seconds, flooding)
    assert seconds < 5


DRIP = """
import socket, sys, time
hello = bytes.fromhex("16030100ff010000fb0303") + bytes(200)
head = b"GET / HTTP/1.1\\r\\nHost: a.example\\r\\nX: " + b"y" * 99
with socket.create_connection(("a.example", int(sys.argv[1])), 5) as end:
    began = time.monotonic()
    try:
        for byte in hello if sys.argv[2] == "tls" else head:
            end.sendall(bytes([byte]))
            time.sleep(0.1)
    except OSError:
        pass
    print(time.monotonic() - began < 4)
"""


def test_a_client_that_sends_one_byte_at_a_time_does_not_stay(tmp_path: Path) -> None:
    """The time for a hello or a head is for all of it, not from byte to byte."""
    with EgressRig(tmp_path, ["a.example:80,443,7000"], [80, 443, 7000], hello=1) as rig:
        rig.hosts["a.example"] = [SERVER]
        rig.serve(lambda connection: connection.recv(1) and None, 7000)
        for port, kind in ((443, "tls"), (80, "http"), (7000, "tls")):
            assert rig.python(DRIP, str(port), kind) == "True", port


SECOND_PROCESS = """
import os, socket
end = socket.create_connection(("echo.good.example", 7007), 5)
if os.fork() == 0:
    end.sendall(b"from the other process")
    os._exit(0)
os.wait()
print(end.recv(99).decode())
"""


def test_a_second_process_that_uses_a_connection_reaches_what_the_first_one_reached(reach: Reach) -> None:
    """All processes of a sandbox have the same rules, so a connection that changes hands gains nothing."""
    command = ["python3", "-c", SECOND_PROCESS]
    result = reach.supervisor.run(command, ["echo.good.example:7007"])
    assert result["stdout"] == "from the other process\n", result
    assert reach.internet.reached() == {("11.0.0.30", 7007)}
    (one,) = [one for one in result["network"] if one["kind"] == "connect"]
    assert one["sent"] == len("from the other process")
