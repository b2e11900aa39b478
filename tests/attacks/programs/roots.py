"""Looks for a file through the magic links of every process: PATH."""

import os
import sys

from common import opened, say


def main():
    verdict = {}
    for name in [name for name in os.listdir("/proc") if name.isdigit()] + ["self", "thread-self"]:
        for link in ("root", "cwd"):
            path = f"/proc/{name}/{link}"
            up = path + sys.argv[1] if link == "root" else path + "/.." * 20 + sys.argv[1]
            verdict[path] = [opened(path, os.O_PATH | os.O_DIRECTORY), opened(up)]
    say(verdict)


main()
