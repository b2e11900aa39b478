"""Sends descriptors to itself that nobody receives, until the kernel takes no more. Says why, and stays."""

import errno
import signal
import socket

from common import say


def main():
    pairs = []
    try:
        while True:
            pairs.append(socket.socketpair())
            socket.send_fds(pairs[-1][0], [b"1"], [0] * 253)
    except OSError as error:
        say({"stopped": errno.errorcode[error.errno]})
    signal.pause()


main()
