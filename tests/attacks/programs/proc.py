"""Opens files of /proc and leaves them alone: MODE PATHS..., or `sysctls` for all of /proc/sys."""

import os
import sys

from common import opened, say

FLAGS = {"read": os.O_RDONLY, "write": os.O_WRONLY}


def sysctls():
    return [os.path.join(top, name) for top, _, names in os.walk("/proc/sys") for name in names]


def main():
    mode, *paths = sys.argv[1:]
    if paths == ["sysctls"]:
        paths = sysctls()
    answers = {path: opened(path, FLAGS[mode] | os.O_NONBLOCK) for path in paths}
    say(answers)


main()
