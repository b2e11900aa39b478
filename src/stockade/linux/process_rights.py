"""Give up rights: enter a user namespace, become a user there, keep few capabilities.

For a process with one thread that has just been forked. Python's own functions
change the whole process, or do not exist before 3.12.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_NAME = 1, 4, 15
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38
_CAPABILITIES_3 = 0x20080522
_CLONE_NEWUSER = 0x10000000
#: More numbers of capabilities than any kernel has.
_MOST_CAPABILITIES = 64
#: Above every descriptor; close_range(2) takes no longer for it.
_HIGHEST = 0x7FFFFFFF

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result < 0:
        failed = ctypes.get_errno()
        raise OSError(failed, f"{what}: {os.strerror(failed)}")


def _prctl(option: int, value: int | bytes) -> int:
    argument = ctypes.c_char_p(value) if isinstance(value, bytes) else ctypes.c_ulong(value)
    return int(_libc.prctl(option, argument, ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)))


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, at most 15 bytes."""
    _check(_prctl(_PR_SET_NAME, name.encode()), "the process cannot be named")


def enter_user_namespace(namespace: int) -> None:
    """Enter a user namespace by its descriptor; the process then has every capability in it."""
    _check(_libc.setns(namespace, _CLONE_NEWUSER), "the user namespace cannot be entered")


def become(uid: int | None, gid: int | None) -> None:
    """Drop all groups and become these ids of the namespace; None keeps the present one."""
    try:
        os.setgroups([])
    except PermissionError:
        # A namespace with one id only: its programs keep these groups too, and cannot name them.
        with open("/proc/self/setgroups", encoding="ascii") as file:
            if file.read().strip() != "deny":
                raise
    if gid is not None:
        os.setresgid(gid, gid, gid)
    if uid is not None:
        os.setresuid(uid, uid, uid)


def bound_capabilities(mask: int) -> None:
    """Let this process and its children never again get other capabilities than these."""
    for number in range(_MOST_CAPABILITIES):
        if not mask & (1 << number) and _prctl(_PR_CAPBSET_DROP, number) < 0:
            if ctypes.get_errno() != errno.EINVAL:  # the kernel has no such number
                _check(-1, "the bounding set cannot be reduced")
            return


def keep_capabilities(mask: int) -> None:
    """Keep exactly these capabilities, and gain none from an executed file."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)), "capset")
    _check(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "no_new_privs")


def close_to_debuggers() -> None:
    """Let no process of the same user read this one's memory or trace it; leave no core file."""
    _check(_prctl(_PR_SET_DUMPABLE, 0), "the process cannot be closed to debuggers")


def die_with(parent: int) -> None:
    """Be killed when the thread that forked this process ends; exit now if it has already ended.

    A change of ids clears this, so it comes after them.
    """
    _check(_prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "the process cannot die with its parent")
    if os.getppid() != parent:
        os._exit(1)


def leave_signals() -> None:
    """Undo what the forking process does on signals; the terminal's interrupts are not for us."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)


def keep_descriptors(kept: tuple[int, ...]) -> tuple[int, ...]:
    """Close every descriptor but these, and return their new numbers; the streams lead nowhere."""
    # By way of numbers that none has: dup2 onto a low number could otherwise meet one of them.
    spare = max(*kept, len(kept) + 3) + 1
    for place, descriptor in enumerate(kept):
        os.dup2(descriptor, spare + place, inheritable=False)
    for place in range(len(kept)):
        os.dup2(spare + place, 3 + place, inheritable=False)
    nowhere = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for stream in range(3):
        os.dup2(nowhere, stream, inheritable=False)
    os.closerange(3 + len(kept), _HIGHEST)
    return tuple(range(3, 3 + len(kept)))
