"""`confine`: what a process had before the walls (files, directories, a peer) leads no further."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from attacks.sandbox.test_confine import DENIED, python

#: What a process had before the walls: a directory to stand in, files that are open, mappings, a peer.
BESIDE = """
import array, resource, select, signal, termios, tty

libc = ctypes.CDLL(None, use_errno=True)
#: The numbers of each call, on x86_64 and on aarch64.
CALLS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "ioprio_set": (251, 30),
    "move_pages": (279, 239), "get_robust_list": (274, 100), "shmget": (29, 194),
    "io_uring": (425, 425), "chroot": (161, 51), "pidfd_send_signal": (424, 424),
    "tgkill": (234, 131), "inotify_add_watch": (254, 27), "inotify_init1": (294, 26),
}
page = ctypes.create_string_buffer(4096)

def call(name, *words):
    passed = [ctypes.c_long(word) if isinstance(word, int) else word for word in words]
    done = libc.syscall(ctypes.c_long(CALLS[name][os.uname().machine == "aarch64"]), *passed)
    if done < 0:
        raise OSError(ctypes.get_errno(), name)
    return done

def opened(path, flags, where=None):
    os.close(os.open(path, flags, dir_fd=where))

def written(path, text):
    with open(path, "w") as file:
        file.write(text)

def sent_to(pid, how):
    # The kernel is asked to tell another process that something can be read.
    ours, theirs = os.pipe()
    fcntl.fcntl(ours, fcntl.F_SETSIG, signal.SIGUSR1)
    how(ours, pid)
    fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
    os.write(theirs, b"x")
    os.close(ours)
    os.close(theirs)

pid, secret, hidden = given["pid"], given["secret"], os.path.dirname(given["secret"])
os.chdir(hidden)
file = os.open("secret", os.O_RDONLY)
directory = os.open(".", os.O_PATH)
own = os.open(given["granted"], os.O_RDONLY)
peer = socket.socket(fileno=given["peer"])
private = mmap.mmap(file, 0, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE)
kept = [file, directory, own, given["peer"]]
kept += [number for number in map(int, os.listdir("/proc/self/fd")) if number > 2 and number not in kept]
ours = []
if given["confined"]:
    kept = [number for number in kept if tried(os.fstat, number) == "ok"]
    done = stockade.confine(Policy(read=[given["granted"]], accept=ACCEPT), keep=kept)
    ours = [one.number for one in done.descriptors if one.leads_to.endswith("/fd")]
else:
    ours = [os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)]
(descriptors,) = ours
# It is what the kernel calls the end of a pipe that nobody kept here.
reader, writer = os.pipe()
os.close(writer)
say({
    "the name beside where it stands": tried(opened, "secret", os.O_RDONLY),
    "list where it stands": tried(os.listdir, "."),
    "above where it stands": tried(opened, "../granted/../hidden/secret", os.O_RDONLY),
    "by a directory": tried(opened, "secret", os.O_RDONLY, directory),
    "make by a directory": tried(lambda: os.mkdir("new", dir_fd=directory)),
    "above what is granted": tried(opened, "../hidden/secret", os.O_RDONLY, own),
    "write to what was opened to read": tried(os.write, file, b"x"),
    "open it again to write": tried(opened, str(file), os.O_WRONLY, descriptors),
    "change its mode": tried(os.fchmod, file, 0o777),
    "change its time": tried(os.utime, file, (0, 0)),
    "cut it": tried(os.ftruncate, file, 0),
    "map it to write": tried(lambda: mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_WRITE)),
    "others by our own directory": tried(opened, f"../../{pid}/environ", os.O_RDONLY, descriptors),
    "the system by our own directory": tried(opened, "../../sys/kernel/hostname", os.O_RDWR, descriptors),
    "the end of a pipe that is not open": tried(opened, f"/proc/self/fd/{reader}", os.O_WRONLY),
    "memory of another": tried(opened, f"/proc/{pid}/mem", os.O_RDWR),
    "memory of its own, by name": tried(opened, "/proc/self/mem", os.O_RDWR),
    "seize": tried(call, "ptrace", 0x4206, pid, 0, 0),
    "read memory": tried(call, "process_vm_readv", pid, page, 0, page, 0, 0),
    "write memory": tried(call, "process_vm_writev", pid, page, 0, page, 0, 0),
    "a descriptor of another": tried(lambda: call("pidfd_getfd", call("pidfd_open", pid, 0), 0, 0)),
    "signal by a descriptor": tried(
        lambda: call("pidfd_send_signal", call("pidfd_open", pid, 0), 0, None, 0)
    ),
    "signal a thread": tried(call, "tgkill", pid, pid, 0),
    "signal its group": tried(os.killpg, pid, 0),
    "nice": tried(os.setpriority, os.PRIO_PROCESS, pid, 5),
    "affinity": tried(lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0))),
    "scheduler": tried(os.sched_setscheduler, pid, os.SCHED_BATCH, os.sched_param(0)),
    "disk priority": tried(call, "ioprio_set", 1, pid, 2 << 13 | 7),
    "limits": tried(resource.prlimit, pid, resource.RLIMIT_CORE, (0, 0)),
    "place in memory": tried(call, "move_pages", pid, 0, None, None, None, 0),
    "robust list": tried(call, "get_robust_list", pid, page, page),
    "shared memory": tried(call, "shmget", 0, 4096, 0o600),
    "watch a name": tried(
        lambda: call("inotify_add_watch", call("inotify_init1", 0), secret.encode(), 0xFFF)
    ),
    "a ring": tried(call, "io_uring", 1, ctypes.create_string_buffer(120)),
    "a root": tried(call, "chroot", b"/"),
    "words to the log": tried(lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).connect("/dev/log")),
    "tell another": tried(sent_to, pid, lambda end, to: fcntl.fcntl(end, 8, to)),
    "tell its group": tried(sent_to, pid, lambda end, to: fcntl.fcntl(end, 8, -to)),
})
"""
#: What works and is harmless: nobody is told, which the victim says. And what is stated: a pipe has no name,
#: so that Landlock does not keep it.
UNHEARD = {"tell another", "tell its group"}
STATED = {"the end of a pipe that is not open"}
VICTIM = """
import os, signal, time
os.setpgid(0, 0)
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
print("ready", flush=True)
input()
print(len(told), flush=True)
"""


def test_what_it_had_before_the_walls_leads_no_further(granted: Path, hidden: Path) -> None:
    found, told = {}, {}
    for confined in (False, True):
        ours, theirs = socket.socketpair()
        with (
            ours,
            theirs,
            subprocess.Popen(
                [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as victim,
        ):
            assert victim.stdout is not None and victim.stdout.readline() == "ready\n"
            found[confined] = python(
                BESIDE,
                pass_fds=[theirs.fileno()],
                confined=confined,
                granted=str(granted),
                secret=str(hidden / "secret"),
                pid=victim.pid,
                peer=theirs.fileno(),
            )
            told[confined] = victim.communicate("\n", timeout=20)[0]
        if not confined:
            (hidden / "new").rmdir()
            (hidden / "secret").chmod(0o644)
    for name in UNHEARD | STATED:
        assert found[True].pop(name) == "ok"
    assert told[True] == "0\n" != told[False]
    never = {"write to what was opened to read", "cut it", "map it to write"}
    worked = {name for name, said in found[True].items() if said not in DENIED and name not in never}
    assert worked == set(), {name: found[True][name] for name in worked}
    assert {name for name, said in found[False].items() if said == "ok"} >= {
        "the name beside where it stands", "by a directory", "above what is granted", "signal its group",
        "nice", "open it again to write", "others by our own directory", "affinity", *STATED,
    }  # fmt: skip
    assert (hidden / "secret").read_text() == "the secret\n"
