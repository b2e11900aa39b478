"""Types a command into every terminal it can get at: its own by each way, and new ones, both ends of each."""

import fcntl
import os
import signal
import termios

from common import say, tried

TIOCLINUX = 0x541C
COMMAND = b"echo owned\n"


def typed(terminal):
    keys = [tried(fcntl.ioctl, terminal, termios.TIOCSTI, COMMAND[i : i + 1]) for i in range(len(COMMAND))]
    return sorted({*keys, tried(fcntl.ioctl, terminal, TIOCLINUX, b"\x03")})


def main():
    # The number of its file system tells a terminal from that of the same name elsewhere.
    verdict = {"devices": sorted({os.fstat(number).st_dev for number in range(3)})}
    verdict["descriptors"] = sorted(int(name) for name in os.listdir("/proc/self/fd"))[:-1]
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    verdict["given"] = typed(0)
    verdict["/dev/tty"] = typed(os.open("/dev/tty", os.O_RDWR))
    outer, inner = os.openpty()
    verdict["new"] = typed(inner)
    verdict["new, outer end"] = typed(outer)
    if os.fork() == 0:
        os.setsid()
        fcntl.ioctl(inner, termios.TIOCSCTTY, 0)
        os._exit(typed(inner) != ["EPERM"])
    verdict["new, controlling"] = os.waitstatus_to_exitcode(os.wait()[1])
    say(verdict)


main()
