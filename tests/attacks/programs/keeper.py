"""Does something to every process that it did not start itself: SIGNAL. Says whom it reached."""

import contextlib
import os
import sys

from common import say

reached = []
for pid in sorted(map(int, filter(str.isdigit, os.listdir("/proc")))):
    if pid in (os.getpid(), 1):
        continue
    with contextlib.suppress(OSError):
        os.kill(pid, int(sys.argv[1]))
        reached.append(pid)
say(reached)
