"""Sends a datagram to each of a list of [HOST, PORT, TEXT, SIZE, SECONDS]: the text, filled up to the size.

Each has a socket of its own, and waits so long for an answer. The verdict has the hosts and ports as keys:
for each answer how long it is and whether it came from the address that was asked, then the name of an error.
"""

import errno
import json
import socket
import sys
import threading

from common import say


def exchange(host, port, text, size, seconds, found):
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as end:
            end.settimeout(seconds)
            end.sendto(text.encode().ljust(size, b"."), place)
            while True:
                answer, source = end.recvfrom(65536)
                found.append([len(answer), source[:2] == place[:2]])
                end.settimeout(0.2)
    except TimeoutError:
        pass
    except socket.gaierror:
        found.append("no such name")
    except OSError as error:
        found.append(errno.errorcode.get(error.errno, str(error)))


def main():
    targets = json.loads(sys.argv[1])
    verdict = {f"{host} {port}": [] for host, port, *_ in targets}
    threads = [
        threading.Thread(target=exchange, args=(*each, verdict[f"{each[0]} {each[1]}"])) for each in targets
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    say(verdict)


main()
