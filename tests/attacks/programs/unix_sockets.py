"""Reaches a unix socket and passes a descriptor through it: KIND ADDRESS, with an @ if abstract."""

import array
import os
import socket
import sys

from common import say, tried


def main():
    kind, address = sys.argv[1:]
    if address.startswith("@"):
        address = "\0" + address[1:]
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM if kind == "stream" else socket.SOCK_DGRAM)
    own = array.array("i", [os.open("/etc/passwd", os.O_RDONLY)])
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, own)]
    verdict = {"connect": tried(end.connect, address)}
    if kind == "stream":
        verdict["smuggle"] = tried(end.sendmsg, [b"x"], rights)
    else:
        verdict["smuggle"] = tried(end.sendmsg, [b"x"], rights, 0, address)
    say(verdict)


main()
