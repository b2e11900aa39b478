"""Root inside tries to get out, or to get more: TREE, a read-only mount; FILE, not to be changed; PID.

With "control" as a fourth word it is root of namespaces that are thrown away: it then mounts the tree itself.
"""

import ctypes
import os
import signal
import struct
import sys

from common import opened, say, syscall, tried

MOUNT, UMOUNT, PIVOT, CHROOT, UNSHARE, SETNS, PTRACE, MKNOD = 165, 166, 155, 161, 272, 308, 101, 133
if os.uname().machine == "aarch64":
    MOUNT, UMOUNT, PIVOT, CHROOT, UNSHARE, SETNS, PTRACE, MKNOD = 40, 39, 41, 51, 97, 268, 117, None
OPEN_TREE, MOVE_MOUNT, FSOPEN, MOUNT_SETATTR = 428, 429, 430, 442
CAPSET, PRCTL = (126, 157) if MKNOD else (91, 167)
READONLY, BIND, REMOUNT, SEIZE = 1, 4096, 32, 0x4206
NEWUSER, NEWNS, NEWNET = 0x10000000, 0x00020000, 0x40000000
SETFCAP_V2 = struct.pack("<5I", 0x02000001, 1, 0, 0, 0)


def mount(source, target, kind, flags):
    return syscall(MOUNT, source, target, kind, flags, 0)[1]


def set_attributes(tree):
    attributes = ctypes.create_string_buffer(struct.pack("=4Q", 0, READONLY, 0, 0))
    return syscall(MOUNT_SETATTR, -100, tree, 0, attributes, 32)[1]


def enter(name):
    descriptor = os.open(f"/proc/self/ns/{name}", os.O_RDONLY)
    return syscall(SETNS, descriptor, 0)[1]


def pivot(tree):
    os.chdir(tree)
    return syscall(PIVOT, b".", b".")[1]


def more_capabilities():
    head = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    admin = 1 << 21  # CAP_SYS_ADMIN
    sets = ctypes.create_string_buffer(struct.pack("=6I", admin, admin, 0, 0, 0, 0))
    return syscall(CAPSET, head, sets)[1]


def hand_down():
    """The kept capabilities, for programs that are executed as another user."""
    head = ctypes.create_string_buffer(struct.pack("=Ii", 0x20080522, 0))
    sets = ctypes.create_string_buffer(struct.pack("=6I", 1, 1, 1, 0, 0, 0))
    first = syscall(CAPSET, head, sets)[1]
    return first if first != "ok" else syscall(PRCTL, 47, 2, 0, 0, 0)[1]


def attempts(tree, file, pid):
    """What it tries, by its name."""
    path = tree.encode()
    return {
        "mount": lambda: mount(b"none", path, b"tmpfs", 0),
        "bind": lambda: mount(b"/tmp", path, None, BIND),
        "remount": lambda: mount(None, path, None, BIND | REMOUNT),
        "mount_setattr": lambda: set_attributes(path),
        "umount": lambda: syscall(UMOUNT, path, 2)[1],
        "open_tree": lambda: syscall(OPEN_TREE, -100, path, 1)[1],
        "fsopen": lambda: syscall(FSOPEN, b"tmpfs", 0)[1],
        "pivot_root": lambda: pivot(tree),
        "chroot": lambda: syscall(CHROOT, path)[1],
        "unshare user": lambda: syscall(UNSHARE, NEWUSER)[1],
        "unshare mounts": lambda: syscall(UNSHARE, NEWNS)[1],
        "unshare network": lambda: syscall(UNSHARE, NEWNET)[1],
        "setns": lambda: enter("uts"),
        "ptrace": lambda: syscall(PTRACE, SEIZE, pid, 0, 0)[1],
        "read its memory": lambda: opened(f"/proc/{pid}/mem"),
        "write its memory": lambda: opened(f"/proc/{pid}/mem", os.O_WRONLY),
        "read its environment": lambda: tried(lambda: open(f"/proc/{pid}/environ", "rb").read()),
        "enter its root": lambda: tried(os.listdir, f"/proc/{pid}/root"),
        "open its namespace": lambda: opened(f"/proc/{pid}/ns/mnt"),
        "write the file": lambda: opened(file, os.O_WRONLY),
        "append to the file": lambda: opened(file, os.O_WRONLY | os.O_APPEND),
        "chmod": lambda: tried(os.chmod, file, 0o777),
        "chown": lambda: tried(os.chown, file, 0, 0),
        "utime": lambda: tried(os.utime, file, (0, 0)),
        "link": lambda: tried(os.link, file, f"{file}.link"),
        "rename": lambda: tried(os.rename, file, file),
        "make a file beside it": lambda: tried(os.mknod, f"{file}.made", 0o600),
        "give it capabilities": lambda: tried(os.setxattr, file, "security.capability", SETFCAP_V2),
        "more capabilities": more_capabilities,
        "hand capabilities down": hand_down,
        "keep capabilities as another user": lambda: syscall(PRCTL, 8, 1, 0, 0, 0)[1],
        "securebits": lambda: syscall(PRCTL, 28, 1, 0, 0, 0)[1],
        "bounding set": lambda: syscall(PRCTL, 24, 2, 0, 0, 0)[1],
        "real-time priority": lambda: tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
    }


def in_a_child(attempt, alone):
    """The answer of an attempt that may change what later ones stand on, such as the root directory."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if alone:
                syscall(UNSHARE, NEWNS)
            answer = attempt()
        except OSError as error:
            answer = f"error {error.errno}"
        os.write(theirs, answer.encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as end:
        answer = end.read().decode()
    os.waitpid(child, 0)
    return answer


def main():
    tree, file, pid, *control = sys.argv[1:]
    target = int(pid)
    if control:
        mount(b"none", tree.encode(), b"tmpfs", 0)
        mount(None, tree.encode(), None, BIND | REMOUNT | READONLY)
        target = os.fork()
        if target == 0:
            signal.pause()
    found = {name: in_a_child(attempt, control) for name, attempt in attempts(tree, file, target).items()}
    if control:
        os.kill(target, signal.SIGKILL)
        os.waitpid(target, 0)
    say(found)


main()
