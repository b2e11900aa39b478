"""What every attack that is written in Python can import."""

import ctypes
import errno
import json
import os

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def syscall(number, *arguments):
    """A raw system call: its value and "ok", or -1 and the name of the error."""
    passed = [
        ctypes.c_ulong(argument & 0xFFFFFFFFFFFFFFFF) if isinstance(argument, int) else argument
        for argument in arguments
    ]
    ctypes.set_errno(0)
    value = _libc.syscall(ctypes.c_long(number), *passed)
    return value, "ok" if value >= 0 else errno.errorcode[ctypes.get_errno()]


def tried(function, *arguments, **options):
    """ "ok", or the name of the error that the function met."""
    try:
        function(*arguments, **options)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"


def opened(path, flags=os.O_RDONLY):
    """Open a path without doing anything to it."""
    return tried(lambda: os.close(os.open(path, flags | os.O_CLOEXEC)))


def say(verdict):
    print(json.dumps(verdict), flush=True)
