"""An egress process holds its bounds against a program that wants to use it up."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

from support.egress_rig import SERVER, EgressRig, private_memory

#: One process that echoes on many connections, in the outer namespace.
ECHO = """
import asyncio, resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
async def serve(reader, writer):
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    writer.close()
async def main():
    server = await asyncio.start_server(serve, sys.argv[1], 7000, backlog=4096)
    print("ready", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
MANY = """
import resource, select, socket, sys, time, struct
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
def begin(count, host, port):
    found = []
    for _ in range(count):
        one = socket.socket(); one.setblocking(False)
        one.connect_ex((host, port)); found.append(one)
    return found
def works(one, text=b'x'):
    try:
        one.settimeout(20); one.sendall(text); return one.recv(99) == text
    except OSError:
        return False
"""
TALK = MANY + "one = socket.create_connection((sys.argv[1], 7000), 20); print(works(one))\n"


class EchoServer:
    """A process that echoes, until the test ends."""

    def __init__(self, rig: EgressRig) -> None:
        command = rig.outside.command(sys.executable, "-I", "-c", ECHO, SERVER)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self._process.stdout.readline()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


def test_a_thousand_connections_at_once_are_held(tmp_path: Path) -> None:
    with EgressRig(tmp_path, [f"{SERVER}:7000"], [7000]) as rig, EchoServer(rig):
        said = rig.python(
            MANY + "all = begin(1000, sys.argv[1], 7000)\n"
            "print(sum(works(one) for one in all), sum(works(one, b'again') for one in all))\n",
            SERVER,
            timeout=90,
        )
        assert said == "1000 1000"
        assert rig.totals().connections_allowed == 1000
        assert private_memory(rig.pid) < 24 * 1024 * 1024
        found = rig.ended_records(1000)
        assert {(one.sent, one.received) for one in found} == {(6, 6)}


def test_connections_beyond_the_bound_are_reset_and_counted(tmp_path: Path) -> None:
    with EgressRig(tmp_path, [f"{SERVER}:7000"], [7000], connections=50) as rig, EchoServer(rig):
        said = rig.python(
            MANY + "all = begin(80, sys.argv[1], 7000)\nprint(sum(works(one) for one in all))\n", SERVER
        )
        assert said == "50"
        refused = [one for one in rig.ended_records(51) if one.reason == "limit"]
        assert [one.times for one in refused] == [30]
        assert rig.python(TALK, SERVER) == "True"


def test_without_descriptors_connections_are_refused_and_later_ones_work(tmp_path: Path) -> None:
    rig = EgressRig(tmp_path, [f"{SERVER}:7000"], [7000], descriptors=60)
    with rig, EchoServer(rig):
        said = rig.python(
            MANY + "all = begin(100, sys.argv[1], 7000)\nprint(0 < sum(works(one) for one in all) < 50)\n",
            SERVER,
        )
        assert said == "True"
        assert rig.totals().connections_refused > 30
        assert rig.python(TALK, SERVER) == "True"


def test_a_reader_that_does_not_read_makes_the_server_wait(tmp_path: Path) -> None:
    taken: list[int] = []

    def pour(connection: socket.socket) -> None:
        connection.settimeout(1)
        block = bytes(1024 * 1024)
        total = 0
        try:
            while total < 2**30:
                total += connection.send(block)
        except TimeoutError:
            taken.append(total)
        time.sleep(2)

    with EgressRig(tmp_path, [f"{SERVER}:7000,7001"], [7000, 7001]) as rig, EchoServer(rig):
        rig.serve(pour, 7001)
        before = private_memory(rig.pid)
        said = rig.python(
            MANY + "slow = [socket.create_connection((sys.argv[1], 7001)) for _ in range(20)]\n"
            "time.sleep(2)\n"
            "one = socket.create_connection((sys.argv[1], 7000)); print(works(one))\n"
            # They are relayed with and without a pipe, and nothing is lost.
            "for one in slow: one.settimeout(20); assert len(one.recv(2**20)) > 0\n",
            SERVER,
        )
        assert said == "True"
        assert len(taken) == 20
        assert max(taken) < 48 * 1024 * 1024
        assert private_memory(rig.pid) - before < 2 * 1024 * 1024


def test_nothing_is_lost_when_there_are_more_streams_than_pipes(tmp_path: Path) -> None:
    with EgressRig(tmp_path, [f"{SERVER}:7000"], [7000]) as rig, EchoServer(rig):
        said = rig.python(
            MANY + "import hashlib, os, threading\n"
            "right = []\n"
            "def stream():\n"
            "    one = socket.create_connection((sys.argv[1], 7000), 30)\n"
            "    data = os.urandom(3_000_000); got = b''\n"
            "    threading.Thread(target=lambda: (one.sendall(data), one.shutdown(1))).start()\n"
            "    time.sleep(0.3)\n"
            "    while piece := one.recv(50_000): got += piece\n"
            "    right.append(got == data)\n"
            "all = [threading.Thread(target=stream) for _ in range(30)]\n"
            "[one.start() for one in all]; [one.join() for one in all]\n"
            "print(right.count(True))\n",
            SERVER,
        )
        assert said == "30"
        assert rig.totals().bytes_sent == rig.totals().bytes_received == 90_000_000


def test_a_flood_of_connections_that_are_never_used_does_not_stop_the_others(tmp_path: Path) -> None:
    rules = [f"{SERVER}:7000", "a.example:443"]
    with EgressRig(tmp_path, rules, [7000, 443], hello=2) as rig, EchoServer(rig):
        rig.hosts["a.example"] = [SERVER]
        said = rig.python(
            MANY + "address = socket.gethostbyname('a.example')\n"
            "flood = begin(900, address, 443)\n"
            # Connections that are reset as soon as they are there.
            "for one in begin(2000, address, 443):\n"
            "    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0)); one.close()\n"
            "began = time.monotonic()\n"
            "one = socket.create_connection((sys.argv[1], 7000), 20); print(works(one))\n"
            "assert time.monotonic() - began < 10\n"
            "time.sleep(3); gone = sum(not works(one) for one in flood); print(gone)\n",
            SERVER,
        )
        assert said.split() == ["True", "900"]
        assert rig.asked == []


def test_rubbish_on_every_port_ends_nothing_but_its_own_connection(tmp_path: Path) -> None:
    rules = ["a.example:80,443,7000"]
    with EgressRig(tmp_path, rules, [80, 443, 7000]) as rig, EchoServer(rig):
        rig.hosts["a.example"] = [SERVER]
        said = rig.python(
            MANY + "import random\n"
            "chance = random.Random(18); address = socket.gethostbyname('a.example')\n"
            "hello = bytes.fromhex('16030100ff010000fb0303')\n"
            "for number in range(600):\n"
            "    port = (53, 80, 443, 7000)[number % 4]\n"
            "    one = socket.create_connection((address, port), 0.2)\n"
            "    data = chance.randbytes(chance.randrange(3000))\n"
            "    first = (b'', hello, b'GET / HTTP/1.1\\r\\nHost: a.example\\r\\n')[number % 3]\n"
            "    try: one.sendall(first + data); number % 5 or one.recv(1)\n"
            "    except OSError: pass\n"
            "    one.close()\n"
            "one = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "for number in range(600): one.sendto(chance.randbytes(chance.randrange(600)), (address, 53))\n"
            "one = socket.create_connection((address, 7000), 5); print(works(one))\n",
        )
        assert said == "True"
        assert rig.process.poll() is None


def query(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(one)]) + one.encode() for one in name.split("."))
    return struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def test_names_are_answered_on_any_address_over_udp_and_tcp(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["*.example:443"], [443]) as rig:
        said = rig.python(
            "import socket, sys, struct\n"
            "allowed, refused = bytes.fromhex(sys.argv[1]), bytes.fromhex(sys.argv[2])\n"
            "servers = ((2, '198.18.0.1'), (2, '9.9.9.9'), (2, '127.0.0.53'), (10, '2620:fe::fe'))\n"
            "for family, server in servers:\n"
            "    one = socket.socket(family, socket.SOCK_DGRAM); one.settimeout(5)\n"
            # A connected socket takes answers from the address that it asked only.
            "    one.connect((server, 53))\n"
            "    for asked in (allowed, refused):\n"
            "        one.send(asked); print(one.recv(999)[3] & 15, end=' ')\n"
            "    one = socket.create_connection((server, 53), 5)\n"
            "    for asked in (allowed, refused):\n"
            "        one.sendall(struct.pack('>H', len(asked)) + asked); answer = one.recv(999)\n"
            "        print(answer[5] & 15, end=' ')\n",
            query("a.example").hex(),
            query("other.test", 28).hex(),
        )
        assert said.split() == ["0", "3", "0", "3"] * 4
        names = {(one.name, one.verdict, one.reason): one.times for one in rig.records("name")}
        assert names == {("a.example", "allowed", ""): 8, ("other.test", "denied", "no rule"): 8}
        assert rig.totals()[2:4] == (8, 8)
        assert rig.asked == []


def test_silent_dns_connections_are_bounded_and_ended(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["a.example:443"], [443], query=2) as rig:
        said = rig.python(
            MANY + "all = begin(60, '9.9.9.9', 53); time.sleep(0.5)\n"
            "print(len(select.select(all, [], [], 0)[0])); time.sleep(2.5)\n"
            "print(len(select.select(all, [], [], 0)[0]))\n"
            "print(socket.gethostbyname('a.example'))\n"
        )
        assert said.split() == ["28", "60", "198.18.0.3"]


def test_fresh_names_below_a_wildcard_are_bounded(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["*.tunnel.example:7000"], [7000]) as rig, EchoServer(rig):
        said = rig.python(
            MANY + "import hashlib\n"
            "for number in range(20):\n"
            "    name = hashlib.sha256(str(number).encode()).hexdigest()[:60] + '.tunnel.example'\n"
            "    address = socket.gethostbyname(name)\n"
            "    works(begin(1, address, 7000)[0])\n"
        )
        assert said == ""
        # Long names are what carries bytes out; ten of them are asked for outside.
        assert len(rig.asked) == 10
        assert [one.reason for one in rig.ended_records(20)].count("too many names") == 10


def test_descriptors_on_the_control_socket_are_dropped(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["a.example:443"], [443]) as rig:
        before = len(os.listdir(f"/proc/{rig.pid}/fd"))
        for _ in range(20):
            socket.send_fds(rig.control, [b"{}"], [0, 1, 2])
            assert rig.control.recv(99) == b'{"ok": true}'
        assert len(os.listdir(f"/proc/{rig.pid}/fd")) == before


def test_what_clients_hold_before_they_are_judged_is_bounded_in_sum(tmp_path: Path) -> None:
    with EgressRig(tmp_path, ["a.example:80,443,7000"], [80, 443, 7000]) as rig, EchoServer(rig):
        rig.hosts["a.example"] = [SERVER]
        said = rig.python(
            MANY + "address = socket.gethostbyname('a.example')\n"
            "record = b'\\x16\\x03\\x01\\x3f\\xff' + b'\\x01\\0\\xff\\xf0' + bytes(0x3ffb)\n"
            "more = b'\\x16\\x03\\x01\\x3f\\xff' + bytes(0x3fff)\n"
            "hello = record + more + more\n"
            "head = b'GET / HTTP/1.1\\r\\nHost: a.example\\r\\nX: ' + b'x' * 60_000\n"
            "all = [(one, hello) for one in begin(500, address, 443)]\n"
            "all += [(one, head) for one in begin(200, address, 80)]\n"
            "all += [(one, hello) for one in begin(200, address, 7000)]\n"
            "for one, data in all:\n"
            "    try: one.settimeout(5); one.sendall(data)\n"
            "    except OSError: pass\n"
            "one = socket.create_connection((address, 7000), 5); print(works(one))\n"
        )
        assert said == "True"
        assert private_memory(rig.pid) < 48 * 1024 * 1024
        assert "limit" in {one.reason for one in rig.records()}


#: Opens connections to the server and reads nothing from any of them.
STALL = MANY + "held = begin(60, sys.argv[1], 7000)\ntime.sleep(3)\n"


def test_what_the_kernel_holds_for_readers_that_wait_is_small_for_all_but_the_first(tmp_path: Path) -> None:
    swallowed: list[int] = []

    def pour(connection: socket.socket) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection.settimeout(1)
        place, sent = len(swallowed), 0
        swallowed.append(0)
        try:
            while True:
                sent += connection.send(bytes(65536))
                swallowed[place] = sent
        except OSError:
            return

    with EgressRig(tmp_path, [f"{SERVER}:7000"], [7000]) as rig:
        rig.serve(pour, 7000)
        rig.python(STALL, SERVER)
    assert len(swallowed) == 60
    # Two sockets with two buffers each, of 256 KiB with the kernel's own part, and what waits inside.
    assert sorted(swallowed)[20] < 2 << 20, sorted(swallowed)
