"""Fills the buffers of connections that nobody reads from: HOW MANY. Says how many bytes they took."""

import contextlib
import socket
import sys

from common import say


def main():
    held, got = [], 0
    for _ in range(int(sys.argv[1])):
        with socket.create_server(("127.0.0.1", 0)) as server:
            held += [socket.create_connection(server.getsockname()), server.accept()[0]]
        for end in held[-2:]:
            end.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    got += end.send(bytes(1 << 16))
    say({"got": got})


main()
