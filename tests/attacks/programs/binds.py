"""Tries to listen on [FAMILY, TYPE, ADDRESS, PORT] of a list, with every option that could share an address.

Says for each with which options it could bind, by number in OPTIONS, and listen.
"""

import itertools
import json
import socket
import sys

from common import say

IP, IPV6 = socket.IPPROTO_IP, socket.IPPROTO_IPV6
OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
    (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1),
    (socket.SOL_SOCKET, 25, b"lo\0"),  # SO_BINDTODEVICE
    (IP, 15, 1),  # IP_FREEBIND
    (IP, 19, 1),  # IP_TRANSPARENT
    (IP, 24, 1),  # IP_BIND_ADDRESS_NO_PORT
    (IPV6, socket.IPV6_V6ONLY, 0),
)


def bound(family, kind, address, port, chosen):
    with socket.socket(family, kind) as end:
        for number in chosen:
            try:
                end.setsockopt(*OPTIONS[number])
            except OSError:
                continue
        try:
            end.bind((address, port))
            if kind == socket.SOCK_STREAM:
                end.listen()
        except OSError:
            return False
    return True


def main():
    verdict = {}
    numbers = range(len(OPTIONS))
    choices = [c for count in range(len(OPTIONS) + 1) for c in itertools.combinations(numbers, count)]
    for family, kind, address, port in json.loads(sys.argv[1]):
        worked = [list(chosen) for chosen in choices if bound(family, kind, address, port, chosen)]
        verdict[f"{address} {port} {kind}"] = len(worked)
    say(verdict)


main()
