"""An egress process between two network namespaces: programs run in one, servers in the other.

The resident and the supervisor are played by the test: routes and listeners inside are as the resident makes
them, the resolver is a table. The egress process itself is the real one, in an empty root, with every import
and every opened file an error.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from stockade.egress.records import RawRecord, RecordReader, Totals, create_records
from support.network_namespace import NetworkNamespace

INSIDE = (
    "link set lo up",
    "addr add 198.18.0.2/32 dev lo",
    "-6 addr add fd00:5afe::2/128 dev lo",
    "route add local 0.0.0.0/0 dev lo",
    "-6 route add local ::/0 dev lo",
)
#: Addresses of the internet, on the loopback of the outer namespace.
SERVER, SERVER6, SECOND_SERVER = "93.184.216.34", "2606:2800:220::34", "93.184.216.35"
OUTSIDE = (
    "link set lo up",
    f"addr add {SERVER}/32 dev lo",
    f"addr add {SECOND_SERVER}/32 dev lo",
    f"-6 addr add {SERVER6}/128 dev lo nodad",
    "addr add 10.20.30.40/32 dev lo",
)
#: What the copy of a template does: everything is loaded and frozen, then the copy goes on without files.
START = """
import gc, os, sys
from stockade.egress import process
empty, control, resource = sys.argv[1], int(sys.argv[2]), sys.argv[3]
import resource as limits
limits.setrlimit(limits.RLIMIT_NOFILE, (int(resource), int(resource)))
def forbid(event, arguments):
    if event in ("import", "open", "os.exec", "subprocess.Popen", "ctypes.dlopen", "os.fork"):
        os.write(2, f"forbidden: {event} {arguments[:2]}\\n".encode())
        os._exit(97)
gc.collect(); gc.freeze()
child = os.fork()
if child:
    os.close(control)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
os.write(1, f"{os.getpid()}\\n".encode())
os.chroot(empty); os.chdir("/")
sys.addaudithook(forbid)
process.main(control)
os._exit(0)
"""


class EgressRig:
    """One egress process with its two namespaces, resolver and records."""

    def __init__(self, folder: Path, rules: Sequence[str], ports: Sequence[int], **settings: Any) -> None:
        self._descriptors = settings.pop("descriptors", 8192)
        datagrams = settings.pop("datagrams", ())
        resolv, hosts, switch, empty = (folder / name for name in ("resolv", "hosts", "switch", "empty"))
        resolv.write_text("nameserver 198.18.0.1\noptions timeout:2 attempts:1\n")
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n")
        switch.write_text("hosts: files dns\n")
        empty.mkdir()
        files = {"/etc/resolv.conf": resolv, "/etc/hosts": hosts, "/etc/nsswitch.conf": switch}
        present = {name: path for name, path in files.items() if Path(name).exists()}
        self.inside = NetworkNamespace(INSIDE, present)
        self.outside = NetworkNamespace(OUTSIDE)
        #: What the resolver answers, by name: addresses, or the word of an error.
        self.hosts: dict[str, list[str] | str] = {}
        self.asked: list[str] = []
        self._resolver, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        threading.Thread(target=self._resolve, daemon=True).start()
        self._records = create_records()
        self.nudge = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self.reader = RecordReader(self._records)
        self._closing: list[Callable[[], None]] = []
        tcp, udp = [], []
        for port in (*ports, 53):
            tcp.append(([port, 4], self.inside.open(socket.AF_INET, socket.SOCK_STREAM, "0.0.0.0", port)))
            tcp.append(([port, 6], self.inside.open(socket.AF_INET6, socket.SOCK_STREAM, "::", port)))
        for port in (53, *datagrams):
            udp.append(((port, 4), self.inside.open(socket.AF_INET, socket.SOCK_DGRAM, "0.0.0.0", port)))
            udp.append(((port, 6), self.inside.open(socket.AF_INET6, socket.SOCK_DGRAM, "::", port)))
        self.control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        start = [sys.executable, "-I", "-c", START, str(empty), str(other.fileno()), str(self._descriptors)]
        self.process = subprocess.Popen(
            self.outside.command(*settings.pop("wrapper", ()), *start),
            pass_fds=[other.fileno()],
            stdout=subprocess.PIPE,
        )
        other.close()
        message = {
            "rules": list(rules), "tcp": [one for one, _ in tcp], "udp": [one for one, _ in udp],
            "ipv6": True, **settings,
        }  # fmt: skip
        sockets = [theirs, *(one for _, one in tcp), *(one for _, one in udp)]
        handed = [self._records, self.nudge, *(one.fileno() for one in sockets)]
        socket.send_fds(self.control, [json.dumps(message).encode()], handed)
        for one in sockets:
            one.close()
        assert self.process.stdout is not None
        self.pid = int(self.process.stdout.readline())
        assert json.loads(self.control.recv(4096)) == {"ready": True}

    def __enter__(self) -> EgressRig:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()
        try:
            code = self.process.wait(10)
        finally:
            self.process.kill()
            self.process.wait()
            if self.process.stdout is not None:
                self.process.stdout.close()
            for close in self._closing:
                close()
            self._resolver.close()
            self.inside.__exit__(None, None, None)
            self.outside.__exit__(None, None, None)
            os.close(self._records)
            os.close(self.nudge)
        assert code == 0, "the egress process died"

    def _resolve(self) -> None:
        while True:
            try:
                request = self._resolver.recv(4096)
                if not request:
                    return
                name = request[4:].decode()
                self.asked.append(name)
                found = self.hosts.get(name, "not found")
                answer = {"error": found} if isinstance(found, str) else {"addresses": found}
                self._resolver.send(request[:4] + json.dumps(answer).encode())
            except OSError:
                return

    def end_resolver(self) -> None:
        """Make the resolver end."""
        self._resolver.shutdown(socket.SHUT_RDWR)

    def set_rules(self, rules: Sequence[str], active: Sequence[int]) -> dict[str, Any]:
        """Send new rules and return the answer."""
        self.control.send(json.dumps({"rules": list(rules), "active": list(active)}).encode())
        answer: dict[str, Any] = json.loads(self.control.recv(4096))
        return answer

    def totals(self) -> Totals:
        """Return the counters of the records."""
        return self.reader.totals()

    def records(self, kind: str = "connect") -> list[RawRecord]:
        """Return the records of one kind."""
        return [one for one in self.reader.since(0)[0] if one.kind == kind]

    def ended_records(self, count: int = 1) -> list[RawRecord]:
        """Return the records of connections once so many are there and none is open."""
        deadline = time.monotonic() + 10
        while True:
            found = self.records()
            if (len(found) >= count and not any(one.open for one in found)) or time.monotonic() > deadline:
                return found
            time.sleep(0.02)

    def serve(self, handle: Callable[[socket.socket], None], port: int, address: str = SERVER) -> None:
        """Serve connections in the outer namespace, each in a thread of its own."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = self.outside.open(family, socket.SOCK_STREAM, address, port)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=_guarded, args=(handle, connection), daemon=True).start()

        worker = threading.Thread(target=accept, daemon=True)
        worker.start()

        def close() -> None:
            listener.shutdown(socket.SHUT_RDWR)
            worker.join(5)
            listener.close()

        self._closing.append(close)

    def python(self, text: str, *arguments: str, timeout: float = 60) -> str:
        """Run a Python program inside and return what it printed."""
        done = self.inside.run(sys.executable, "-I", "-c", text, *arguments, timeout=timeout)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


def _guarded(handle: Callable[[socket.socket], None], connection: socket.socket) -> None:
    # Clients that go away are part of many tests.
    with connection, contextlib.suppress(OSError):
        handle(connection)


def private_memory(pid: int) -> int:
    """Return the bytes that a process shares with no other."""
    total = 0
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        for line in lines:
            if line.startswith(("Private_Clean", "Private_Dirty")):
                total += int(line.split()[1]) * 1024
    return total
