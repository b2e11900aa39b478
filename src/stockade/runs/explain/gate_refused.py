"""Explain why the gate refused to raise the walls."""

from __future__ import annotations

import errno
import os

from stockade.errors import SetupError, UnsupportedError
from stockade.gate import wire
from stockade.host.advice import FILTERS_USED_UP, NO_MORE_FILTERS, UNTRANSLATED

#: What the user can do about a failure, by operation and errno.
HINTS = {
    ("view", errno.EINVAL): "its file system cannot be shown through an overlay: copy what is needed, "
    "or, if it is the toolchain of the command, do without: --no-toolchain",
    ("mask", errno.EACCES): "it is in a directory that you may not enter: deny that directory instead",
    ("bind", errno.ENOENT): "it was removed after Stockade looked it up: try again",
    ("bind", errno.ELOOP): "a directory on the way was replaced by a link after Stockade looked it up",
    (
        "grant",
        errno.ELOOP,
    ): "it, or a directory on the way, was replaced by a link after Stockade looked it up: try again",
    ("place", errno.ENOENT): "it was removed after Stockade looked it up: try again",
    (
        "place",
        errno.ELOOP,
    ): "it, or a directory on the way, was replaced by a link after Stockade looked it up: try again",
    ("bind", errno.ESTALE): "another file has replaced it since Stockade looked it up: try again",
    (
        "overlay",
        errno.EINVAL,
    ): 'the file system cannot be the lower layer of an overlay: use mode "ro" or "rw"',
    ("keyring", errno.EDQUOT): "each sandbox takes one of this user's keys: see sysctl kernel.keys.maxkeys",
    ("namespaces", errno.EPERM): "`stockade doctor` says what forbids user namespaces here",
    ("namespaces", errno.ENOSPC): "the limit of namespaces is reached: see sysctl user.max_user_namespaces",
    ("seccomp", UNTRANSLATED): FILTERS_USED_UP[1],
    ("seccomp", errno.ENOSYS): NO_MORE_FILTERS[1],
    (
        "seccomp",
        errno.EBUSY,
    ): "leave out --explain (explain=True), or run Stockade outside of the container",
    ("seccomp", errno.EINVAL): "leave out --explain (explain=True): observing programs takes Linux 5.19",
    (
        "seccomp",
        errno.ENOMEM,
    ): "memory is short, or the process that started Stockade already has filters of 32768 "
    "instructions: start it from a plain login shell",
}
#: The reason, where the kernel's words for the errno do not explain it.
REASONS = {
    ("seccomp", UNTRANSLATED): FILTERS_USED_UP[0],
    ("seccomp", errno.ENOSYS): NO_MORE_FILTERS[0],
    ("seccomp", errno.EBUSY): "a process outside, such as a container's manager, observes the calls already",
    ("seccomp", errno.EINVAL): "this kernel cannot notify an observer",
}
#: How bubblewrap reports it: in words only.
_SAID_BY_HELPER = f"PR_SET_SECCOMP): Unknown error {UNTRANSLATED}"


def no_copies(backend: str) -> UnsupportedError:
    """Return the error for a backend whose sandboxes cannot be copies of a template."""
    return UnsupportedError(
        f"warm Python: the {backend} backend cannot copy a sandbox from a template",
        hint='write backend = "native" or "landlock", or run python3 as a command',
    )


def why(operation: str, error: int) -> tuple[str, str]:
    """Return why the gate could not do an operation, and what to do about it."""
    reason = "it is not the same file any more" if error == errno.ESTALE else os.strerror(error)
    return (
        REASONS.get((operation, error), reason),
        HINTS.get((operation, error), "`stockade doctor` shows what this machine can do"),
    )


def failure(reply: wire.Reply) -> SetupError:
    """Return the gate's refusal as an error, with what to do about it."""
    operation, error, what = reply.operation, reply.error, f" {reply.text}" if reply.text else ""
    if operation == "helper" and reply.text.endswith(_SAID_BY_HELPER):
        operation, error, what = "seccomp", UNTRANSLATED, ""
    reason, hint = why(operation, error)
    # Bubblewrap reports no errno, only words.
    problem = f"{operation}{what}: {reason}" if error else f"{operation}{what}"
    return SetupError(f"nothing was run: {problem}", stage=operation, errno=error, hint=hint)
