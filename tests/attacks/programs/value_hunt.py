"""Looks for the value of a secret, and for private keys, wherever a program can read.

The value comes in halves, so that it is not in the program's own words. The verdict has the places.
"""

import os
import stat
import sys

from common import say

LARGEST = 8 << 20
#: Not as one word: it would be found in this program's own command line.
KEY = b" ".join((b"PRIVATE", b"KEY-"))


def files():
    yield from (
        f"/proc/{pid}/{name}"
        for pid in os.listdir("/proc")
        if pid.isdigit()
        for name in ("environ", "cmdline", "maps")
    )
    for top in ("/run", "/etc", "/tmp", "/dev/shm", os.environ.get("HOME", "/tmp")):
        for directory, _, names in os.walk(top):
            yield from (os.path.join(directory, name) for name in names)


def main():
    value = (sys.argv[1] + sys.argv[2]).encode()
    found = ["environ"] if value.decode() in os.environ.values() else []
    for path in files():
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):
                continue  # a FIFO would wait for a writer
            with open(path, "rb") as file:
                content = file.read(LARGEST)
        except OSError:
            continue
        if value in content or KEY in content:
            found.append(path)
    say(found)


main()
