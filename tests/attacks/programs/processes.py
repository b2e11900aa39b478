"""Reads and seizes another process in every way there is: PID of the victim, ADDRESS of something in it."""

import ctypes
import os
import sys

from common import opened, say, syscall

PTRACE_ATTACH, PTRACE_DETACH, PTRACE_SEIZE = 16, 17, 0x4206
NUMBERS = {
    "x86_64": {"ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312},
    "aarch64": {"ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272},
}[os.uname().machine]
PIDFD_OPEN, PIDFD_GETFD, PROCESS_MADVISE = 434, 438, 440


class Part(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def main():
    victim, address = int(sys.argv[1]), int(sys.argv[2])
    verdict = {}
    copy = ctypes.create_string_buffer(8)
    here, there = Part(ctypes.addressof(copy), 8), Part(address, 8)
    for name in ("process_vm_readv", "process_vm_writev"):
        parts = (ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        verdict[name] = syscall(NUMBERS[name], victim, *parts)[1]
    pidfd, verdict["pidfd_open"] = syscall(PIDFD_OPEN, victim, 0)
    verdict["pidfd_getfd"] = syscall(PIDFD_GETFD, pidfd, 0, 0)[1]
    verdict["kcmp"] = syscall(NUMBERS["kcmp"], os.getpid(), victim, 1, 0, 0)[1]
    verdict["memory"] = opened(f"/proc/{victim}/mem")
    verdict["environ"] = opened(f"/proc/{victim}/environ")
    verdict["descriptor"] = opened(f"/proc/{victim}/fd/0", os.O_PATH)
    for name, request in (("seize", PTRACE_SEIZE), ("attach", PTRACE_ATTACH)):
        verdict[name] = syscall(NUMBERS["ptrace"], request, victim, 0, 0)[1]
        if verdict[name] == "ok":
            os.waitpid(victim, 0x40000000) if name == "attach" else None
            break
    say(verdict)


main()
