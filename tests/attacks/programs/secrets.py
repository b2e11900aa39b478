"""Looks for a text in every environment, command line and memory map that /proc shows: TEXT."""

import json
import os
import sys

from common import say


def main():
    wanted = sys.argv[1].encode()[::-1]  # turned round, so that it is not found in this command line
    places = [("own environment", json.dumps(dict(os.environ)).encode())]
    for name in os.listdir("/proc"):
        for part in ("environ", "cmdline", "maps", "mountinfo", "stat"):
            try:
                with open(f"/proc/{name}/{part}", "rb") as file:
                    places.append((f"/proc/{name}/{part}", file.read()))
            except OSError:
                pass
    say([place for place, content in places if wanted in content])


main()
