"""Jobs that take locks of the whole kernel, as often as they can.

The bench passes this file to a bare Python as text.

With the name of a job and a number of tasks, it starts so many processes that do nothing but the job, and
prints again and again how often the job was done, until it is killed. A job that the kernel or a wall refuses
counts too: it may have taken the lock before it was refused.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import itertools
import mmap
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable

LIBC = ctypes.CDLL(None, use_errno=True)
LOOPBACK = 1
IP_ADD_MEMBERSHIP, IPV6_JOIN_GROUP = 35, 20
RTM_GETLINK, RTM_NEWADDR, RTM_GETADDR, RTM_GETROUTE = 18, 20, 22, 26
NLM_F_REQUEST, NLM_F_DUMP = 1, 0x300
SIOCGIFCONF, SIOCSIFFLAGS, SIOCETHTOOL, ETHTOOL_GLINK = 0x8912, 0x8914, 0x8946, 10
LOCKS = 512  # of one file: more would only take longer to search
WATCHES = 128
CLOCK_MONOTONIC, SIGEV_NONE = 1, 1

#: Does one thing each time that it is called.
Step = Callable[[], object]


def spin() -> Step:
    """Compute: the control."""
    return lambda: sum(range(64))


def multicast() -> Step:
    """Join groups of IPv4 and IPv6."""
    four, six = (socket.socket(family, socket.SOCK_DGRAM) for family in (socket.AF_INET, socket.AF_INET6))
    numbers = itertools.count()

    def step() -> None:
        number = struct.pack("!I", next(numbers) & 0xFFFFFF | 0xEF000000)
        with contextlib.suppress(OSError):
            four.setsockopt(0, IP_ADD_MEMBERSHIP, number + bytes(4) + struct.pack("=i", LOOPBACK))
        with contextlib.suppress(OSError):
            group = b"\xff\x15" + bytes(10) + number
            six.setsockopt(41, IPV6_JOIN_GROUP, group + struct.pack("=I", LOOPBACK))

    return step


def dumps() -> Step:
    """List interfaces, addresses and routes by netlink."""
    end = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
    kinds = itertools.cycle((RTM_GETLINK, RTM_GETADDR, RTM_GETROUTE))

    def step() -> None:
        end.send(struct.pack("=IHHII", 32, next(kinds), NLM_F_REQUEST | NLM_F_DUMP, 0, 0) + bytes(16))
        while struct.unpack_from("=IH", end.recv(65536))[1] != 3:  # NLMSG_DONE
            pass

    return step


def addresses() -> Step:
    """Add addresses, which a program may not."""
    end = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)

    def step() -> None:
        body = struct.pack("=BBBBI", socket.AF_INET, 32, 0, 0, LOOPBACK) + bytes(8)
        end.send(struct.pack("=IHHII", 32, RTM_NEWADDR, NLM_F_REQUEST | 4, 0, 0) + body)
        end.recv(4096)

    return step


def interfaces() -> Step:
    """Ask for interfaces by ioctl, and change their flags, which a program may not."""
    end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    room = ctypes.create_string_buffer(4096)
    link = ctypes.create_string_buffer(struct.pack("=I", ETHTOOL_GLINK), 256)

    def step() -> None:
        for request, given in (
            (SIOCGIFCONF, struct.pack("=i4xQ", len(room), ctypes.addressof(room))),
            (SIOCETHTOOL, struct.pack("=16sQ16x", b"lo", ctypes.addressof(link))),
            (SIOCSIFFLAGS, struct.pack("=16sH22x", b"lo", 1)),
        ):
            with contextlib.suppress(OSError):
                fcntl.ioctl(end, request, given)

    return step


def watches() -> Step:
    """Make inotify instances with watches, and close them."""
    places = [os.path.join("/proc/self", name).encode() for name in os.listdir("/proc/self")][:WATCHES]

    def step() -> None:
        instance = LIBC.inotify_init()
        for place in places:
            LIBC.inotify_add_watch(instance, place, 2)
        if instance >= 0:
            os.close(instance)

    return step


def timers() -> Step:
    """Make POSIX timers, and remove them."""
    event = ctypes.create_string_buffer(struct.pack("=Qii", 0, 0, SIGEV_NONE), 64)
    made = (ctypes.c_void_p * 256)()

    def step() -> None:
        found = [
            place for place in range(256)
            if not LIBC.timer_create(CLOCK_MONOTONIC, event, ctypes.byref(made, place * 8))
        ]  # fmt: skip
        for place in found:
            LIBC.timer_delete(ctypes.c_void_p(made[place]))

    return step


def queues() -> Step:
    """Make POSIX message queues, and remove them."""
    name = f"/q{os.getpid()}".encode()

    def step() -> None:
        queue = LIBC.mq_open(name, os.O_CREAT | os.O_RDWR, 0o600, None)
        if queue >= 0:
            os.close(queue)
        LIBC.mq_unlink(name)

    return step


def signals() -> Step:
    """Queue signals that stay pending, and take them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
    own = os.getpid()

    def step() -> None:
        for _ in range(64):
            LIBC.sigqueue(own, signal.SIGRTMIN, None)
        for _ in range(64):
            signal.sigtimedwait({signal.SIGRTMIN}, 0)

    return step


def signals_to_all() -> Step:
    """Ask whether every process may be signalled: the kernel looks at all of the machine."""
    return lambda: LIBC.kill(-1, 0)


def sessions() -> Step:
    """Change process groups."""
    return lambda: (LIBC.setpgid(0, 0), LIBC.setsid())


def forks() -> Step:
    """Start processes that end at once."""

    def step() -> None:
        with contextlib.suppress(OSError):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)

    return step


def syncs() -> Step:
    """Write a little, and flush everything."""
    place = tempfile.mkdtemp()
    directory = os.open(place, os.O_RDONLY)

    def step() -> None:
        with open(f"{place}/file", "wb") as file:
            file.write(bytes(4096))
        LIBC.syncfs(directory)
        LIBC.sync()

    return step


def locks() -> Step:
    """Lock many ranges of a file."""
    file, _ = tempfile.mkstemp()

    def step() -> None:
        for place in range(LOCKS):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, 2 * place)
        fcntl.lockf(file, fcntl.LOCK_UN)

    return step


def tables() -> Step:
    """Read the largest tables of /proc."""
    held = [mmap.mmap(-1, 4096, prot=1 + number % 2) for number in range(2000)]
    names = ("self/smaps", "self/maps", "self/mountinfo", "net/tcp", "net/unix", "stat", "meminfo", "cgroups")

    def step() -> int:
        for name in names:
            with contextlib.suppress(OSError), open(f"/proc/{name}", "rb") as file:
                while file.read(1 << 16):
                    pass
        return len(held)

    return step


def nested_polls() -> Step:
    """Put an epoll into another: the kernel looks for loops under one lock."""
    outer, inner = select.epoll(), select.epoll()
    chain = [outer]
    for _ in range(3):
        chain.append(select.epoll())
        chain[-1].register(chain[-2], select.EPOLLIN)

    def step() -> None:
        outer.register(inner, select.EPOLLIN)
        outer.unregister(inner)

    return step


def passed_sockets() -> Step:
    """Leave sockets in flight that only they themselves refer to: the kernel collects them under one lock."""

    def step() -> None:
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        with one, other, contextlib.suppress(OSError):
            for _ in range(8):
                held = array.array("i", [one.fileno(), other.fileno()])
                one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, held)])

    return step


def ports() -> Step:
    """Bind many ports, and give them back."""

    def step() -> None:
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for _ in range(256):
                held.enter_context(socket.create_server(("127.0.0.1", 0)))

    return step


def namespaces() -> Step:
    """Make user and network namespaces, which a program may not."""
    return lambda: LIBC.unshare(0x10000000 | 0x40000000)


def memory() -> Step:
    """Map and unmap memory that many processes share."""

    def step() -> None:
        with mmap.mmap(-1, 1 << 20) as held:
            held[:: 1 << 12] = b"x" * (1 << 8)

    return step


def barriers() -> Step:
    """Ask for a memory barrier on every processor."""
    return lambda: LIBC.syscall(ctypes.c_long(324 if os.uname().machine == "x86_64" else 283), 1, 0, 0)


JOBS: dict[str, Callable[[], Step]] = {
    "spin": spin, "multicast": multicast, "dumps": dumps, "addresses": addresses, "interfaces": interfaces,
    "watches": watches, "timers": timers, "queues": queues, "signals": signals,
    "signals-to-all": signals_to_all, "sessions": sessions, "forks": forks, "syncs": syncs, "locks": locks,
    "tables": tables, "nested-polls": nested_polls, "passed-sockets": passed_sockets, "ports": ports,
    "namespaces": namespaces, "memory": memory, "barriers": barriers,
}  # fmt: skip


def _repeat(job: Step, counts: memoryview, place: int) -> None:
    while True:
        with contextlib.suppress(OSError):
            job()
        counts[place] += 1


def _start(name: str, counts: memoryview) -> None:
    """Start the processes; none begins before all are there, or the first would starve the rest."""
    waiting, begin = os.pipe()
    with contextlib.suppress(OSError):  # the limit of tasks
        for place in range(len(counts)):
            if os.fork() == 0:
                os.close(begin)
                os.read(waiting, 1)
                _repeat(JOBS[name](), counts, place)
    os.close(begin)


def main(name: str, tasks: int) -> None:
    """Do a job in many processes; print again and again how often it was done, until killed."""
    counts = memoryview(mmap.mmap(-1, 8 * tasks)).cast("Q")
    _start(name, counts)
    while True:
        time.sleep(0.2)
        print(sum(counts), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
