"""Makes device nodes in a directory: DIRECTORY. Says which could be made."""

import os
import stat
import sys

from common import say, tried

NODES = {
    "memory": (stat.S_IFCHR, 1, 1),
    "zero": (stat.S_IFCHR, 1, 5),
    "whiteout": (stat.S_IFCHR, 0, 0),
    "loop": (stat.S_IFBLK, 7, 0),
    "disk": (stat.S_IFBLK, 8, 0),
}


def main():
    verdict = {}
    for name, (kind, major, minor) in NODES.items():
        path = os.path.join(sys.argv[1], f"planted-{name}")
        verdict[name] = tried(os.mknod, path, kind | 0o666, os.makedev(major, minor))
        if verdict[name] == "ok":
            os.unlink(path)
    say(verdict)


main()
