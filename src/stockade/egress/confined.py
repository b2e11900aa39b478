"""The first lines of an egress process: take away what only its start needed, then relay.

The gate has raised the walls and made this process, a copy of the template. The calls that it needed for that
(fork above all) are taken away here by a second system call filter, before any byte of a program or of the
network is read. The supervisor then sees in /proc that there is one filter more, on which process, and starts
nothing otherwise; that the filter is the one that it chose is this process's word.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket

from stockade.linux.sha256 import sha256

PR_SET_DUMPABLE, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 4, 22, 2
#: Of struct sock_filter.
INSTRUCTION = 8
#: Looked up once, in the template.
_KERNEL = ctypes.CDLL(None, use_errno=True)


class _FilterProgram(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def install_filter(program: bytes) -> str:
    """Install a system call filter, for good, and return the SHA-256 of its bytes."""
    given = _FilterProgram(len(program) // INSTRUCTION, program)
    if _KERNEL.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(given), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return sha256(program).hexdigest()


def confine(control: int, program: str) -> None:
    """Become unreadable to debuggers, install the filter, given in hexadecimal, and report it."""
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    digest = install_filter(bytes.fromhex(program))
    with socket.socket(fileno=os.dup(control)) as supervisor:
        supervisor.send(json.dumps({"filter": digest}).encode())
