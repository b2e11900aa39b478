"""Takes a process the processor and uses it up itself until it is ended: PID BUSY. Says first what worked."""

import os
import sys

from common import say, tried


def main():
    victim, busy = int(sys.argv[1]), int(sys.argv[2])
    one = min(os.sched_getaffinity(0))
    say(
        {
            "idle": tried(os.sched_setscheduler, victim, os.SCHED_IDLE, os.sched_param(0)),
            "nice": tried(os.setpriority, os.PRIO_PROCESS, victim, 19),
            "nice group": tried(os.setpriority, os.PRIO_PGRP, os.getpgid(victim), 19),
            "nice user": tried(os.setpriority, os.PRIO_USER, os.getuid(), 19) if "all" in sys.argv else "",
            "pinned": tried(os.sched_setaffinity, victim, {one}),
        }
    )
    for _ in range(busy):
        if os.fork() == 0:
            break
    os.sched_setaffinity(0, {one})
    while busy:
        pass


main()
