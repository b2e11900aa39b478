"""Uses up tasks, files, terminals or output; says how far it came before it was stopped: WHAT [MOST]."""

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


def terminals(most):
    opened = []
    while len(opened) < most:
        try:
            opened.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
        except OSError as error:
            return [len(opened), errno.errorcode[error.errno]]
    return [len(opened), "ok"]


def disk(most):
    """Fills the private memory, by content in every place and then by names alone."""
    filled, answer = 0, "ok"
    places = ("/tmp", "/dev/shm", os.environ.get("HOME", "/tmp"))
    for place in places:
        try:
            with open(f"{place}/full-{os.getpid()}", "wb", buffering=0) as file:
                while filled < most:
                    filled += file.write(bytes(1 << 20))
        except OSError as error:
            answer = errno.errorcode[error.errno]
    for place in places:
        with contextlib.suppress(OSError):
            os.unlink(f"{place}/full-{os.getpid()}")
    return [filled, answer]


def inodes(most):
    directory = f"/tmp/many-{os.getpid()}"
    os.mkdir(directory)
    answer = "ok"
    for count in range(most):
        try:
            os.mknod(f"{directory}/{count}")
        except OSError as error:
            answer = errno.errorcode[error.errno]
            break
    made = os.listdir(directory)
    for name in made:
        os.unlink(f"{directory}/{name}")
    os.rmdir(directory)
    return [len(made), answer]


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
ways = {
    "tasks": tasks, "files": files, "terminals": terminals, "disk": disk, "inodes": inodes, "lift": lift,
    "output": output,
    "hide": hide,
}  # fmt: skip
say(ways[what](most))
