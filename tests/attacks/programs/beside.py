"""Goes past the rights to files: READABLE file, UNGRANTED file, DATAGRAM and STREAM sockets, KEY.

Says how each way was answered.
"""

import array
import ctypes
import fcntl
import os
import socket
import sys

from common import opened, say, syscall, tried

libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {
    "x86_64": {"shmget": 29, "semget": 64, "msgget": 68, "mq_open": 240, "inotify_init1": 294},
    "aarch64": {"shmget": 194, "semget": 190, "msgget": 186, "mq_open": 180, "inotify_init1": 26},
}[os.uname().machine]
FS_IOC_GETFLAGS, FS_IOC_SETFLAGS = 0x80086601, 0x40086602


def set_flags(file):
    """As they are: that it could, is enough."""
    flags = array.array("l", [0])
    try:
        fcntl.ioctl(file, FS_IOC_GETFLAGS, flags)
    except OSError:
        flags[0] = 0x80000  # EXTENTS, which every file of ext4 has
    fcntl.ioctl(file, FS_IOC_SETFLAGS, flags)


def watch(path):
    instance, answer = syscall(NUMBERS["inotify_init1"], 0)
    if answer != "ok":
        return answer
    return "ok" if libc.inotify_add_watch(instance, path.encode(), 0xFFF) >= 0 else "EACCES"


def datagram_of_a_pair(path):
    one, _ = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    one.sendto(b"x", path)


def stream_of_a_pair(path):
    one, two = socket.socketpair()
    two.close()
    one.connect(path)


def main():
    readable, ungranted, datagrams, streams, queue = sys.argv[1:]
    file = os.open(readable, os.O_RDONLY)
    anything = os.open(ungranted, os.O_PATH)
    say(
        {
            "fchmod": tried(os.fchmod, file, 0o777),
            "fchown": tried(os.fchown, file, os.getuid(), os.getgid()),
            "futimens": tried(os.utime, file, (1, 1)),
            "fsetxattr": tried(os.setxattr, file, "user.stockade", b"x"),
            "set-flags": tried(set_flags, file),
            "chmod-by-path": tried(os.chmod, ungranted, 0o777),
            "chmod-by-descriptor": tried(os.chmod, f"/proc/self/fd/{anything}", 0o777),
            "utime-now": tried(os.utime, ungranted),
            "getxattr": tried(os.getxattr, ungranted, "user.secret"),
            "listxattr": tried(os.listxattr, ungranted),
            "inotify": watch(os.path.dirname(ungranted)),
            "reopen": opened(f"/proc/self/fd/{anything}"),
            "reopen-to-write": opened(f"/proc/self/fd/{file}", os.O_WRONLY),
            "datagram": tried(datagram_of_a_pair, datagrams),
            "stream": tried(stream_of_a_pair, streams),
            "shm": syscall(NUMBERS["shmget"], int(queue), 4096, 0)[1],
            "mq": syscall(NUMBERS["mq_open"], f"stockade-{queue}".encode(), os.O_RDWR, 0, 0)[1],
            "ptmx": opened("/dev/ptmx", os.O_RDWR | os.O_NOCTTY),
            "terminals": opened("/dev/pts"),
        }
    )


main()
