"""TCP's urgent bytes, which splice does not pass, neither stop a connection nor keep the egress busy."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from support.egress_rig import SERVER, EgressRig

CONNECT = """
import socket, sys, time
one = socket.create_connection(('echo.example', 7000), 10)
"""


def _processor_time(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _busy(rig: EgressRig, seconds: float = 1.0) -> float:
    """How much of its time the egress process computes while nothing moves."""
    before = _processor_time(rig.pid)
    time.sleep(seconds)
    return (_processor_time(rig.pid) - before) / seconds


def _start(rig: EgressRig, text: str) -> subprocess.Popen[str]:
    argv = rig.inside.command(sys.executable, "-I", "-c", text)
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def test_an_urgent_byte_of_a_program_does_not_keep_the_egress_busy(tmp_path: Path) -> None:
    received = bytearray()

    def collect(connection: socket.socket) -> None:
        while data := connection.recv(65536):
            received.extend(data)

    with EgressRig(tmp_path, ["tcp://echo.example:7000"], [7000]) as rig:
        rig.hosts["echo.example"] = [SERVER]
        rig.serve(collect, 7000)
        program = _start(
            rig,
            CONNECT + "one.sendall(b'first'); time.sleep(0.2)\n"
            "one.send(b'!', socket.MSG_OOB); one.sendall(b'second')\n"
            "time.sleep(0.2); one.sendall(b'third'); print('sent', flush=True); time.sleep(60)\n",
        )
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "sent\n"
            assert _busy(rig) < 0.3
            assert bytes(received) in (b"firstsecondthird", b"first!secondthird")
        finally:
            program.kill()
            program.wait()


def test_an_urgent_byte_of_a_server_does_not_keep_the_egress_busy(tmp_path: Path) -> None:
    def urge(connection: socket.socket) -> None:
        connection.sendall(b"first")
        time.sleep(0.2)
        connection.send(b"!", socket.MSG_OOB)
        connection.sendall(b"second")
        connection.recv(1)

    with EgressRig(tmp_path, ["tcp://echo.example:7000"], [7000]) as rig:
        rig.hosts["echo.example"] = [SERVER]
        rig.serve(urge, 7000)
        program = _start(
            rig,
            CONNECT + "said = b''\n"
            "while not said.endswith(b'second'): said += one.recv(99)\n"
            "print(said.decode(), flush=True); time.sleep(60)\n",
        )
        try:
            assert _busy(rig, 2) < 0.3
            assert program.stdout is not None
            assert program.stdout.readline() in ("firstsecond\n", "first!second\n")
        finally:
            program.kill()
            program.wait()
