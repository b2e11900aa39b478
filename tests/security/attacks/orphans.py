"""Leaves orphans behind, as many as it is told, and says how many nobody has buried: COUNT SECONDS."""

import os
import sys
import time

from common import say


def dead(parent):
    found = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        found += fields[0] == "Z" and fields[1] == parent
    return found


def orphan():
    """True if there was room for it."""
    try:
        child = os.fork()
    except BlockingIOError:
        return False
    if not child:
        try:
            os.fork()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return True


def main():
    count, seconds = int(sys.argv[1]), float(sys.argv[2])
    made = refused = 0
    while made < count and refused < 10_000:
        if orphan():
            made += 1
        else:
            refused += 1
            time.sleep(0.001)
    reaper = sys.argv[3] if len(sys.argv) > 3 else "1"
    end = time.monotonic() + seconds
    while (left := dead(reaper)) and time.monotonic() < end:
        time.sleep(0.01)
    say({"made": made, "unburied": left})


main()
