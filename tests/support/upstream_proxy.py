"""A proxy of the host, for tests: HTTP CONNECT and SOCKS5 on one port, and a line for each request.

    python -m support.upstream_proxy PORT [refuse]

It prints "listening", then one line of JSON for each request: what it was asked for, and with which password.
"""

from __future__ import annotations

import base64
import json
import socket
import socketserver
import sys
import threading
from typing import Any


class Handler(socketserver.BaseRequestHandler):
    """Serves one client."""

    def handle(self) -> None:
        self._stream = self.request.makefile("rb", buffering=0)
        first = self._stream.read(1)
        if first == b"\x05":
            place, secret = self._socks()
            good, bad = b"\x05\0\0\x01" + bytes(6), b"\x05\x02\0\x01" + bytes(6)
        else:
            place, secret = self._http(first)
            good, bad = b"HTTP/1.1 200 OK\r\nVia: a test\r\n\r\n", b"HTTP/1.1 403 Forbidden\r\n\r\n"
        print(json.dumps({"place": place, "secret": secret}), flush=True)
        if "refuse" in sys.argv:
            self.request.sendall(bad)
            return
        host, _, port = place.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port))) as server:
            self.request.sendall(good)
            other = threading.Thread(target=_copy, args=(server, self.request))
            other.start()
            _copy(self.request, server)
            other.join()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            data += self._stream.read(size - len(data))
        return data

    def _http(self, head: bytes) -> tuple[str, str]:
        while not head.endswith(b"\r\n\r\n"):
            head += self._read(1)
        lines = head.decode().split("\r\n")
        given = [
            line.split(" ")[-1] for line in lines if line.lower().startswith("proxy-authorization: basic")
        ]
        return lines[0].split(" ")[1], base64.b64decode(given[0]).decode() if given else ""

    def _socks(self) -> tuple[str, str]:
        methods, secret = self._read(self._read(1)[0]), ""
        self.request.sendall(bytes((5, methods[0])))
        if methods[0] == 2:
            self._read(1)
            secret = self._read(self._read(1)[0]).decode() + ":" + self._read(self._read(1)[0]).decode()
            self.request.sendall(b"\x01\0")
        self._read(4)
        host = self._read(self._read(1)[0]).decode()
        return f"{host}:{int.from_bytes(self._read(2), 'big')}", secret


def _copy(source: Any, target: Any) -> None:
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


class Server(socketserver.ThreadingTCPServer):
    """One thread for each client."""

    allow_reuse_address = daemon_threads = True


if __name__ == "__main__":
    with Server(("127.0.0.1", int(sys.argv[1])), Handler) as proxy:
        print('"listening"', flush=True)
        proxy.serve_forever()
