"""Looks for the value of a secret, and for private keys, wherever a program can read.

The value comes in halves, so that it is not in the program's own words; directories after it are searched
instead of everything. The verdict has the places.
"""

import os
import stat
import sys

from common import say

LARGEST = 8 << 20
#: Read-only, and searched whole.
WHOLE = ("/run", "/etc")
#: Not as one word: it would be found in this program's own command line.
KEY = b" ".join((b"PRIVATE", b"KEY-"))


def processes():
    """What /proc says of each process, and the files that it holds open: also those without a name."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        yield from (f"/proc/{pid}/{name}" for name in ("environ", "cmdline", "maps", "net/unix"))
        try:
            yield from (f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd"))
        except OSError:
            continue


def files(places):
    for top in places:
        for directory, inner, names in os.walk(top):
            # A read-only tree in a writable place is an install of the user's.
            inner[:] = [name for name in inner if top in WHOLE or os.access(f"{directory}/{name}", os.W_OK)]
            yield from (os.path.join(directory, name) for name in names)


def main():
    value = (sys.argv[1] + sys.argv[2]).encode()
    found = ["environ"] if value.decode() in os.environ.values() else []
    places = sys.argv[3:] or (*WHOLE, "/tmp", "/dev/shm", os.environ["HOME"], os.getcwd())
    for path in (*(() if sys.argv[3:] else processes()), *files(dict.fromkeys(places))):
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
