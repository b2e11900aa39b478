"""Leaves orphans behind, as many as it is told, and says how many nobody has buried: COUNT SECONDS."""

import os
import sys
import time

from common import say


def orphans(parent):
    """The states of those of this process group that the parent has and should bury."""
    states = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            continue
        ours = fields[1] == parent and int(fields[2]) == os.getpgrp() and int(name) != os.getpid()
        if ours:
            states.append(fields[0])
    return states


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
    # The last of them may not have come to its exit yet, and only who is dead can be buried.
    while set(orphans(reaper)) - {"Z"}:
        time.sleep(0.001)
    end = time.monotonic() + seconds
    while (left := len(orphans(reaper))) and time.monotonic() < end:
        time.sleep(0.01)
    say({"made": made, "unburied": left})


main()
