"""Attacks on files: WHAT PATH [OTHER]. Says how the kernel answered each way of doing it."""

import errno
import os
import sys

from common import say, tried


def write(path):
    with open(path, "ab") as file:
        file.write(b"x")


def read(path):
    with open(path, "rb") as file:
        return file.read(4096).decode("utf-8", "replace")


def link_by_descriptor(path, other):
    file = os.open(path, os.O_PATH)
    # Only with a directory does os.link() follow the link.
    os.link(f"/proc/self/fd/{file}", other, src_dir_fd=os.open("/", os.O_PATH), follow_symlinks=True)


def write_now(path):
    file = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(file, b"x")
    os.close(file)


WAYS = {
    "write-now": write_now,
    "chmod": lambda path: os.chmod(path, 0o666),
    "chown": lambda path: os.chown(path, os.getuid(), os.getgid()),
    "utime": lambda path: os.utime(path, (1, 1)),
    "setxattr": lambda path: os.setxattr(path, "user.stockade", b"x"),
    "removexattr": lambda path: os.removexattr(path, "user.stockade"),
    "truncate": lambda path: os.truncate(path, 0),
    "write": write,
    "rename": lambda path: os.rename(path, path + ".moved"),
    "unlink": os.unlink,
    "create": lambda path: os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)),
    "mkdir": os.mkdir,
    "stat": os.stat,
    "lstat": os.lstat,
    "open": lambda path: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)),
    "open-path": lambda path: os.close(os.open(path, os.O_PATH)),
    "readlink": os.readlink,
    "statfs": os.statvfs,
    "chdir": os.chdir,
    "execute": lambda path: os.execv(path, [path]),
}
BETWEEN = {
    "link": os.link,
    "link-by-descriptor": link_by_descriptor,
    "move": os.rename,
    "symlink-and-read": lambda path, other: os.symlink(path, other) or read(other),
}


def main():
    ways, path, *rest = sys.argv[1:]
    verdict = {}
    for way in ways.split(","):
        if way == "read":
            try:
                verdict[way] = read(path)
            except OSError as error:
                verdict[way] = errno.errorcode[error.errno]
        elif way in BETWEEN:
            verdict[way] = tried(BETWEEN[way], path, rest[0])
        else:
            verdict[way] = tried(WAYS[way], path)
    say(verdict)


main()
