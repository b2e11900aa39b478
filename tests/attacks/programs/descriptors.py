"""Says which descriptors it was given and of what kind, and where each leads when one goes up from it."""

import os
import stat

from common import say, syscall, tried

SENDMSG = {"x86_64": 46, "aarch64": 211}[os.uname().machine]


def main():
    kinds = {}
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:  # not every sandbox shows it
        names = map(str, range(os.sysconf("SC_OPEN_MAX")))
    for name in names:
        try:
            mode = os.fstat(int(name)).st_mode
        except OSError:
            continue  # the one that listed the directory
        kinds[name] = stat.filemode(mode)[0]
    up = {str(number): tried(os.open, "../../../..", os.O_RDONLY, dir_fd=number) for number in range(3, 64)}
    passing = {str(number): syscall(SENDMSG, number, bytes(56), 0)[1] for number in range(3)}
    say({"kinds": kinds, "up": up, "sendmsg": passing})


main()
