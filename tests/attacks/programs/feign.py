"""Tells a process to end in every way there is, also when no more signals can be pending: PID [alone].

A signal whose sender the kernel had no room to note looks as if it came from nowhere. With "alone" the
pending signals are left as they are, which is enough to see whether the ways work.
"""

import ctypes
import os
import signal
import sys

from common import say, syscall

NUMBERS = {
    "x86_64": {"kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297},
    "aarch64": {"kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240},
}[os.uname().machine]
PIDFD_SEND_SIGNAL, PIDFD_OPEN = 424, 434
SI_USER, SI_KERNEL, SI_QUEUE = 0, 128, -1
FILLING = 40


def described(code, pid=0):
    """A siginfo that says what it likes about its sender."""
    words = (ctypes.c_int * 32)(signal.SIGTERM, 0, code, 0, pid, os.getuid())
    return ctypes.byref(words)


def ways(victim):
    end = signal.SIGTERM
    pidfd = syscall(PIDFD_OPEN, victim, 0)[0]
    yield "kill", (NUMBERS["kill"], victim, end)
    yield "tkill", (NUMBERS["tkill"], victim, end)
    yield "tgkill", (NUMBERS["tgkill"], victim, victim, end)
    for code in (SI_USER, SI_KERNEL, *range(-6, 0)):
        info = described(code)
        yield f"rt_sigqueueinfo {code}", (NUMBERS["rt_sigqueueinfo"], victim, end, info)
        yield f"rt_tgsigqueueinfo {code}", (NUMBERS["rt_tgsigqueueinfo"], victim, victim, end, info)
        yield f"pidfd_send_signal {code}", (PIDFD_SEND_SIGNAL, pidfd, end, info, 0)
    yield "pidfd_send_signal", (PIDFD_SEND_SIGNAL, pidfd, end, None, 0)


def fill():
    signal.pthread_sigmask(signal.SIG_BLOCK, [FILLING])
    count = 0
    while syscall(NUMBERS["rt_sigqueueinfo"], os.getpid(), FILLING, described(SI_QUEUE))[1] == "ok":
        count += 1
    return count


victim = int(sys.argv[1])
signal.signal(signal.SIGTERM, signal.SIG_IGN)
verdict = {"first": {name: syscall(*call)[1] for name, call in ways(victim)}}
if "alone" not in sys.argv:
    verdict["filled"] = fill()
    verdict["then"] = {name: syscall(*call)[1] for name, call in ways(victim)}
say(verdict)
