"""Sends prepared bytes over connections: a list of [HOST, PORT, [PIECE in hexadecimal, ...], PAUSE].

All connections at once, each with a pause between its pieces. The verdict is, for each, all that came back
within a moment, in hexadecimal, or the name of the error. What came before an error counts.
"""

import errno
import json
import socket
import sys
import threading
import time

from common import say

SECONDS = 2


def talk(host, port, pieces, pause):
    received = b""
    try:
        with socket.create_connection((host, port), 5) as end:
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for number, piece in enumerate(pieces):
                if number:
                    time.sleep(pause)
                end.sendall(bytes.fromhex(piece))
            end.settimeout(SECONDS)
            while data := end.recv(65536):
                received += data
                if len(received) > 20000:
                    break
                end.settimeout(0.5)
    except socket.gaierror:
        return "no such name"
    except OSError as error:
        if not received:
            return errno.errorcode.get(error.errno, "ETIMEDOUT")
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
