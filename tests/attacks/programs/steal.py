"""Takes a terminal over in every way there is: PATH. Without one, a new terminal of its own is taken."""

import fcntl
import os
import signal
import struct
import sys
import termios

from common import say, tried

TIOCSETD, TIOCCONS, TIOCVHANGUP = 0x5423, 0x541D, 0x5437
SLIP, HDLC, GSM, NULL = 1, 13, 21, 27


def disciplines(terminal):
    """Those of the kernel that lately had holes; the terminal has its own again afterwards."""
    found = {}
    for number in (SLIP, HDLC, GSM, NULL):
        found[number] = tried(fcntl.ioctl, terminal, TIOCSETD, struct.pack("i", number))
    tried(fcntl.ioctl, terminal, TIOCSETD, struct.pack("i", 0))
    return found


def main():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # where hanging up works, it would be told
    if sys.argv[1:]:
        terminal = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)
    else:
        _, terminal = os.openpty()
    say(
        {
            "TIOCSTI": tried(fcntl.ioctl, terminal, termios.TIOCSTI, b"x"),
            "TIOCSETD": disciplines(terminal),
            "TIOCCONS": tried(fcntl.ioctl, terminal, TIOCCONS),
            "TIOCSCTTY": tried(fcntl.ioctl, terminal, termios.TIOCSCTTY, 1),
            "TIOCVHANGUP": tried(fcntl.ioctl, terminal, TIOCVHANGUP),
        }
    )


main()
