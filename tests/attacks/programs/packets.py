"""Sends to addresses: NAME=FAMILY,TYPE,ADDRESS,PORT... Says how the kernel answered."""

import socket
import sys

from common import say, tried


def send(family, kind, address, port):
    with socket.socket(int(family), int(kind)) as end:
        end.settimeout(1)
        if int(kind) == socket.SOCK_STREAM:
            end.connect((address, int(port)))
        else:
            end.sendto(b"a secret", (address, int(port)))


def attempt(words):
    try:
        return tried(send, *words.split(","))
    except KeyError:  # an error without a number
        return "ETIMEDOUT"


say({words: attempt(words) for words in sys.argv[1:]})
