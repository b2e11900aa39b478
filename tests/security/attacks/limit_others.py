"""Takes another process its limits, as they are now or to nothing: PID same|zero. Says which it could."""

import resource
import sys

from common import say

NAMES = ("RLIMIT_NOFILE", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_STACK", "RLIMIT_DATA", "RLIMIT_FSIZE")


def attempt(pid, limit):
    try:
        now = resource.prlimit(pid, limit)
        resource.prlimit(pid, limit, now if sys.argv[2] == "same" else (0, 0))
    except OSError:
        return "refused"
    return "ok"


say({name: attempt(int(sys.argv[1]), getattr(resource, name)) for name in NAMES})
