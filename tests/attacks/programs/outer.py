"""Reaches from its own terminal for the user's: PATH SESSION GROUP, `requests` where walls refuse them."""

import fcntl
import os
import signal
import struct
import sys
import termios

from common import opened, say, tried

REQUESTS = {
    "TIOCSTI": (termios.TIOCSTI, b"x"),
    "TIOCLINUX": (0x541C, b"\x03"),
    "TIOCSETD": (0x5423, struct.pack("i", 27)),
    "TIOCCONS": (0x541D, 0),
    "TIOCSCTTY": (termios.TIOCSCTTY, 1),
    "TIOCVHANGUP": (0x5437, 0),
    "TIOCSIG": (0x40045436, signal.SIGINT),
}


def file_system(path):
    """That of the terminal, if it can be opened: it tells it from one of the same name elsewhere."""
    answer = opened(path, os.O_WRONLY | os.O_NOCTTY)
    return os.stat(path).st_dev if answer == "ok" else answer


def main():
    path, session, group = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    own = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY)
    verdict = {
        "signal the session": tried(os.kill, session, 0),
        "signal the group": tried(os.killpg, group, 0),
        "bring the group to the front": tried(os.tcsetpgrp, own, group),
        "join the group": tried(os.setpgid, 0, group),
        "open the terminal": file_system(path),
    }
    if "requests" in sys.argv:
        verdict |= {name: tried(fcntl.ioctl, own, *request) for name, request in REQUESTS.items()}
    say(verdict)


main()
