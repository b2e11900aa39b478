"""One run leaves all that it can (`leave WORD`), another says what it meets (`look WORD`)."""

import fcntl
import os
import resource
import signal
import socket
import sys
import time

from common import say, syscall, tried

NUMBERS = {
    "x86_64": {
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "mq_open": 240,
        "ioprio_set": 251,
        "ioprio_get": 252,
    },
    "aarch64": {
        "shmget": 194,
        "semget": 190,
        "msgget": 186,
        "mq_open": 180,
        "ioprio_set": 30,
        "ioprio_get": 31,
    },
}[os.uname().machine]
KEY = 0x5743
PLACES = ("/tmp", "/dev/shm", os.environ["HOME"])
FILES = ("timerslack_ns", "oom_score_adj", "coredump_filter", "comm")


def call(name, *words):
    return syscall(NUMBERS[name], *words)[1]


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def spoil(pid):
    """Change what a process hands on to those that it starts."""
    tried(os.setpriority, os.PRIO_PROCESS, pid, 19)
    tried(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0))
    tried(os.sched_setaffinity, pid, {min(os.sched_getaffinity(0))})
    call("ioprio_set", 1, pid, 3 << 13)
    for number in (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_STACK):
        tried(resource.prlimit, pid, number, (4096, 4096))
    for name, text in zip(FILES, ("9000000", "1000", "0", "spoilt"), strict=True):
        tried(write, f"/proc/{pid}/{name}", text)


def hold(word):
    """What only a process that lives can hold."""
    os.setsid()
    for number in set(range(1, 65)) - {signal.SIGKILL, signal.SIGSTOP, 32, 33}:
        signal.signal(number, signal.SIG_IGN)
    end = socket.socket(socket.AF_UNIX) if tried(socket.socket, socket.AF_UNIX) == "ok" else None
    if end is not None and tried(end.bind, f"\0{word}") == "ok":
        end.listen(1)
    file = os.open("/etc/passwd", os.O_RDONLY)
    tried(fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    kept = [os.memfd_create("left"), file, end]
    if tried(os.openpty) == "ok":
        kept.append(os.openpty())
    return kept


def leave(word):
    spoilt = [1, os.getppid(), os.getpgrp()] if "spoil" in sys.argv else []
    for pid in spoilt:
        spoil(pid)
    if spoilt:
        tried(os.setpriority, os.PRIO_USER, os.getuid(), 19)
    os.environ["LEFT"] = word
    orphans = []
    for turn in range(3):
        ready, tell = os.pipe()
        orphan = os.fork()
        if orphan == 0:
            kept = hold(word)
            os.close(ready)
            devnull = os.open("/dev/null", os.O_RDWR)
            for number in range(3):
                os.dup2(devnull, number)
            os.write(tell, b".")
            if turn == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(60 if kept else 0)
            os._exit(0)
        os.close(tell)
        os.read(ready, 1)
        orphans.append(orphan)
    made = {
        "shared memory": call("shmget", KEY, 4096, 0o1600),
        "semaphores": call("semget", KEY, 1, 0o1600),
        "messages": call("msgget", KEY, 0o1600),
        "queue": call("mq_open", word.encode(), os.O_CREAT | os.O_RDWR, 0o600, None),
        **{place: tried(os.mkdir, f"{place}/{word}") for place in PLACES},
    }
    os.umask(0o777)
    say({"orphans": orphans, "made": made})


def connected(word):
    with socket.socket(socket.AF_UNIX) as end:
        end.connect(f"\0{word}")


def locked():
    with open("/etc/passwd") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def listed(path):
    return sorted(os.listdir(path)) if tried(os.listdir, path) == "ok" else []


def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return error.strerror


def look(word):
    around = {"gate": 1, "keeper": os.getppid(), "itself": os.getpid()}
    handed_on = {
        name: [
            tried(os.getpriority, os.PRIO_PROCESS, pid) == "ok" and os.getpriority(os.PRIO_PROCESS, pid),
            tried(os.sched_getscheduler, pid) == "ok" and os.sched_getscheduler(pid),
            tried(os.sched_getaffinity, pid) == "ok" and sorted(os.sched_getaffinity(pid)),
            syscall(NUMBERS["ioprio_get"], 1, pid)[0],
            *(read(f"/proc/{pid}/{file}") for file in FILES),
        ]
        for name, pid in around.items()
    }
    mask = os.umask(0)
    kept = ("Sig", "Cap", "Seccomp", "NoNewPrivs", "Cpus_allowed", "Groups", "Uid")
    say(
        {
            "handed on": handed_on,
            "limits": [resource.getrlimit(number) for number in range(16)],
            "state": [line for line in read("/proc/self/status").splitlines() if line.startswith(kept)],
            "umask": mask,
            "environment": sorted(os.environ),
            "directory": os.getcwd(),
            "descriptors": listed("/proc/self/fd"),
            "processes": sum(name.isdigit() for name in listed("/proc")),
            "terminals": listed("/dev/pts"),
            "session": os.getsid(0) == os.getpid(),
            "abstract": tried(connected, word),
            "lock": tried(locked),
            # Stated: the private directories and what the ipc namespace has are shared.
            "stated": {
                "shared memory": call("shmget", KEY, 0, 0),
                "semaphores": call("semget", KEY, 0, 0),
                "messages": call("msgget", KEY, 0),
                "queue": call("mq_open", word.encode(), os.O_RDWR, 0, None),
                **{place: [name for name in listed(place) if name == word] for place in PLACES},
            },
        }
    )


if __name__ == "__main__":
    {"leave": leave, "look": look}[sys.argv[1]](sys.argv[2])
