"""Network namespaces for tests: a process that holds one, opens sockets in it and hands them out."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from support.means import need, need_program

#: What the process in the namespace runs: it sets the network up, then opens the sockets that are asked for.
HOLDER = (
    """
import json, os, socket, subprocess, sys
control = socket.socket(fileno=int(sys.argv[1]))
plan = json.loads(sys.argv[2])
for words in plan["ip"]:
    subprocess.run(["ip", *words.split()], check=True)
for source, target in plan["bind"]:
    subprocess.run(["mount", "--bind", source, target], check=True)
control.send(b"ready")
while True:
    text = control.recv(65536)
    if not text:
        break
    family, kind, address, port = json.loads(text)
    try:
        one = socket.socket(family, kind)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.setsockopt(socket.IPPROTO_IPV6, 78, 1)
        one.bind((address, port))
        if kind == socket.SOCK_STREAM:
            one.listen(4096)
    except OSError as error:
        control.send(str(error).encode())
    else:
        socket.send_fds(control, [b"""
    + '"ok"'
    + """], [one.fileno()])
        one.close()
"""
)


class NetworkNamespace:
    """A network namespace, with a user and a mount namespace around it, until it is closed."""

    def __init__(self, ip: Sequence[str], files: Mapping[str, Path] | None = None) -> None:
        for program in ("unshare", "nsenter", "ip"):
            need_program(program)
        able = subprocess.run(["unshare", "-Urnm", "true"], check=False, capture_output=True).returncode == 0
        need(able, "no user namespaces for unshare")
        self._control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        plan = {"ip": list(ip), "bind": [[str(path), target] for target, path in (files or {}).items()]}
        self._holder = subprocess.Popen(
            ["unshare", "-Urnm", sys.executable, "-I", "-c", HOLDER, str(other.fileno()), json.dumps(plan)],
            pass_fds=[other.fileno()],
        )
        other.close()
        assert self._control.recv(16) == b"ready", "the namespace could not be set up"

    def __enter__(self) -> NetworkNamespace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._control.close()
        self._holder.wait(10)

    def open(self, family: int, kind: int, address: str, port: int) -> socket.socket:
        """Return a bound, and for TCP a listening, socket of the namespace."""
        self._control.send(json.dumps([family, kind, address, port]).encode())
        said, handed, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not handed:
            raise OSError(f"port {port}: {said.decode()}")
        return socket.socket(fileno=handed[0])

    def command(self, *argv: str) -> list[str]:
        """Return the argv that runs a command in the namespace."""
        return [
            "nsenter",
            "-t",
            str(self._holder.pid),
            "-U",
            "-n",
            "-m",
            "--preserve-credentials",
            "--",
            *argv,
        ]

    def run(self, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace."""
        settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, **options}
        return subprocess.run(self.command(*argv), check=False, **settings)

    def namespace(self) -> int:
        """Open the network namespace itself."""
        return os.open(f"/proc/{self._holder.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
