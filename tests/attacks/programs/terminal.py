"""Types into its own controlling terminal, with the request in the low half and rubbish in the high half."""

import ctypes
import fcntl
import os
import select
import termios

from common import say, syscall

IOCTL = {"x86_64": 16, "aarch64": 29}[os.uname().machine]
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
HIGH = (0, 1 << 32, 0xFFFFFFFF << 32, 1 << 63)


def main():
    os.setsid() if os.getsid(0) != os.getpid() else None
    _master, slave = os.openpty()
    fcntl.ioctl(slave, termios.TIOCSCTTY, 1)
    mode = termios.tcgetattr(slave)
    mode[3] &= ~termios.ICANON
    termios.tcsetattr(slave, termios.TCSANOW, mode)
    verdict = {}
    for name, request in (("TIOCSTI", TIOCSTI), ("TIOCLINUX", TIOCLINUX)):
        verdict[name] = [syscall(IOCTL, slave, high | request, ctypes.c_char_p(b"\x02x"))[1] for high in HIGH]
    typed = select.select([slave], [], [], 0)[0]
    verdict["typed"] = len(os.read(slave, 16)) if typed else 0
    say(verdict)


main()
