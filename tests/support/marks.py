"""Finding the processes that a test started inside, from outside."""

from __future__ import annotations

import os
import time
from pathlib import Path

#: A word for the command line of a process that is to be found again.
MARK = f"stockade-test-mark-{os.getpid()}"

#: A process that only KILL ends, in a session of its own and orphaned; `/tmp/up` says that it is there.
DAEMON = f"setsid setsid sh -c 'trap \"\" TERM HUP INT; echo >/tmp/up; sleep 60; :' {MARK}"
#: A script that starts one and waits until it is there.
HIDES = f"({DAEMON} >/dev/null 2>&1 &); until [ -e /tmp/up ]; do sleep 0.01; done"


def marked() -> list[int]:
    """Processes of this machine with the mark among their arguments, besides this one."""
    found = []
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if MARK.encode() in words and pid != os.getpid():
            found.append(pid)
    return found


def gone(seconds: float = 5) -> bool:
    """Whether none is left, at the latest after a while."""
    end = time.monotonic() + seconds
    while marked() and time.monotonic() < end:
        time.sleep(0.02)
    return not marked()
