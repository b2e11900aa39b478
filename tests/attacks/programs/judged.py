"""Sends prepared bytes over TLS or plain TCP: a list of [HOST, PORT, PROTOCOL, [PIECE, ...], PAUSE].

A piece is bytes in hexadecimal, and after a * how often they are sent. PROTOCOL is "" for no TLS, else what
the client offers. All connections at once, each with a pause between its pieces. The verdict is, for each,
all that came back within a moment, in hexadecimal, or the name of the error.
"""

import contextlib
import json
import socket
import ssl
import sys
import threading
import time

from common import say

SECONDS, MOST = 3, 200000


def talk(host, port, protocol, pieces, pause):
    received = b""
    try:
        with contextlib.ExitStack() as stack:
            end = stack.enter_context(socket.create_connection((host, port), 5))
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if protocol:
                context = ssl.create_default_context()
                context.set_alpn_protocols([protocol])
                end = stack.enter_context(context.wrap_socket(end, server_hostname=host))
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(pause)
                content, _, times = piece.partition("*")
                end.sendall(bytes.fromhex(content) * int(times or 1))
            end.settimeout(SECONDS)
            while len(received) < MOST and (data := end.recv(65536)):
                received += data
                end.settimeout(0.7)
    except (OSError, ssl.SSLError) as error:
        if not received:
            return type(error).__name__
    return received.hex()


def main():
    asked = json.loads(sys.argv[1])
    verdicts = [None] * len(asked)

    def one(number, *each):
        verdicts[number] = talk(*each)

    threads = [threading.Thread(target=one, args=(number, *each)) for number, each in enumerate(asked)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(verdicts)


main()
