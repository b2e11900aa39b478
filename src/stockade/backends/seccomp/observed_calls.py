"""The filter of an observed sandbox: it notifies the observer where the ordinary one refuses a call.

That is: on principle, with EPERM, or an option of a socket that is closed. It also notifies of the calls
below, which the ordinary filter allows. Everything else stays as it is: what is absent, as calls are that C
libraries try as a matter of course, stays a plain refusal, and whatever ends a program ends it. The kernel
obeys a refusal before a notification, so this is another filter, not one more.
"""

from __future__ import annotations

import struct

from stockade.backends.seccomp import bpf
from stockade.backends.seccomp.syscalls import by_number

CALLS = """
open openat openat2 creat execve execveat connect bind rename renameat renameat2 link linkat symlink symlinkat
mkdir mkdirat rmdir unlink unlinkat
"""
#: Calls that change what the observer may do for a process, or how: one argument does not hide them. The C
#: library's `syscall` passes whatever is on the stack for the arguments that a caller leaves out.
CHANGES = {
    "chdir": "always",
    "fchdir": "always",
    "umask": "always",
    "landlock_restrict_self": "always unless thrice marked",
}
_LINE = struct.Struct("=HBBI")


def notifying(program: bytes) -> bytes:
    """Return the filter that notifies of what the ordinary one, `program`, refuses, and of observed calls."""
    lines = [_LINE.unpack_from(program, at) for at in range(0, len(program), _LINE.size)]
    allow, refused = bpf.ENDS["allow"], (bpf.ENDS["refuse"], bpf.LAST_ENDS["no such option"])
    changed = []
    for place, (code, if_true, if_false, operand) in enumerate(lines):
        if code == bpf.GIVE and operand in refused:
            changed.append(_LINE.pack(code, 0, 0, bpf.NOTIFY))
        elif code == bpf.GIVE and operand == allow:
            changed.append(_LINE.pack(bpf.JUMP, 0, 0, len(lines) - place - 1))
        else:
            changed.append(_LINE.pack(code, if_true, if_false, operand))
    ends = dict.fromkeys(CALLS.split(), "notify") | CHANGES
    return b"".join(changed) + bpf.notify_of(by_number(ends))
