"""Asks for a little of what the whole machine shares: WHAT [FILE]. Says what the kernel answered."""

import ctypes
import errno
import fcntl
import mmap
import os
import socket
import struct
import sys

from common import say, syscall, tried

X86 = {
    "seccomp": 317,
    "prctl": 157,
    "memfd_secret": 447,
    "memfd_create": 319,
    "shmget": 29,
    "shmctl": 31,
    "mmap": 9,
}
ARM = {
    "seccomp": 277,
    "prctl": 167,
    "memfd_secret": 447,
    "memfd_create": 279,
    "shmget": 194,
    "shmctl": 195,
    "mmap": 222,
}
CALLS = {"x86_64": X86, "aarch64": ARM}[os.uname().machine]
HIGH = 1 << 32  # the kernel does not look at it
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SET_MODE_STRICT, SET_MODE_FILTER, NEW_LISTENER = 0, 1, 8
SO_ATTACH_FILTER, SO_ATTACH_REUSEPORT_CBPF = 26, 51
F_SET_RW_HINT = 1036
MAP_NORESERVE, MAP_HUGETLB, MFD_HUGETLB, SHM_HUGETLB, SHM_NORESERVE = 0x4000, 0x40000, 4, 0o4000, 0o10000
HUGE = 2 << 20


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


def program():
    """The longest filter that there is: it lets everything pass."""
    everything = struct.pack("=HBBI", 0x06, 0, 0, 0x7FFF0000) * 4096
    held = ctypes.create_string_buffer(everything, len(everything))
    made = Program(4096, ctypes.addressof(held))
    made.held = held
    return made


def in_child(function):
    """The answer of a process of its own, which a filter changes for good."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, function().encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, encoding="ascii") as said:
        return said.read()


def filters(_):
    made = program()

    def loading(name, *arguments):
        def load():
            syscall(CALLS["prctl"], PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            return syscall(CALLS[name], *arguments)[1]

        return in_child(load)

    at = ctypes.addressof(made)
    return {
        "seccomp": loading("seccomp", SET_MODE_FILTER, 0, at),
        "listener": loading("seccomp", SET_MODE_FILTER, NEW_LISTENER, at),
        "listener, high": loading("seccomp", SET_MODE_FILTER, NEW_LISTENER | HIGH, at),
        "prctl": loading("prctl", PR_SET_SECCOMP, 2, at, 0, 0),
        "prctl, high": loading("prctl", PR_SET_SECCOMP | HIGH, 2, at, 0, 0),
    }


def socket_filters(_):
    one, other = socket.socketpair()
    held = bytes(program())
    return {
        "filter": tried(one.setsockopt, socket.SOL_SOCKET, SO_ATTACH_FILTER, held),
        "harmless": tried(other.setsockopt, socket.SOL_SOCKET, socket.SO_SNDBUF, 65536),
    }


def port_filters(_):
    """Of sockets that share a port."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        end.bind(("127.0.0.1", 0))
        return tried(end.setsockopt, socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, bytes(program()))


def huge_pages(_):
    """None is touched, nor set aside: a machine that has none gives these too."""
    found = {}
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE | MAP_HUGETLB
    for name, high in (("mmap", 0), ("mmap, high", HIGH)):
        found[name] = syscall(CALLS["mmap"], 0, HUGE, 3, flags | high, -1, 0)[1]
    found["memfd"] = syscall(CALLS["memfd_create"], b"huge", MFD_HUGETLB)[1]
    number, found["shm"] = syscall(CALLS["shmget"], 0, HUGE, 0o1600 | SHM_HUGETLB | SHM_NORESERVE)
    if number >= 0:
        syscall(CALLS["shmctl"], number, 0, 0)  # IPC_RMID
    return found


def secret_memory(_):
    return syscall(CALLS["memfd_secret"], 0)[1]


def hint(path):
    """How long the data of a file will live, through a descriptor that can only read."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.fcntl(descriptor, F_SET_RW_HINT, struct.pack("=Q", 2))
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"


ways = {
    "filters": filters, "socket filters": socket_filters, "port filters": port_filters,
    "huge pages": huge_pages, "secret memory": secret_memory, "hint": hint,
}  # fmt: skip
say(ways[sys.argv[1]](*sys.argv[2:] or [""]))
