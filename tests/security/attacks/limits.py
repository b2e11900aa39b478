"""Uses things up: tasks, files or output; says how far it came before it was stopped: WHAT [MOST]."""

import contextlib
import errno
import os
import signal
import sys
import time

from common import say


def tasks(most):
    children = []
    answer = "ok"
    while len(children) < most:
        try:
            child = os.fork()
        except OSError as error:
            answer = errno.errorcode[error.errno]
            break
        if not child:
            signal.pause()
        children.append(child)
    for child in children:
        os.kill(child, signal.SIGKILL)
    return [len(children), answer]


def files(most):
    opened = []
    while len(opened) < most:
        try:
            opened.append(os.open("/dev/null", os.O_RDONLY))
        except OSError as error:
            return [len(opened), errno.errorcode[error.errno]]
    return [len(opened), "ok"]


def lift(most):
    """Raise its own limit of descriptors."""
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (ValueError, OSError):
        return [resource.getrlimit(resource.RLIMIT_NOFILE)[1], "refused"]
    return [most, "ok"]


def output(_):
    part = b"y" * 65536
    while True:
        os.write(1, part)


def hide(_):
    """Out of every group and session, deaf to every signal that it may be deaf to."""
    for number in range(1, 65):
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in range(3):
                os.close(number)
            time.sleep(60)
    time.sleep(60)


what, most = sys.argv[1], int((sys.argv[2:] or ["0"])[0])
say({"tasks": tasks, "files": files, "lift": lift, "output": output, "hide": hide}[what](most))
