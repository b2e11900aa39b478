"""The bench's server and its clients. The bench passes this file to a bare Python as text.

With the word `serve` it is the server: it prints the port of 127.0.0.1 that it listens on, and serves until
its standard input ends. A client begins with one byte: `e` gets it back, `d` and a size download that many
bytes, `u` and a size upload them and get one byte as the receipt.

With an address and a port it is a client. For each line on standard input, a job and a number, it does the
job and prints a number of its own: `connect` the median seconds of so many connections, each with one byte to
the server and back; `download` and `upload` the seconds for so many bytes; `hold` how many of so many
connections, all open at the same time, still answered at the end.
"""

from __future__ import annotations

import resource
import selectors
import socket
import struct
import sys
import time
from typing import Any

SIZE = struct.Struct(">Q")
CHUNK = 256 * 1024
BACKLOG = 4096
#: In which one connection must be made and answer.
PATIENCE = 30.0


def serve() -> None:
    """Serve on a port of its own until standard input ends."""
    raise_limit()
    with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as server:
        print(server.getsockname()[1], flush=True)
        waiting = selectors.DefaultSelector()
        waiting.register(server, selectors.EVENT_READ)
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj is sys.stdin:
                    return
                if key.fileobj is server:
                    client, _ = server.accept()
                    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    waiting.register(client, selectors.EVENT_READ)
                    continue
                one: Any = key.fileobj
                if not answer(one):
                    waiting.unregister(one)
                    one.close()


def answer(client: socket.socket) -> bool:
    """Do one thing that a client asks for; return whether it may ask for more."""
    try:
        word = client.recv(1)
        if word == b"e":
            client.sendall(word)
        elif word == b"d":
            download(client, *SIZE.unpack(client.recv(SIZE.size, socket.MSG_WAITALL)))
        elif word == b"u":
            receive(client, *SIZE.unpack(client.recv(SIZE.size, socket.MSG_WAITALL)))
            client.sendall(word)
        return bool(word)
    except OSError:
        return False


def download(client: socket.socket, size: int) -> None:
    """Send that many bytes."""
    chunk = bytes(CHUNK)
    while size:
        amount = min(size, CHUNK)
        client.sendall(chunk[:amount] if amount < CHUNK else chunk)
        size -= amount


def receive(source: socket.socket, size: int) -> None:
    """Receive that many bytes."""
    chunk = memoryview(bytearray(CHUNK))
    while size:
        amount = source.recv_into(chunk, min(size, CHUNK))
        if not amount:
            raise ConnectionError("the other side ended the connection")
        size -= amount


def connected(place: tuple[str, int]) -> socket.socket:
    """Connect to the server."""
    found = socket.create_connection(place, PATIENCE)
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def exchange(one: socket.socket) -> bool:
    """Send one byte and wait until it is back."""
    try:
        one.sendall(b"e")
        return one.recv(1) == b"e"
    except OSError:
        return False


def connect(place: tuple[str, int], count: int) -> float:
    """Return the median time of a connection and one exchange."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        with connected(place) as one:
            if not exchange(one):
                raise ConnectionError("the server did not answer")
            times.append(time.perf_counter() - began)
    return sorted(times)[count // 2]


def stream(place: tuple[str, int], way: str, size: int) -> float:
    """Return how long it takes to move that many bytes, the connection not counted."""
    with connected(place) as one:
        exchange(one)
        began = time.perf_counter()
        one.sendall(way[:1].encode() + SIZE.pack(size))
        if way == "upload":
            download(one, size)
            size = 1
        receive(one, size)
        return time.perf_counter() - began


def hold(place: tuple[str, int], count: int) -> int:
    """Open that many connections, and return how many of them answer once all are open."""
    raise_limit()
    held = []
    try:
        for _ in range(count):
            try:
                held.append(connected(place))
            except OSError:
                break
        return sum(exchange(one) for one in held)
    finally:
        for one in held:
            one.close()


def raise_limit() -> None:
    """Have as many descriptors as are allowed."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Do one job for each line of standard input."""
    place = sys.argv[1], int(sys.argv[2])
    for line in sys.stdin:
        job, number = line.split()
        if job == "connect":
            print(connect(place, int(number)), flush=True)
        elif job == "hold":
            print(hold(place, int(number)), flush=True)
        else:
            print(stream(place, job, int(number)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    elif len(sys.argv) == 3:
        main()
