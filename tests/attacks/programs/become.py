"""Tries to be somebody else, and to raise capabilities."""

import ctypes
import os

from common import say, syscall, tried

CAPSET = {"x86_64": 126, "aarch64": 91}[os.uname().machine]
OTHER = 1 if os.getuid() == 0 else 0


def every():
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    return syscall(CAPSET, header, (ctypes.c_uint32 * 6)(*[0xFFFFFFFF] * 2, 0, *[0x1FF] * 2, 0))[1]


say({
    "setresuid": tried(os.setresuid, OTHER, OTHER, OTHER),
    "setresgid": tried(os.setresgid, OTHER, OTHER, OTHER),
    "setgroups": tried(os.setgroups, [OTHER]),
    "capset": every(),
    "nice": tried(os.setpriority, os.PRIO_PROCESS, 0, -5),
})  # fmt: skip
