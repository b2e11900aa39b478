"""Takes another process its limits, as they are now or to nothing: PID same|zero. Says which it could."""

import os
import resource
import sys

from common import say

NAMES = ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_STACK", "RLIMIT_DATA", "RLIMIT_FSIZE")


def slow_down(pid):
    now = os.getpriority(os.PRIO_PROCESS, pid)
    try:
        os.setpriority(os.PRIO_PROCESS, pid, 19 if sys.argv[2] == "zero" else now)
        os.sched_setaffinity(pid, os.sched_getaffinity(pid))
    except OSError:
        return "refused"
    return "ok"


def attempt(pid, limit):
    try:
        now = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, now if sys.argv[2] == "same" else (0, 0))
    except OSError:
        return "refused"
    return "ok"


victim = int(sys.argv[1])
say({name: attempt(victim, getattr(resource, name)) for name in NAMES} | {"priority": slow_down(victim)})
