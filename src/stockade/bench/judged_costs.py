"""Measure what rules for requests cost: the terminating code of the egress process, beside mitmproxy.

A server on the host's loopback answers over TLS with 100 KB. The same client asks it directly, through our
code, and through mitmproxy as a reverse proxy, in turn. Our code runs as a process of its own, without the
walls of an egress process, which do not touch the bytes. mitmproxy is looked for in PATH, or where
STOCKADE_MITMDUMP says.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from stockade.bench.measure import Figure, Section, interleaved, ratio, timing

HOST = "localhost.test"
SIZE = 100_000
ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % SIZE + bytes(SIZE)
OURS, RIVAL, DIRECT = "rules for requests", "mitmproxy", "direct"
#: Requests of one connection in a turn.
EACH = 50
_START_SECONDS = 30.0


def measure(place: Path, rounds: int) -> Section:
    """Compare the three, and time the making of an authority with its first certificate."""
    from stockade.egress.termination.authority import CertificateAuthority

    made = []
    for _ in range(20):
        began = time.perf_counter()
        CertificateAuthority().certificate_for(HOST)
        made.append((time.perf_counter() - began) * 1000)
    with _processes(place) as ports:
        turns = {name: _turn(port, ports[DIRECT]) for name, port in ports.items()}
        interleaved(turns, 2)
        times = interleaved(turns, rounds)
    first, later = ({name: [one[at] for one in taken] for name, taken in times.items()} for at in (0, 1))
    figures = [
        Figure("judged/added first", timing(first[OURS]).median - timing(first[DIRECT]).median),
        Figure("judged/added later", timing(later[OURS]).median - timing(later[DIRECT]).median),
        Figure("judged/authority", timing(made).median),
    ]
    if RIVAL in times:
        # By time, so the smaller is the faster.
        figures.insert(0, Figure("judged/throughput", 1 / ratio(later[OURS], later[RIVAL])))
    timings = {f"{name}, first request": timing(taken) for name, taken in first.items()}
    timings |= {f"{name}, later requests": timing(taken) for name, taken in later.items()}
    ran = {RIVAL: shlex.join(_mitmproxy(place, ports))} if RIVAL in ports else {}
    return Section(tuple(figures), timings, ran=ran)


def rival() -> str:
    """Return the path of mitmproxy's command; empty if it is not installed."""
    return os.environ.get("STOCKADE_MITMDUMP") or shutil.which("mitmdump") or ""


def _turn(port: int, named: int) -> Callable[[], tuple[float, float]]:
    """Return what times the first request of a connection, and the mean of later ones, in milliseconds."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = f"GET /x HTTP/1.1\r\nHost: {HOST}:{named}\r\n\r\n".encode()

    def once() -> tuple[float, float]:
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", port)) as plain:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with context.wrap_socket(plain, server_hostname=HOST) as end:
                _ask(end, request)
                first = time.perf_counter()
                for _ in range(EACH):
                    _ask(end, request)
                return (first - began) * 1000, (time.perf_counter() - first) * 1000 / EACH

    return once


def _ask(end: ssl.SSLSocket, request: bytes) -> None:
    end.sendall(request)
    head = b""
    while b"\r\n\r\n" not in head:
        head += _received(end)
    if b" 200 " not in head[:20]:
        raise RuntimeError(f"the answer was {head[:100]!r}")
    left = SIZE - len(head.partition(b"\r\n\r\n")[2])
    while left:
        left -= len(_received(end))


def _received(end: ssl.SSLSocket) -> bytes:
    data = end.recv(65536)
    if not data:
        raise RuntimeError("the connection ended in a response")
    return data


@contextlib.contextmanager
def _processes(place: Path) -> Iterator[dict[str, int]]:
    """Start the server and what lies before it, and yield their ports."""
    from cryptography.hazmat.primitives import serialization

    from stockade.egress.termination.authority import CertificateAuthority

    authority = CertificateAuthority()
    (place / "roots.pem").write_text(authority.pem)
    found = authority.certificate_for(HOST)
    key = found.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (place / "server.pem").touch(0o600)
    (place / "server.pem").write_bytes(key + found.certificate.public_bytes(serialization.Encoding.PEM))
    ports = dict(zip((DIRECT, OURS, RIVAL), _free_ports(3), strict=True))
    own = [sys.executable, "-m", "stockade.bench.judged_costs"]
    commands = [
        [*own, "server", str(ports[DIRECT]), str(place)],
        [*own, "judge", str(ports[OURS]), str(place), str(ports[DIRECT])],
    ]
    if rival():
        commands.append(_mitmproxy(place, ports))
    else:
        del ports[RIVAL]
    processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]
    try:
        for port in ports.values():
            _await_port(port)
        yield ports
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def _mitmproxy(place: Path, ports: Mapping[str, int]) -> list[str]:
    """Return mitmproxy's command line: a reverse proxy before the server."""
    behind = ["--mode", f"reverse:https://127.0.0.1:{ports[DIRECT]}", "--set", "ssl_insecure=true"]
    settings = ["--set", "keep_host_header=true", "--set", f"confdir={place}/mitmproxy"]
    return [rival(), "-q", "-p", str(ports[RIVAL]), *behind, *settings]


def _free_ports(count: int) -> list[int]:
    ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [end.getsockname()[1] for end in ends]
    for end in ends:
        end.close()
    return ports


def _await_port(port: int) -> None:
    late = time.monotonic() + _START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except OSError:
            if time.monotonic() > late:
                raise
            time.sleep(0.05)


class _Answers(asyncio.Protocol):
    """Answers every request with the same bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        while b"\r\n\r\n" in self._data:
            self._data = self._data.partition(b"\r\n\r\n")[2]
            self._transport.write(ANSWER)  # type: ignore[attr-defined]


async def _serve(port: int, place: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(f"{place}/server.pem")
    loop = asyncio.get_running_loop()
    await (await loop.create_server(_Answers, "127.0.0.1", port, ssl=context)).serve_forever()


async def _judge(port: int, place: str, server: int) -> None:
    """Run the terminating code of an egress process before the server."""
    from stockade.egress.active_rules import ActiveRules
    from stockade.egress.dialer import DialError
    from stockade.egress.records import RecordWriter, create_records
    from stockade.egress.termination.connection import TerminatedConnection
    from stockade.egress.termination.http_termination import HttpTermination, TerminatedPlace
    from stockade.policy.net_rules import parse_rule

    loop, writer = asyncio.get_running_loop(), RecordWriter(create_records())
    rules = ActiveRules([parse_rule(f"GET https://{HOST}:{server}/**")], [0])
    shared = HttpTermination(loop, writer, lambda: rules, Path(place, "roots.pem").read_bytes())
    listener = socket.create_server(("127.0.0.1", port))
    listener.setblocking(False)

    async def dial() -> socket.socket:
        outside = socket.socket()
        outside.setblocking(False)
        outside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(outside, ("127.0.0.1", server))
        return outside

    async def serve(inside: socket.socket) -> None:
        try:
            protocols = await shared.hello(inside, HOST)
        except DialError:  # only to see whether something listens
            inside.close()
            return
        inside.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        record = writer.connection(HOST, "127.0.0.1", server, 0)
        where = TerminatedPlace("https", HOST, server)
        ends = TerminatedConnection(loop, inside, await dial(), record, dial=dial)
        await ends.run(partial(shared.serve, where, protocols, 20.0))

    tasks = set()
    while True:
        inside, _ = await loop.sock_accept(listener)
        tasks.add(task := loop.create_task(serve(inside)))
        task.add_done_callback(tasks.discard)


if __name__ == "__main__":
    role, number, where, *more = sys.argv[1:]
    asyncio.run(_serve(int(number), where) if role == "server" else _judge(int(number), where, int(more[0])))
