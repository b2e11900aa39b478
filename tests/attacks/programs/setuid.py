"""Starts a set-uid program that will print something, into a full pipe, and looks at it: PROGRAM."""

import fcntl
import os
import sys
import time

from common import say


def status(pid):
    with open(f"/proc/{pid}/status") as file:
        return dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)


def main():
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    size = 65536
    while size:
        try:
            os.write(writer, b"x" * size)
        except BlockingIOError:
            size //= 2
    fcntl.fcntl(writer, fcntl.F_SETFL, 0)
    pid = os.posix_spawn(
        sys.argv[1],
        [sys.argv[1]],
        {},
        file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1), (os.POSIX_SPAWN_DUP2, writer, 2)],
    )
    end = time.monotonic() + 5
    while (seen := status(pid))["State"][0] not in "SZ" and time.monotonic() < end:
        time.sleep(0.01)
    os.close(reader)
    os.close(writer)
    say(
        {"euid": int(seen["Uid"].split()[1]), "effective": int(seen["CapEff"], 16), "state": seen["State"][0]}
    )
    # Its pipe is broken now, and it ends.
    os.waitpid(pid, 0)


main()
