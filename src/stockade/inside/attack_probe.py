"""Harmless attacks, tried behind each contender's walls. The bench passes this file to a bare Python as text.

Each returns whether it got through. Where success would change the host (a
mount, a write), the call is made so that it fails after the permission check,
and the errno shows whether the check passed.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import socket
import sys
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)
ARM = platform.machine() == "aarch64"
IOCTL, KEYCTL = (29, 219) if ARM else (16, 250)
IO_URING_SETUP, FSOPEN = 425, 430
CLONE_NEWUSER, PTRACE_TRACEME, TIOCSTI = 0x10000000, 0, 0x5412
USER_KEYRING = -4


def call(number: int, *arguments: object) -> int:
    """Make a system call and return its errno; 0 if it succeeded."""
    return ctypes.get_errno() if libc.syscall(ctypes.c_long(number), *arguments) < 0 else 0


def in_child(action: Callable[[], bool]) -> bool:
    """Try an attack that changes its process, in a child process."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if action() else 1)
    return os.waitpid(pid, 0)[1] == 0


def read(path: str) -> bool:
    with open(path, "rb") as file:
        return bool(file.read())


def chmod(path: str) -> bool:
    os.chmod(path, 0o600)  # the mode that it has already
    return True


def signal(pid: int) -> bool:
    os.kill(pid, 0)
    return True


def write_system() -> bool:
    os.close(os.open("/usr/bin/env", os.O_WRONLY))
    return True


def connect(family: int, address: object) -> bool:
    with socket.socket(family) as client:
        client.settimeout(1)
        client.connect(address)  # type: ignore[arg-type]
    return True


def mount() -> bool:
    # A file system that does not exist: the kernel returns ENODEV after the permission check.
    done = libc.mount(b"none", b"/", b"stockade-none", 0, None)
    return done == 0 or ctypes.get_errno() == errno.ENODEV


def push_input() -> bool:
    # /dev/null is not a terminal: ENOTTY means that no filter refused it. The kernel ignores the upper bits.
    null = os.open("/dev/null", os.O_RDONLY)
    numbers = (TIOCSTI, TIOCSTI | 1 << 32)
    return any(call(IOCTL, null, ctypes.c_ulong(number), b"x") == errno.ENOTTY for number in numbers)


def capabilities() -> bool:
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("CapEff:"))
    return int(line.split()[1], 16) != 0


def attacks(secret: str, supervisor: int, port: int, abstract: str) -> dict[str, Callable[[], bool]]:
    return {
        "read a secret outside the grants": lambda: read(secret),
        "learn that it exists": lambda: bool(os.stat(secret)),
        "list its directory": lambda: os.listdir(os.path.dirname(secret)) is not None,
        "change its mode": lambda: chmod(secret),
        "write to /usr": write_system,
        "see the host's processes": lambda: os.path.exists(f"/proc/{supervisor}"),
        "signal its supervisor": lambda: signal(supervisor),
        "reach a server on the host's loopback": lambda: connect(socket.AF_INET, ("127.0.0.1", port)),
        "reach an abstract socket of the host": lambda: connect(socket.AF_UNIX, "\0" + abstract),
        "have capabilities": capabilities,
        "make a user namespace": lambda: in_child(lambda: libc.unshare(CLONE_NEWUSER) == 0),
        "mount": mount,
        "mount by fsopen": lambda: call(FSOPEN, b"stockade-none", 0) in (0, errno.ENODEV),
        "be traced (ptrace)": lambda: in_child(lambda: libc.ptrace(PTRACE_TRACEME, 0, None, None) == 0),
        "use the user's keyring": lambda: call(KEYCTL, 0, USER_KEYRING, 0) in (0, errno.ENOKEY),
        # A null pointer for its parameters: the kernel returns EFAULT after the permission check.
        "use io_uring": lambda: call(IO_URING_SETUP, 1, None) in (0, errno.EFAULT),
        "pass TIOCSTI to the kernel": push_input,
    }


def main() -> None:
    secret, supervisor, port, abstract = sys.argv[1:]
    results = {}
    for name, attack in attacks(secret, int(supervisor), int(port), abstract).items():
        try:
            results[name] = "OPEN" if attack() else "held"
        except OSError:
            results[name] = "held"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
