"""Leaves processes in every way that hides them from a parent: HOW... of double, sibling, subreaper, group.

With "stay" it lives on; else it ends as soon as they are there. Each ignores TERM and has the word MARK.
"""

import ctypes
import os
import signal
import sys

from common import syscall

CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
CLONE_PARENT = 0x8000
PR_SET_CHILD_SUBREAPER = 36
mark, *ways = sys.argv[1:]
heard, there = os.pipe()


def live():
    os.write(there, b"1")
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    os.execvp("python3", ["python3", "-c", "import time; time.sleep(60)", mark])


def double():
    """A daemon: an orphan in a session of its own."""
    if not os.fork():
        os.setsid()
        if not os.fork():
            live()
        os._exit(0)


def sibling():
    """A child of the parent's own parent, which is to say another signal than SIGCHLD when it ends."""
    for number in (signal.SIGCHLD, signal.SIGUSR1, 0):
        if not syscall(CLONE, CLONE_PARENT | number, 0, 0, 0, 0)[0]:
            live()


def subreaper():
    """An orphan that another process than the run's own adopts."""
    if not os.fork():
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        double()
        live()


def group():
    """A child that says another signal than SIGCHLD, of a parent that then ends."""
    if not os.fork():
        for number in (signal.SIGUSR1, 0):
            if not syscall(CLONE, number, 0, 0, 0, 0)[0]:
                os.setpgid(0, 0)
                live()
        os._exit(0)


LEFT = {"double": 1, "sibling": 3, "subreaper": 2, "group": 2}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
wanted = [way for way in ways if way in LEFT]
for way in wanted:
    globals()[way]()
for _ in range(sum(LEFT[way] for way in wanted)):
    os.read(heard, 1)
print("up", flush=True)
while "stay" in ways:
    signal.pause()
